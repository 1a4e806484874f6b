// SPDX-License-Identifier: Apache-2.0
// Work that a team's threads take in small pieces, so that none waits for one on a slower or busier core.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace anyaccel {

// A list of items for each thread. A thread takes those of its own list, then what is left of the others'.
class SharedItems {
 public:
  explicit SharedItems(int threads) : lists_(static_cast<size_t>(threads)) {}

  // The number of the next item of `list`, which has `count`; -1 when all are taken. `call` says of which call: the
  // same on all threads, and larger than those before. A thread leaves a call when every list has none left, so that a
  // list that others have begun to use for a later call has none either.
  int64_t take(int list, uint64_t call, int64_t count) noexcept {
    std::atomic<uint64_t>& taken = lists_[static_cast<size_t>(list)].taken;
    uint64_t seen = taken.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t of = seen >> kCountBits;
      const auto next = of == call ? static_cast<int64_t>(seen & ((uint64_t{1} << kCountBits) - 1)) : 0;
      if (of > call || next >= count) return -1;
      if (taken.compare_exchange_weak(seen, call << kCountBits | static_cast<uint64_t>(next + 1),
                                      std::memory_order_relaxed))
        return next;
    }
  }

 private:
  static constexpr int kCountBits = 20;
  struct alignas(64) List {
    std::atomic<uint64_t> taken{0};  // the call, and how many of its items
  };
  std::vector<List> lists_;
};

}  // namespace anyaccel
