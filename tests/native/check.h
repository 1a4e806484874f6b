// SPDX-License-Identifier: Apache-2.0
// CHECK(condition): ends the program, with the place, when it does not hold; in every build.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

// For `make test`, with the kernels of one instruction set and a few cases of each kind: the others run elsewhere.
#ifdef ANYACCEL_QUICK
inline constexpr bool kQuick = true;
#else
inline constexpr bool kQuick = false;
#endif
// With a sanitizer all takes ten times as long, and lengths matter less than kinds: tests with much to do do a part.
#ifdef ANYACCEL_SLOW
inline constexpr bool kEmulated = true;  // qemu runs them, which is slower still
#else
inline constexpr bool kEmulated = false;
#endif
#if defined(ANYACCEL_SLOW) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
#else
inline constexpr bool kSanitized = false;
#endif
