// SPDX-License-Identifier: Apache-2.0
// Memory of the device, and host memory that is pinned for it.
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>

#include "runtime.h"

namespace simd0 {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kPage = 4096;

std::array<std::atomic<bool>, kPhysicalDevices> contexts{};

// Blocks of host memory by address, so that an address inside a block finds it.
class Blocks {
 public:
  struct Block {
    size_t size;
    c10::DeviceIndex device;
  };

  void* create(size_t size, size_t alignment, c10::DeviceIndex device) {
    void* address = std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    TORCH_CHECK_WITH(OutOfMemoryError, address != nullptr, "the host has no ", size, " bytes left");
    const std::lock_guard lock(mutex_);
    blocks_[reinterpret_cast<uintptr_t>(address)] = {size, device};
    return address;
  }

  Block destroy(void* address) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(reinterpret_cast<uintptr_t>(address));
    const Block block = found->second;
    blocks_.erase(found);
    std::free(address);
    return block;
  }

  std::optional<Block> find(const void* address) const {
    const auto value = reinterpret_cast<uintptr_t>(address);
    const std::lock_guard lock(mutex_);
    auto next = blocks_.upper_bound(value);
    if (next == blocks_.begin()) return std::nullopt;
    --next;
    if (value >= next->first + next->second.size) return std::nullopt;
    return next->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<uintptr_t, Block> blocks_;
};

// Never destroyed: tensors that outlive main() still give their memory back.
Blocks& device_blocks() {
  static auto* blocks = new Blocks;
  return *blocks;
}

Blocks& pinned_blocks() {
  static auto* blocks = new Blocks;
  return *blocks;
}

// torch.accelerator.memory_stats() and its like read the figures of a DeviceAllocator.
class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    const c10::DeviceIndex index = current_device();
    check_index(index);
    contexts[index] = true;
    const c10::Device device(kDeviceType, index);
    if (size == 0) return {nullptr, nullptr, &release, device};
    count(index, static_cast<int64_t>(size));
    void* address = nullptr;
    try {
      address = device_blocks().create(size, kAlignment, index);
    } catch (...) {
      count(index, -static_cast<int64_t>(size));
      throw;
    }
    return {address, address, &release, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {}  // nothing is cached

  void recordStream(const c10::DataPtr&, c10::Stream) override {}  // work is over before its memory can be freed

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    check_index(index);
    const std::lock_guard lock(mutex_);
    return stats_[index];
  }

  void resetAccumulatedStats(c10::DeviceIndex index) override {
    each_figure(index, [](auto& figure) { figure.reset_accumulated(); });
  }

  void resetPeakStats(c10::DeviceIndex index) override {
    each_figure(index, [](auto& figure) { figure.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    return {kMemoryBytes - static_cast<size_t>(getDeviceStats(index).allocated_bytes[0].current), kMemoryBytes};
  }

  // Adds a block of `bytes`, or takes one away when they are negative.
  void count(c10::DeviceIndex index, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    auto& stats = stats_[index];
    const auto used = static_cast<size_t>(stats.allocated_bytes[0].current);
    if (bytes > 0 && static_cast<size_t>(bytes) > kMemoryBytes - used) {
      ++stats.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "simd:", static_cast<int>(index), " is out of memory: ", bytes,
                       " bytes were asked for, ", kMemoryBytes - used, " of ", kMemoryBytes, " are free");
    }
    for (auto* figure : {&stats.allocation, &stats.active, &stats.segment}) change(*figure, bytes > 0 ? 1 : -1);
    for (auto* figure : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes, &stats.requested_bytes}) {
      change(*figure, bytes);
    }
    ++(bytes > 0 ? stats.num_device_alloc : stats.num_device_free);
  }

 private:
  using StatArray = decltype(c10::CachingDeviceAllocator::DeviceStats::allocation);

  static void release(void* address);

  static void change(StatArray& figure, int64_t by) {
    if (by > 0) figure[0].increase(static_cast<size_t>(by));  // 0: the sum over all pools; there are no pools
    if (by < 0) figure[0].decrease(static_cast<size_t>(-by));
  }

  template <typename Function>
  void each_figure(c10::DeviceIndex index, Function function) {
    check_index(index);
    const std::lock_guard lock(mutex_);
    auto& stats = stats_[index];
    for (auto* figure : {&stats.allocation, &stats.active, &stats.segment, &stats.allocated_bytes, &stats.active_bytes,
                         &stats.reserved_bytes, &stats.requested_bytes}) {
      function((*figure)[0]);
    }
  }

  std::mutex mutex_;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kPhysicalDevices> stats_;
};

DeviceMemory& device_memory() {
  static auto* memory = new DeviceMemory;
  return *memory;
}

void DeviceMemory::release(void* address) {
  if (address == nullptr) return;
  const auto block = device_blocks().destroy(address);
  device_memory().count(block.device, -static_cast<int64_t>(block.size));
}

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    void* address = size == 0 ? nullptr : pinned_blocks().create(size, kPage, -1);
    return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }

 private:
  static void release(void* address) {
    if (address != nullptr) pinned_blocks().destroy(address);
  }
};

const bool allocator_is_set = (c10::SetAllocator(kDeviceType, &device_memory()), true);

}  // namespace

bool has_context(c10::DeviceIndex index) noexcept { return index >= 0 && index < device_count() && contexts[index]; }

c10::DeviceAllocator& device_allocator() { return device_memory(); }

c10::Allocator& pinned_allocator() {
  static auto* memory = new PinnedMemory;
  return *memory;
}

bool is_pinned(const void* address) { return pinned_blocks().find(address).has_value(); }

c10::DeviceIndex owner(const void* address) {
  const auto block = device_blocks().find(address);
  return block.has_value() ? block->device : c10::DeviceIndex{-1};
}

}  // namespace simd0
