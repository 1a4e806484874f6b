// SPDX-License-Identifier: Apache-2.0
#include "llm/decoder/expert_cache.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <system_error>
#include <utility>

#include "aio/handle.h"
#include "common/huge_pages.h"
#include "llm/decoder/weight_file.h"
#include "llm/errors.h"

namespace anyaccel::llm {
namespace {

using Clock = std::chrono::steady_clock;

// Runs after which a use counts half: benchmarks/experts_beyond_memory.py.
constexpr double kHalfLife = 16;
// What is read ahead is mostly read while the disk has nothing else to do, but takes the place of something.
constexpr double kRightEnough = 0.5;
constexpr double kMemoryOfRight = 0.99;  // from one token and layer to the next
// In flight: enough for a disk, and no more, as what turns out not to be needed can be given up only before it begins.
constexpr int64_t kBlockBytes = int64_t{512} << 10;
constexpr unsigned kDepth = 8;
// A disk that says nothing for so long will not answer.
constexpr auto kLongestRead = std::chrono::seconds(120);
constexpr auto kLook = std::chrono::milliseconds(200);

}  // namespace

size_t ExpertCache::slot_bytes(const std::vector<ExpertPlace>& places) {
  size_t most = 0;
  for (const ExpertPlace& place : places) most = std::max(most, place.bytes);
  return most;
}

ExpertCache::ExpertCache(std::vector<ExpertPlace> places, std::vector<size_t> first, size_t slots)
    : places_(std::move(places)),
      first_(std::move(first)),
      slot_bytes_(slot_bytes(places_)),
      slots_(slots),
      slot_of_(places_.size(), -1),
      heat_(places_.size(), -1e30),
      checked_(places_.size()) {
  const size_t bytes = (slots * slot_bytes_ + kHugePage - 1) / kHugePage * kHugePage;
  uint8_t* pages = map_huge_pages(bytes);
  if (pages == nullptr) throw std::bad_alloc();
  memory_ = {pages, [bytes](void* start) { munmap(start, bytes); }};
  for (ExpertPlace& place : places_)
    for (int i = 0; i < place.count; ++i)
      *place.parts[i].matrix = Matrix(place.parts[i].matrix->shape(), memory_, pages + place.parts[i].offset);
}

ExpertCache::~ExpertCache() = default;

ExpertCache::Stats ExpertCache::stats() const {
  Stats stats = stats_;
  stats.slot_bytes = static_cast<int64_t>(slot_bytes_);
  stats.waited_seconds = waited_.load(std::memory_order_relaxed);
  return stats;
}

void ExpertCache::clear_packed(size_t expert) { std::memset(slot(0), 0, places_[expert].bytes); }

void ExpertCache::open(int fd, int64_t offset, std::vector<uint64_t> checksums) {
  file_ = Descriptor(fcntl(fd, F_DUPFD_CLOEXEC, 3));
  if (!file_) throw std::system_error(errno, std::generic_category(), "dup");
  offset_ = offset;
  checksums_ = std::move(checksums);
  handle_ = std::make_unique<aio::Handle>(aio::Config{.block_bytes = kBlockBytes, .depth = kDepth});
}

void ExpertCache::fail(const std::string& what) noexcept {
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  if (!failure_) failure_ = std::make_exception_ptr(ModelError("experts that are read from a file: " + what));
}

std::exception_ptr ExpertCache::take_failure() noexcept {
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  return std::exchange(failure_, nullptr);
}

// The sum of uses, each worth twice as much kHalfLife runs later, as a logarithm: two experts keep their order while
// neither is used, so that the sums need no other care.
void ExpertCache::touch(size_t expert) noexcept {
  const double now = static_cast<double>(calls_) / (static_cast<double>(first_.size() - 1) * kHalfLife);
  const double more = std::max(heat_[expert], now), less = std::min(heat_[expert], now);
  heat_[expert] = more + std::log2(1 + std::exp2(less - more));
}

int64_t ExpertCache::free_slot() noexcept {
  int64_t coldest = -1;
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.pinned == calls_ && slot.expert >= 0) continue;
    if (slot.state.load(std::memory_order_relaxed) == State::reading && !finish(slot, {})) continue;
    if (slot.expert < 0) return static_cast<int64_t>(i);
    if (coldest < 0 || heat_[static_cast<size_t>(slot.expert)] <
                           heat_[static_cast<size_t>(slots_[static_cast<size_t>(coldest)].expert)])
      coldest = static_cast<int64_t>(i);
  }
  return coldest;
}

bool ExpertCache::fetch(size_t expert, size_t index) noexcept {
  Slot& slot = slots_[index];
  if (slot.expert >= 0) slot_of_[static_cast<size_t>(slot.expert)] = -1;
  slot.expert = -1;
  slot.state.store(State::empty, std::memory_order_relaxed);
  const ExpertPlace& place = places_[expert];
  try {
    const int64_t begin = offset_ + static_cast<int64_t>(place.offset);
    auto* to = reinterpret_cast<char*>(this->slot(index));
    auto request = std::make_unique<aio::Request>(
        std::vector<aio::Segment>{{begin, to, static_cast<int64_t>(place.bytes)}}, handle_->block_bytes());
    if (const aio::Failure failure = request->open({}, file_.get(), {})) {
      fail(std::generic_category().message(failure.error));
      return false;
    }
    slot.request = next_request_++;
    slot.cancelled = false;
    handle_->submit(slot.request, std::move(request));
  } catch (const std::exception& error) {
    fail(error.what());
    return false;
  }
  for (int i = 0; i < place.count; ++i) {
    const ExpertPlace::Part& part = place.parts[i];
    *part.matrix = Matrix(part.matrix->shape(), memory_, this->slot(index) + part.offset);
  }
  slot.expert = static_cast<int64_t>(expert);
  slot_of_[expert] = static_cast<int32_t>(index);
  slot.state.store(State::reading, std::memory_order_release);
  return true;
}

// Whether the slot's read has ended, in an error too.
bool ExpertCache::finish(Slot& slot, std::chrono::milliseconds timeout) noexcept {
  const std::lock_guard<std::mutex> lock(finish_mutex_);
  if (slot.state.load(std::memory_order_relaxed) != State::reading) return true;
  try {
    const std::shared_ptr<aio::Request> request = handle_->wait(slot.request, timeout);
    if (request == nullptr) return false;
    handle_->forget(slot.request);
    stats_.bytes += request->bytes_done.load(std::memory_order_relaxed);
    State state = State::ready;
    const auto expert = static_cast<size_t>(slot.expert);
    if (request->failure) {
      if (!request->cancelled()) fail(std::generic_category().message(request->failure.error));
      state = State::failed;
    } else if (!checked_[expert]) {
      const auto index = static_cast<size_t>(&slot - slots_.data());
      checked_[expert] = weights_checksum(this->slot(index), places_[expert].bytes) == checksums_[expert];
      if (!checked_[expert]) {
        fail("the checksum of expert " + std::to_string(expert) + " is another one: the file is damaged; load again");
        state = State::failed;
      }
    }
    slot.state.store(state, std::memory_order_release);
  } catch (const std::exception& error) {
    fail(error.what());
    slot.state.store(State::failed, std::memory_order_release);
  }
  return true;
}

void ExpertCache::need(size_t layer, const int32_t* begin) noexcept {
  ++calls_;
  const size_t first = first_[layer], count = first_[layer + 1] - first;
  const auto needed = [&](size_t e) { return begin[e + 1] > begin[e]; };
  if (ahead_layer_ == layer && !ahead_.empty()) {
    for (size_t i = 0; i < ahead_.size(); ++i) {
      double& right = ahead_right_[i % static_cast<size_t>(ahead_top_k_)];
      right += (1 - kMemoryOfRight) * ((needed(static_cast<size_t>(ahead_[i])) ? 1 : 0) - right);
    }
    ahead_.clear();
  }
  for (size_t e = 0; e < count; ++e) {
    const int32_t at = slot_of_[first + e];
    if (at < 0) continue;
    Slot& slot = slots_[static_cast<size_t>(at)];
    const State state = slot.state.load(std::memory_order_acquire);
    if (needed(e)) {
      // One that was given up may lack parts: it is read again.
      if (state == State::reading)
        while (!finish(slot, slot.cancelled ? kLook : std::chrono::milliseconds(0)) && slot.cancelled) continue;
      if (slot.state.load(std::memory_order_acquire) == State::failed) {
        slot_of_[first + e] = -1;
        slot.expert = -1;
        continue;
      }
      slot.pinned = calls_;
      if (slot.ahead) ++stats_.ahead_used;
      slot.ahead = false;
    } else if (slot.ahead && state == State::reading) {
      try {
        handle_->find(slot.request)->cancel();  // what is needed goes first
        slot.cancelled = true;
      } catch (const std::exception&) {
        finish(slot, {});
      }
    }
  }
  for (size_t e = 0; e < count; ++e) {
    if (!needed(e)) continue;
    ++stats_.used;
    touch(first + e);
    if (slot_of_[first + e] >= 0) continue;
    ++stats_.missed;
    int64_t slot = free_slot();
    for (const auto end = Clock::now() + kLongestRead; slot < 0 && Clock::now() < end; slot = free_slot()) {
      // All others are being read: the first that ends will do.
      for (size_t i = 0; i < slots_.size(); ++i)
        if (slots_[i].state.load(std::memory_order_relaxed) == State::reading && slots_[i].pinned != calls_) {
          finish(slots_[i], kLook);
          break;
        }
    }
    if (slot < 0) return fail("no read has ended for " + std::to_string(kLongestRead.count()) + " s");
    if (!fetch(first + e, static_cast<size_t>(slot))) return;
    slots_[static_cast<size_t>(slot)].pinned = calls_;
    slots_[static_cast<size_t>(slot)].ahead = false;
  }
}

void ExpertCache::read_ahead(size_t layer, const int32_t* chosen, int64_t tokens, int top_k) noexcept {
  ahead_layer_ = layer;
  ahead_top_k_ = top_k;
  try {
    ahead_.assign(chosen, chosen + tokens * top_k);
    ahead_right_.resize(std::max(ahead_right_.size(), static_cast<size_t>(top_k)), 1);
  } catch (const std::bad_alloc&) {
    return ahead_.clear();
  }
  for (size_t i = 0; i < ahead_.size(); ++i) {
    if (ahead_right_[i % static_cast<size_t>(top_k)] < kRightEnough) continue;
    const size_t expert = first_[layer] + static_cast<size_t>(ahead_[i]);
    if (slot_of_[expert] >= 0) {
      slots_[static_cast<size_t>(slot_of_[expert])].pinned = calls_;  // it will be used at once
      continue;
    }
    const int64_t slot = free_slot();
    if (slot < 0 || !fetch(expert, static_cast<size_t>(slot))) return;
    slots_[static_cast<size_t>(slot)].pinned = calls_;
    slots_[static_cast<size_t>(slot)].ahead = true;
    ++stats_.ahead;
  }
}

bool ExpertCache::is_ready(size_t layer, size_t expert) const noexcept {
  const int32_t at = slot_of_[first_[layer] + expert];
  return at >= 0 && slots_[static_cast<size_t>(at)].state.load(std::memory_order_acquire) == State::ready;
}

void ExpertCache::wait(size_t layer, size_t expert, bool counts) noexcept {
  const int32_t at = slot_of_[first_[layer] + expert];
  if (at < 0) return;  // it could not be read
  Slot& slot = slots_[static_cast<size_t>(at)];
  if (slot.state.load(std::memory_order_acquire) != State::reading) return;
  const auto begin = Clock::now();
  while (!finish(slot, kLook)) {
    if (Clock::now() - begin < kLongestRead) continue;
    fail("a read has not ended for " + std::to_string(kLongestRead.count()) + " s");
    break;
  }
  if (!counts) return;
  const std::chrono::duration<double> waited = Clock::now() - begin;
  waited_.store(waited_.load(std::memory_order_relaxed) + waited.count(), std::memory_order_relaxed);
}

}  // namespace anyaccel::llm
