// SPDX-License-Identifier: Apache-2.0
// AVX-512 with VNNI and BF16: dot products of pairs of bfloat16 (pairs_of in llm/kernels/gemm_avx512.h makes them).
// With ANYACCEL_EMULATE the instruction is plain code that gives what it gives, bit by bit as Intel's manual defines
// it.
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

#else

inline Vec dot_bf16(Vec sums, IVec a, IVec b) {
  __m512bh x, y;
  std::memcpy(&x, &a, sizeof x);
  std::memcpy(&y, &b, sizeof y);
  return _mm512_dpbf16_ps(sums, x, y);
}

#endif

}  // namespace
}  // namespace anyaccel::simd::ANYACCEL_ISA_VARIANT
