// SPDX-License-Identifier: Apache-2.0
// AVX-512 with VNNI: products of 8 and 4 bits by one instruction. simd.h says what the names mean.
// With ANYACCEL_EMULATE that instruction is plain AVX-512 code that gives the same, for tests on machines without it.
#pragma once

#define ANYACCEL_VNNI
#include "simd/avx512.h"

namespace anyaccel::simd::ANYACCEL_ISA_VARIANT {
namespace {

// VPDPBUSD: sum + a * b, `a` unsigned and `b` signed bytes, 4 a lane; sums wrap around.
inline IVec dot_bytes(IVec sum, IVec a, IVec b) {
#ifndef ANYACCEL_EMULATE
  return _mm512_dpbusd_epi32(sum, a, b);
#else
  const IVec low_a = _mm512_and_si512(a, _mm512_set1_epi16(0xff)), high_a = _mm512_srli_epi16(a, 8);
  const IVec low_b = _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8), high_b = _mm512_srai_epi16(b, 8);
  const IVec products = _mm512_add_epi32(_mm512_madd_epi16(low_a, low_b), _mm512_madd_epi16(high_a, high_b));
  return _mm512_add_epi32(sum, products);
#endif
}

constexpr bool kPairs8 = false, kShift8 = true;
struct Quads {
  IVec v;
};
inline Quads quads_of(IVec line) { return {_mm512_xor_si512(line, _mm512_set1_epi8(static_cast<char>(0x80)))}; }
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
  static NibbleSum zero() { return {_mm512_setzero_si512()}; }
  NibbleSum plus(Nibbles w, const int8_t* x) const {
    return {dot_bytes(dot_bytes(v, w.low, quad_at(x)), w.high, quad_at(x + 4))};
  }
  IVec total() const { return v; }
};

}  // namespace
}  // namespace anyaccel::simd::ANYACCEL_ISA_VARIANT
