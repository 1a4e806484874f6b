// SPDX-License-Identifier: Apache-2.0
// What loops need that wait by looking again and again.
#pragma once

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

}  // namespace anyaccel
