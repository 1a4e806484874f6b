// SPDX-License-Identifier: Apache-2.0
#include "common/team.h"

#include <unistd.h>

#include <algorithm>
#ifdef __linux__
#include <sched.h>
#endif

#include "common/waiting.h"

namespace anyaccel {
namespace {

// A pause is some 40 to 140 cycles: about 50 us between two steps, and as long in a barrier before yielding.
constexpr int64_t kSpin = 1500;

}  // namespace

int usable_cpus() noexcept {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(CPU_COUNT(&set), 1);
#endif
  return std::max(static_cast<int>(std::thread::hardware_concurrency()), 1);
}

Team::Team(int threads)
    : size_(threads > 0 ? threads : usable_cpus()),
      owner_pid_(static_cast<int>(getpid())),
      // Spinning takes the core from the very thread that is waited for when there are more threads than cores.
      spin_(size_ <= usable_cpus() ? kSpin : 0),
      groups_(static_cast<size_t>((size_ + kGroup - 1) / kGroup)) {
  try {
    for (int thread = 1; thread < size_; ++thread) threads_.emplace_back(&Team::work, this, thread);
  } catch (...) {
    stop_ = true;
    round_.fetch_add(1);
    round_.notify_all();
    for (auto& thread : threads_) thread.join();
    throw;
  }
}

Team::~Team() {
  if (!usable()) {
    for (auto& thread : threads_) thread.detach();  // they are the parent's
    return;
  }
  stop_ = true;
  round_.fetch_add(1);
  round_.notify_all();
  for (auto& thread : threads_) thread.join();
}

bool Team::usable() const noexcept { return static_cast<int>(getpid()) == owner_pid_; }

void Team::run(Fn fn, void* context) noexcept {
  if (size_ == 1) {
    fn(context, 0);
    return;
  }
  fn_ = fn;
  context_ = context;
  round_.fetch_add(1);
  round_.notify_all();  // a system call only when one sleeps
  fn(context, 0);
  barrier(0);
}

void Team::work(int thread) noexcept {
  uint32_t seen = 0;
  for (;;) {
    for (int64_t i = 0; i < spin_ && round_.load(std::memory_order_acquire) == seen; ++i) cpu_pause();
    round_.wait(seen);
    ++seen;
    if (stop_) return;
    fn_(context_, thread);
    barrier(thread);
  }
}

bool Team::Counter::arrive(int all) noexcept {
  if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 != all) return false;
  arrived.store(0, std::memory_order_relaxed);
  return true;
}

void Team::barrier(int thread) noexcept {
  if (size_ == 1) return;
  const uint32_t phase = phase_.load(std::memory_order_acquire);
  const int group = thread / kGroup;
  const bool last_of_group = groups_[static_cast<size_t>(group)].arrive(std::min(kGroup, size_ - group * kGroup));
  if (last_of_group && (groups_.size() == 1 || arrived_.arrive(static_cast<int>(groups_.size())))) {
    phase_.fetch_add(1);
    phase_.notify_all();  // a system call only when one sleeps
    return;
  }
  for (int64_t i = 0; i < spin_; ++i) {
    if (phase_.load(std::memory_order_acquire) != phase) return;
    cpu_pause();
  }
  const int64_t begin = now_ns();
  while (phase_.load(std::memory_order_acquire) == phase) {
    const int64_t now = now_ns();
    if (now - begin > kYieldNs || core_is_shared(now))
      phase_.wait(phase);
    else
      std::this_thread::yield();
  }
}

}  // namespace anyaccel
