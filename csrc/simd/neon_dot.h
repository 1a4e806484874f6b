// SPDX-License-Identifier: Apache-2.0
// NEON with products of bytes by one instruction (Armv8.2's SDOT). simd.h says what the names mean.
#pragma once

#define ANYACCEL_NEON_DOT
#include "simd/neon.h"

namespace anyaccel::simd::ANYACCEL_ISA_VARIANT {
namespace {

inline IVec dot(IVec sum, Quads w, const int8_t* x) { return vdotq_s32(sum, w.v, quad_at(x)); }

// Of bytes with a sign too.
struct NibbleSum {
  IVec v;
  static NibbleSum zero() { return {vdupq_n_s32(0)}; }
  NibbleSum plus(Nibbles w, const int8_t* x) const {
    const IVec first = vdotq_s32(v, vreinterpretq_s8_s32(w.low), quad_at(x));
    return {vdotq_s32(first, vreinterpretq_s8_s32(w.high), quad_at(x + 4))};
  }
  IVec total() const { return v; }
};

}  // namespace
}  // namespace anyaccel::simd::ANYACCEL_ISA_VARIANT
