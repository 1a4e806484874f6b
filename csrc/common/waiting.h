// SPDX-License-Identifier: Apache-2.0
// What loops need that wait by looking again and again.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

namespace anyaccel {

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

inline void cpu_pause() {
#ifdef ANYACCEL_X86
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// How long a thread that gave its core away looks again before it sleeps. Sleeping and being woken takes some tens of
// microseconds, little beside so long a wait; and a processor of a virtual machine that waits for a real one may get it
// only when this thread sleeps.
constexpr int64_t kYieldNs = 2'000'000;

// Whether other work has lately wanted the core of this thread. Looking again and again takes time then that the
// thread itself needs later, and every process that it waits for: it should sleep until it is woken. `now` is now_ns().
bool core_is_shared(int64_t now) noexcept;

// Sleeps until `word` is no longer `value` and somebody has called wake() since, at most `ns`; it may wake early. The
// word may lie in memory that processes share.
void sleep_while(const std::atomic<uint32_t>& word, uint32_t value, int64_t ns) noexcept;
void wake_all(const std::atomic<uint32_t>& word) noexcept;

}  // namespace anyaccel
