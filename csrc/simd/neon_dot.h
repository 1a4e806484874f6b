// SPDX-License-Identifier: Apache-2.0
// NEON with products of bytes by one instruction (Armv8.2's SDOT). simd.h says what the names mean.
#pragma once

#define ANYACCEL_NEON_DOT
#include "simd/neon.h"

namespace anyaccel::simd::ANYACCEL_ISA_VARIANT {
namespace {

inline IVec dot(IVec sum, Quads w, const int8_t* x) { return vdotq_s32(sum, w.v, quad_at(x)); }

// 32 columns in registers, of four of which the instruction multiplies with each lane; `+ i` are those from i on, as of
// a pointer.
struct Columns {
  int8x16_t first, last;
  int from;
};
inline Columns columns_at(const int8_t* x) { return {vld1q_s8(x), vld1q_s8(x + 16), 0}; }
inline Columns operator+(Columns x, int columns) { return {x.first, x.last, x.from + columns}; }
[[gnu::always_inline]] inline IVec dot_columns(IVec sum, int8x16_t w, Columns x) {
  const int8x16_t q = x.from < 16 ? x.first : x.last;
  switch (x.from / 4 % 4) {  // a constant, once loops are unrolled
    case 0:
      return vdotq_laneq_s32(sum, w, q, 0);
    case 1:
      return vdotq_laneq_s32(sum, w, q, 1);
    case 2:
      return vdotq_laneq_s32(sum, w, q, 2);
    default:
      return vdotq_laneq_s32(sum, w, q, 3);
  }
}
[[gnu::always_inline]] inline IVec dot(IVec sum, Quads w, Columns x) { return dot_columns(sum, w.v, x); }

// Of bytes with a sign too.
struct NibbleSum {
  static constexpr bool kOf16Bits = false;
  IVec v;
  static NibbleSum zero() { return {vdupq_n_s32(0)}; }
  NibbleSum plus(Nibbles w, const int8_t* x) const {
    const IVec first = vdotq_s32(v, vreinterpretq_s8_s32(w.low), quad_at(x));
    return {vdotq_s32(first, vreinterpretq_s8_s32(w.high), quad_at(x + 4))};
  }
  [[gnu::always_inline]] NibbleSum plus(Nibbles w, Columns x) const {
    const IVec first = dot_columns(v, vreinterpretq_s8_s32(w.low), x);
    return {dot_columns(first, vreinterpretq_s8_s32(w.high), x + 4)};
  }
  IVec total() const { return v; }
};

}  // namespace
}  // namespace anyaccel::simd::ANYACCEL_ISA_VARIANT
