// SPDX-License-Identifier: Apache-2.0
// Devices, streams and events.
#include "runtime.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <vector>

namespace simd0 {
namespace {

// Devices ----------------------------------------------------------------------------------------------------

// As CUDA_VISIBLE_DEVICES is read: a list of numbers, and what follows the first that is no device is ignored.
std::vector<int> read_visible_devices() {
  const char* list = std::getenv("SIMD0_VISIBLE_DEVICES");
  if (list == nullptr) return {0, 1};
  std::vector<int> found;
  while (*list != '\0') {
    char* end = nullptr;
    const long number = std::strtol(list, &end, 10);
    if (end == list || number < 0 || number >= kPhysicalDevices || found.size() == size_t{kPhysicalDevices}) break;
    found.push_back(static_cast<int>(number));
    if (*end != ',') break;
    list = end + 1;
  }
  return found;
}

const std::vector<int>& visible_devices() {
  static const std::vector<int> devices = read_visible_devices();
  return devices;
}

thread_local c10::DeviceIndex this_thread_device = 0;

// Streams and events -----------------------------------------------------------------------------------------

using Clock = std::chrono::steady_clock;

// Work runs on the host before its call returns. A stream is therefore a counter: each recorded event takes a
// ticket of its stream, and is reached at once.
class Streams {
 public:
  c10::StreamId create(int priority) {
    const std::lock_guard lock(mutex_);
    streams_.push_back({priority, 0, 0});
    return static_cast<c10::StreamId>(streams_.size() - 1);
  }

  uint64_t submit(c10::StreamId id) {
    const std::lock_guard lock(mutex_);
    auto& stream = at(id);
    stream.reached = ++stream.submitted;
    return stream.submitted;
  }

  bool is_reached(c10::StreamId id, uint64_t ticket) {
    const std::lock_guard lock(mutex_);
    return at(id).reached >= ticket;
  }

  bool is_idle(c10::StreamId id) {
    const std::lock_guard lock(mutex_);
    return at(id).reached == at(id).submitted;
  }

 private:
  struct Stream {
    int priority;
    uint64_t submitted;
    uint64_t reached;
  };

  Stream& at(c10::StreamId id) {
    TORCH_CHECK(id >= 0 && static_cast<size_t>(id) < streams_.size(), "simd has no stream ", id);
    return streams_[static_cast<size_t>(id)];
  }

  std::mutex mutex_;
  std::vector<Stream> streams_{{0, 0, 0}};  // stream 0 is the default one
};

Streams& streams_of(c10::DeviceIndex index) {
  check_index(index);
  static auto* streams = new std::array<Streams, kPhysicalDevices>;
  return (*streams)[index];
}

thread_local std::array<c10::StreamId, kPhysicalDevices> this_thread_streams{};

struct Event {
  c10::DeviceIndex device;
  c10::StreamId stream;
  uint64_t ticket;
  Clock::time_point time;
};

// What c10::DeviceGuard, torch.Stream, torch.Event and the autograd engine call.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }

  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Device getDevice() const override { return {kDeviceType, current_device()}; }

  void setDevice(c10::Device device) const override { set_device(device.index()); }

  void uncheckedSetDevice(c10::Device device) const noexcept override { this_thread_device = device.index(); }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    set_device(device.index());
    return before;
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, indexed(device));
  }

  c10::Stream getStream(c10::Device device) const override {
    const c10::Device own = indexed(device);
    check_index(own.index());
    return c10::Stream(c10::Stream::UNSAFE, own, this_thread_streams[own.index()]);
  }

  c10::Stream getNewStream(c10::Device device, int priority) const override {
    const c10::Device own = indexed(device);
    return c10::Stream(c10::Stream::UNSAFE, own, streams_of(own.index()).create(priority));
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high_priority) const override {
    return getNewStream(device, is_high_priority ? -1 : 0);
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    this_thread_streams[stream.device_index()] = stream.id();
    return before;
  }

  bool queryStream(const c10::Stream& stream) const override {
    return streams_of(stream.device_index()).is_idle(stream.id());
  }

  void synchronizeStream(const c10::Stream& stream) const override { check_index(stream.device_index()); }

  void synchronizeDevice(c10::DeviceIndex index) const override { check_index(index); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    const auto ticket = streams_of(stream.device_index()).submit(stream.id());
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {stream.device_index(), stream.id(), ticket, Clock::now()};
  }

  void block(void* event, const c10::Stream& stream) const override {
    check_index(stream.device_index());
    synchronizeEvent(event);
  }

  bool queryEvent(void* event) const override {
    const auto* recorded = static_cast<Event*>(event);
    return recorded == nullptr || streams_of(recorded->device).is_reached(recorded->stream, recorded->ticket);
  }

  void synchronizeEvent(void* event) const override {
    TORCH_INTERNAL_ASSERT(queryEvent(event), "a simd event is reached as soon as it is recorded");
  }

  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    TORCH_CHECK(start != nullptr && end != nullptr, "both events must be recorded before the time between them");
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(end)->time - static_cast<Event*>(start)->time)
        .count();
  }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

 private:
  static c10::Device indexed(c10::Device device) {
    return {kDeviceType, device.has_index() ? device.index() : current_device()};
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

c10::DeviceIndex device_count() noexcept { return static_cast<c10::DeviceIndex>(visible_devices().size()); }

void check_index(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "simd device index ", static_cast<int>(index),
              " is out of range: this process sees ", static_cast<int>(device_count()), " device(s)");
}

int physical_device(c10::DeviceIndex index) {
  check_index(index);
  return visible_devices()[static_cast<size_t>(index)];
}

c10::DeviceIndex current_device() noexcept { return this_thread_device; }

void set_device(c10::DeviceIndex index) {
  check_index(index);
  this_thread_device = index;
}

}  // namespace simd0
