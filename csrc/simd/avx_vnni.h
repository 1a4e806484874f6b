// SPDX-License-Identifier: Apache-2.0
// AVX2 with VNNI in 256 bits, as processors without AVX-512 have it: products of 8 and 4 bits by one instruction.
// simd.h says what the names mean. With ANYACCEL_EMULATE that instruction is plain AVX2 code that gives the same, for
// tests on machines without it.
#pragma once

#define ANYACCEL_VNNI
#include "simd/avx2.h"

namespace anyaccel::simd::ANYACCEL_ISA_VARIANT {
namespace {

// VPDPBUSD: sum + a * b, `a` unsigned and `b` signed bytes, 4 a lane; sums wrap around.
inline IVec dot_bytes(IVec sum, IVec a, IVec b) {
#ifndef ANYACCEL_EMULATE
  return _mm256_dpbusd_avx_epi32(sum, a, b);
#else
  const IVec low_a = _mm256_and_si256(a, _mm256_set1_epi16(0xff)), high_a = _mm256_srli_epi16(a, 8);
  const IVec low_b = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8), high_b = _mm256_srai_epi16(b, 8);
  const IVec products = _mm256_add_epi32(_mm256_madd_epi16(low_a, low_b), _mm256_madd_epi16(high_a, high_b));
  return _mm256_add_epi32(sum, products);
#endif
}

constexpr bool kPairs8 = false, kShift8 = true;
struct Quads {
  IVec v;
};
inline Quads quads_of(IVec line) { return {_mm256_xor_si256(line, _mm256_set1_epi8(static_cast<char>(0x80)))}; }
inline Quads load_quads(const uint8_t* p) { return quads_of(load_ints(p)); }
struct Codes {
  Quads low, high;
};
inline Codes load_codes(const uint8_t* p, Table table) {
  const Nibbles bytes = look_up(table, load_nibbles(p));
  return {quads_of(bytes.low), quads_of(bytes.high)};
}
inline IVec dot(IVec sum, Quads w, const int8_t* x) { return dot_bytes(sum, w.v, quad_at(x)); }

struct NibbleSum {
  IVec v;
  static NibbleSum zero() { return {_mm256_setzero_si256()}; }
  NibbleSum plus(Nibbles w, const int8_t* x) const {
    return {dot_bytes(dot_bytes(v, w.low, quad_at(x)), w.high, quad_at(x + 4))};
  }
  IVec total() const { return v; }
};

}  // namespace
}  // namespace anyaccel::simd::ANYACCEL_ISA_VARIANT
