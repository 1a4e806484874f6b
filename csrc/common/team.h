// SPDX-License-Identifier: Apache-2.0
// Threads that run one function together, with barriers in between: for work in many short phases, where starting a
// parallel loop for each would cost more than the phase.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace anyaccel {

// How many CPUs this process may use, at least 1.
int usable_cpus() noexcept;

// Threads sleep between runs, after a short spin that catches the next step of a loop.
// A forked child has no threads: check usable() before run().
class Team {
 public:
  // `threads` in all, the caller of run() among them; 0: as many as this process may use CPUs.
  // Throws std::system_error when threads cannot be started.
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const noexcept { return size_; }
  // False in a forked child.
  bool usable() const noexcept;

  // Calls fn(context, thread) on every thread, 0 on the caller's, and returns when all have returned. fn must not
  // throw. One run at a time: callers hold a lock of their own.
  using Fn = void (*)(void* context, int thread);
  void run(Fn fn, void* context) noexcept;

  template <class Callable>
  void run(Callable&& callable) {
    using Plain = std::remove_reference_t<Callable>;
    run([](void* context, int thread) { (*static_cast<Plain*>(context))(thread); },
        const_cast<void*>(static_cast<const void*>(std::addressof(callable))));
  }

  // Inside a run, called by every thread with its number: returns when all have come. What was written before it is
  // seen after it.
  void barrier(int thread) noexcept;

 private:
  // Threads arrive in groups of so many, and the last of each at the whole: a core waits for one line at each counter
  // until those before it have had it, which 56 cores would do for as long as 16 in two levels.
  static constexpr int kGroup = 8;
  struct alignas(64) Counter {
    std::atomic<int> arrived{0};
    // Whether this is the last of `all`; then the counter is at 0 again.
    bool arrive(int all) noexcept;
  };

  void work(int thread) noexcept;

  const int size_;
  const int owner_pid_;
  Fn fn_ = nullptr;
  void* context_ = nullptr;
  int64_t spin_;  // pauses before a waiting thread gives its core away
  bool stop_ = false;
  // Each on a line of its own: they are written by different threads while others poll them.
  alignas(64) std::atomic<uint32_t> round_{0};  // runs started
  alignas(64) std::atomic<uint32_t> phase_{0};  // barriers passed
  std::vector<Counter> groups_;                 // of the current barrier
  Counter arrived_;                             // groups of it
  std::vector<std::thread> threads_;
};

// The part [begin, end) of `count` items of worker `part` of `parts`: consecutive, sizes differ by at most one.
struct Range {
  int64_t begin, end;
};
inline Range part_of(int64_t count, int part, int parts) { return {count * part / parts, count * (part + 1) / parts}; }

// The part that has this item.
inline int part_with(int64_t count, int64_t item, int parts) {
  int part = static_cast<int>(item * parts / count);
  while (item >= part_of(count, part, parts).end) ++part;
  return part;
}

}  // namespace anyaccel
