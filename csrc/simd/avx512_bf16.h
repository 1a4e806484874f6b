// SPDX-License-Identifier: Apache-2.0
// AVX-512 with VNNI and BF16: dot products of pairs of bfloat16, and what makes such pairs. Subnormal numbers are zero
// in both. With ANYACCEL_EMULATE the instructions are plain code that gives what they give, bit by bit as Intel's
// manual defines it.
#pragma once

#include "simd/avx512_vnni.h"

namespace anyaccel::simd::ANYACCEL_ISA_VARIANT {
namespace {

#ifdef ANYACCEL_EMULATE

// Subnormal numbers count as zero (DAZ) and become zero (FTZ), whatever MXCSR says.
inline float flushed(float value) {
  const uint32_t bits = bits_of(value);
  return (bits & 0x7f800000u) == 0 ? float_of(bits & 0x80000000u) : value;
}
inline float from_half_of(uint32_t pair, int half) {
  return flushed(float_of(half == 0 ? pair << 16 : pair & 0xffff0000u));
}
inline float fused(float a, float b, float c) { return flushed(__builtin_fmaf(a, b, flushed(c))); }

// VDPBF16PS: the odd products first.
inline Vec dot_bf16(Vec sums, IVec a, IVec b) {
  float sum[16];
  uint32_t x[16], y[16];
  std::memcpy(sum, &sums, 64);
  std::memcpy(x, &a, 64);
  std::memcpy(y, &b, 64);
  for (int i = 0; i < 16; ++i) {
    sum[i] = fused(from_half_of(x[i], 1), from_half_of(y[i], 1), sum[i]);
    sum[i] = fused(from_half_of(x[i], 0), from_half_of(y[i], 0), sum[i]);
  }
  std::memcpy(&sums, sum, 64);
  return sums;
}

// VCVTNEPS2BF16.
inline __m256i narrow_pairs(Vec v) {
  const Mask subnormal = _mm512_fpclass_ps_mask(v, 0x20);
  return narrow_bf16(_mm512_mask_and_ps(v, subnormal, v, _mm512_set1_ps(-0.0f)));
}
inline IVec narrow_pairs(Vec low, Vec high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(narrow_pairs(low)), narrow_pairs(high), 1);
}

#else

inline Vec dot_bf16(Vec sums, IVec a, IVec b) {
  __m512bh x, y;
  std::memcpy(&x, &a, sizeof x);
  std::memcpy(&y, &b, sizeof y);
  return _mm512_dpbf16_ps(sums, x, y);
}
inline __m256i narrow_pairs(Vec v) {
  const __m256bh halves = _mm512_cvtneps_pbh(v);
  __m256i bits;
  std::memcpy(&bits, &halves, sizeof bits);
  return bits;
}
inline IVec narrow_pairs(Vec low, Vec high) {
  const __m512bh halves = _mm512_cvtne2ps_pbh(high, low);
  IVec bits;
  std::memcpy(&bits, &halves, sizeof bits);
  return bits;
}

#endif

// Sixteen pairs from x on, of which `count` columns exist; the others are zeros.
inline IVec pairs_of(const float* x, int64_t count) {
  const Vec low = _mm512_maskz_loadu_ps(first_lanes(count), x);
  const Vec high = count > 16 ? _mm512_maskz_loadu_ps(first_lanes(count - 16), x + 16) : broadcast(0.0f);
  return narrow_pairs(low, high);
}

}  // namespace
}  // namespace anyaccel::simd::ANYACCEL_ISA_VARIANT
