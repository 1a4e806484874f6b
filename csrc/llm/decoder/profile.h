// SPDX-License-Identifier: Apache-2.0
// Where a step's time goes, by kind of work, on one thread.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>

namespace anyaccel::llm {

enum class Work : uint8_t {
  prepare,
  embed,
  norm,
  qkv,
  heads,
  append,
  attend,
  out,
  mix_in,
  mix,
  gate_up,
  activate,
  down,
  route,
  head,
  sample,
  wait,
  ranks,
  count
};

constexpr const char* kWorkNames[] = {"prepare", "embed", "norm",   "qkv",    "heads",   "append",
                                      "attend",  "out",   "mix_in", "mix",    "gate_up", "activate",
                                      "down",    "route", "head",   "sample", "wait",    "ranks"};
static_assert(std::size(kWorkNames) == static_cast<size_t>(Work::count));

class Profile {
 public:
  struct Entry {
    double seconds = 0;
    int64_t calls = 0;
  };
  using Entries = std::array<Entry, static_cast<size_t>(Work::count)>;

  bool enabled = false;
  Entries entries{};

  void start() {
    if (enabled) last_ = Clock::now();
  }
  // Says what kind of work the time since start(), or since the last mark(), was spent on.
  void mark(Work kind) {
    if (!enabled) return;
    const Clock::time_point now = Clock::now();
    Entry& entry = entries[static_cast<size_t>(kind)];
    entry.seconds += std::chrono::duration<double>(now - last_).count();
    ++entry.calls;
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_;
};

}  // namespace anyaccel::llm
