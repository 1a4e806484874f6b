// SPDX-License-Identifier: Apache-2.0
// Rotations for the key/value cache of four bits, in kernel files and in their tests.
//
// Keys have a few values that are far larger than the others, always at the same places, and with few bits all others
// of a group lose by them. An orthogonal transform of a group spreads them over it, and does not change the product of
// a query and a key when both are transformed, nor a sum of values that is transformed back (QuaRot, Ashkboos et al.,
// 2024). Here it is the Walsh-Hadamard transform, which is its own inverse.
#pragma once

#include "llm/attention/attention.h"

namespace anyaccel::llm {
namespace {

// Each whole group of x[n].
[[maybe_unused]] inline void rotate_groups(float* x, int n) {
  constexpr int kHalf = kCacheGroup / 2;
  constexpr float kNorm = 0.17677669529663689f;  // 1 / sqrt(kCacheGroup)
  for (; n >= kCacheGroup; n -= kCacheGroup, x += kCacheGroup) {
    float y[kCacheGroup];
    for (int length = kCacheGroup; length > 1; length /= 2) {
      // The same step each time: sums and differences of halves, interleaved.
      for (int i = 0; i < kHalf; ++i) {
        y[2 * i] = x[i] + x[i + kHalf];
        y[2 * i + 1] = x[i] - x[i + kHalf];
      }
      for (int i = 0; i < kCacheGroup; ++i) x[i] = y[i];
    }
    for (int i = 0; i < kCacheGroup; ++i) x[i] *= kNorm;
  }
}

}  // namespace
}  // namespace anyaccel::llm
