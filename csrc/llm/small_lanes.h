// SPDX-License-Identifier: Apache-2.0
// 16 rows at a time, in the vectors of the instruction set that the including kernel file is compiled for. Everything
// has internal linkage: every variant has its own.
// ANYACCEL_EMULATE stands for VNNI on a machine that lacks it, in tests.
#pragma once

#include <cstdint>

#include "llm/convert.h"

#if defined(__AVX2__)
// GCC 12 warns of the undefined operands that its own intrinsics are made with (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif
#if defined(__AVX512VNNI__) || defined(ANYACCEL_EMULATE)
#define ANYACCEL_VNNI 1
#else
#define ANYACCEL_VNNI 0
#endif

namespace anyaccel::llm {
namespace {

// Common to all variants below: Floats and Ints of 16 lanes; weights of 2 columns as floats (FloatPair); Line8, 4
// columns of int8; Line4, 8 columns of 4 bits. dot8() and Sum4 multiply those with activations.
// kTile: tokens whose sums fit the registers. kChains: sums a token, to hide the latency of an addition. kUnroll: of
// the loops over tokens and over the lines of a group.
// kPairs8: activations for int8 weights are int16, in pairs (0, 2), (1, 3) of 4 columns, and products come out 256
// times too large; else they are int8, and kShift8 says whether 128 * their sum comes out too much.

#if defined(__AVX512F__)

constexpr int kTile = 8, kChains = 2, kUnroll = 8;

struct Floats {
  __m512 v;
};
struct Ints {
  __m512i v;
};
inline __m512i line_at(const void* p) { return _mm512_loadu_si512(p); }

inline Floats zero_floats() { return {_mm512_setzero_ps()}; }
inline Floats splat(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
inline Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats mul_add(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats load_f16(const uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Floats even_bf16(const uint8_t* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(line_at(p), 16))}; }
inline Floats odd_bf16(const uint8_t* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(line_at(p), _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
}

inline Ints splat(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline __m512i quad_at(const void* x) {
  int32_t quad;
  std::memcpy(&quad, x, sizeof quad);
  return _mm512_set1_epi32(quad);
}

// Keeps GCC from adding up in another order, for which it would keep all products in memory.
inline __m512i in_place(__m512i sum) {
  __asm__("" : "+v"(sum));
  return sum;
}

#if ANYACCEL_VNNI
// sum + a * b, a unsigned and b signed bytes, 4 a lane.
inline __m512i dot_bytes(__m512i sum, __m512i a, __m512i b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(sum, a, b);
#else
  const __m512i low_a = _mm512_and_si512(a, _mm512_set1_epi16(0xff)), high_a = _mm512_srli_epi16(a, 8);
  const __m512i low_b = _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8), high_b = _mm512_srai_epi16(b, 8);
  const __m512i products = _mm512_add_epi32(_mm512_madd_epi16(low_a, low_b), _mm512_madd_epi16(high_a, high_b));
  return _mm512_add_epi32(sum, products);
#endif
}

constexpr bool kPairs8 = false, kShift8 = true;
struct Line8 {
  __m512i v;
};
inline Line8 load8(const uint8_t* p) {
  return {_mm512_xor_si512(line_at(p), _mm512_set1_epi8(static_cast<char>(0x80)))};
}
inline Ints dot8(Ints sum, Line8 w, const int8_t* x) { return {dot_bytes(sum.v, w.v, quad_at(x))}; }
#else
constexpr bool kPairs8 = true, kShift8 = false;
struct Line8 {
  __m512i even, odd;  // bytes in the high halves of 16 bits
};
inline Line8 load8(const uint8_t* p) {
  const __m512i line = line_at(p);
  return {_mm512_slli_epi16(line, 8), _mm512_and_si512(line, _mm512_set1_epi16(static_cast<short>(0xff00)))};
}
inline Ints dot8(Ints sum, Line8 w, const int16_t* x) {
  const __m512i even = _mm512_madd_epi16(w.even, quad_at(x)), odd = _mm512_madd_epi16(w.odd, quad_at(x + 2));
  return {in_place(_mm512_add_epi32(sum.v, _mm512_add_epi32(even, odd)))};
}
#endif

struct Line4 {
  __m512i low, high;
};
inline Line4 load4(const uint8_t* p) {
  const __m512i line = line_at(p), mask = _mm512_set1_epi8(15);
  return {_mm512_and_si512(line, mask), _mm512_and_si512(_mm512_srli_epi16(line, 4), mask)};
}
// The sum over 32 columns, of values 0..15 and activations -127..127: fits 16 bits (8 * 2 * 15 * 127 = 30480).
struct Sum4 {
  __m512i v;
  static Sum4 zero() { return {_mm512_setzero_si512()}; }
#if ANYACCEL_VNNI
  Sum4 plus(Line4 w, const int8_t* x) const {
    return {dot_bytes(dot_bytes(v, w.low, quad_at(x)), w.high, quad_at(x + 4))};
  }
  Ints total() const { return {v}; }
#else
  Sum4 plus(Line4 w, const int8_t* x) const {
    const __m512i low = _mm512_maddubs_epi16(w.low, quad_at(x)), high = _mm512_maddubs_epi16(w.high, quad_at(x + 4));
    return {in_place(_mm512_add_epi16(v, _mm512_add_epi16(low, high)))};
  }
  Ints total() const { return {_mm512_madd_epi16(v, _mm512_set1_epi16(1))}; }
#endif
};

// Column I of a line of 4 columns of int8, or of 8 columns of 4 bits.
template <int I>
inline Ints column8(const uint8_t* p) {
  return {_mm512_srai_epi32(_mm512_slli_epi32(line_at(p), 24 - 8 * I), 24)};
}
template <int I>
inline Ints column4(const uint8_t* p) {
  return {_mm512_and_si512(_mm512_srli_epi32(line_at(p), 8 * (I % 4) + I / 4 * 4), _mm512_set1_epi32(15))};
}
// Rounded to bfloat16, in pairs.
inline __m512i rounded_bits(__m512 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), quiet);
}
inline void store_pairs(uint16_t* p, Floats even, Floats odd) {
  const __m512i low = _mm512_srli_epi32(rounded_bits(even.v), 16);
  const __m512i high = _mm512_and_si512(rounded_bits(odd.v), _mm512_set1_epi32(static_cast<int>(0xffff0000)));
  _mm512_storeu_si512(p, _mm512_or_si512(low, high));
}

// Largest magnitude of 32 floats as bits: NaN and infinity are above all others.
inline uint32_t magnitude_bits(const float* x) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  const __m512i a = _mm512_and_si512(line_at(x), mask), b = _mm512_and_si512(line_at(x + 16), mask);
  return static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_max_epi32(a, b)));
}
// q = x * factor to the nearest, as int8 or in pairs; returns their sums of two.
template <class Q>
inline __m512i quantise_lanes(const float* x, float factor, Q* q) {
  const __m512 inv = _mm512_set1_ps(factor);
  const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), inv));
  const __m512i b = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16), inv));
  if constexpr (sizeof(Q) == 1) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtepi32_epi8(a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16), _mm512_cvtepi32_epi8(b));
  } else {
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_shuffle_epi8(_mm512_cvtepi32_epi16(a), order));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + 16), _mm256_shuffle_epi8(_mm512_cvtepi32_epi16(b), order));
  }
  return _mm512_add_epi32(a, b);
}
// Returns the sum of q.
template <class Q>
inline int32_t quantise32(const float* x, float factor, Q* q) {
  return _mm512_reduce_add_epi32(quantise_lanes(x, factor, q));
}

// Element i is vector i combined across its lanes: a tree of transpositions, 3 instructions a vector instead of 8.
template <class Vector, class Op>
inline __m512i across16(const Vector& vector, const Op& op) {
  const auto two = [&](int i) {
    const __m512i a = vector(i), b = vector(i + 1);
    return op(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  };
  const auto four = [&](int i) {
    const __m512i a = two(i), b = two(i + 2);
    return op(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  };
  const auto pairs = [&](__m512i a, __m512i b) {
    return op(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
  };
  return pairs(pairs(four(0), four(4)), pairs(four(8), four(12)));
}
inline void magnitudes16(const float* x, uint32_t* most) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  const auto group = [&](int g) {
    const __m512i a = line_at(x + 32 * g), b = line_at(x + 32 * g + 16);
    return _mm512_max_epi32(_mm512_and_si512(a, mask), _mm512_and_si512(b, mask));
  };
  _mm512_storeu_si512(most, across16(group, [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }));
}
template <class Q>
inline void quantise16(const float* x, const float* factors, Q* q, int64_t stride, int32_t* sums) {
  const auto group = [&](int g) { return quantise_lanes(x + 32 * g, factors[g], q + g * stride); };
  _mm512_storeu_si512(sums, across16(group, [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }));
}

#elif defined(__AVX2__)

constexpr int kTile = 4, kChains = 1, kUnroll = 8;

struct Floats {
  __m256 a, b;
};
struct Ints {
  __m256i a, b;
};
inline __m256i half_line(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

inline Floats zero_floats() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline Floats add(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats mul(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats mul_add(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats load_f16(const uint8_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
inline Floats even_bf16(const uint8_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(half_line(p), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(half_line(p + 32), 16))};
}
inline Floats odd_bf16(const uint8_t* p) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return {_mm256_castsi256_ps(_mm256_and_si256(half_line(p), mask)),
          _mm256_castsi256_ps(_mm256_and_si256(half_line(p + 32), mask))};
}

inline Ints splat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Ints add(Ints x, Ints y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline __m256i quad_at(const void* x) {
  int32_t quad;
  std::memcpy(&quad, x, sizeof quad);
  return _mm256_set1_epi32(quad);
}

// Keeps GCC from adding up in another order, for which it would keep all products in memory.
inline __m256i in_place(__m256i sum) {
  __asm__("" : "+x"(sum));
  return sum;
}

constexpr bool kPairs8 = true, kShift8 = false;
struct Line8 {
  __m256i even_a, even_b, odd_a, odd_b;  // bytes in the high halves of 16 bits
};
inline Line8 load8(const uint8_t* p) {
  const __m256i a = half_line(p), b = half_line(p + 32), mask = _mm256_set1_epi16(static_cast<short>(0xff00));
  return {_mm256_slli_epi16(a, 8), _mm256_slli_epi16(b, 8), _mm256_and_si256(a, mask), _mm256_and_si256(b, mask)};
}
inline Ints dot8(Ints sum, const Line8& w, const int16_t* x) {
  const __m256i even = quad_at(x), odd = quad_at(x + 2);
  const __m256i a = _mm256_add_epi32(_mm256_madd_epi16(w.even_a, even), _mm256_madd_epi16(w.odd_a, odd));
  const __m256i b = _mm256_add_epi32(_mm256_madd_epi16(w.even_b, even), _mm256_madd_epi16(w.odd_b, odd));
  return {in_place(_mm256_add_epi32(sum.a, a)), in_place(_mm256_add_epi32(sum.b, b))};
}

struct Line4 {
  __m256i low_a, low_b, high_a, high_b;
};
inline Line4 load4(const uint8_t* p) {
  const __m256i a = half_line(p), b = half_line(p + 32), mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a, mask), _mm256_and_si256(b, mask), _mm256_and_si256(_mm256_srli_epi16(a, 4), mask),
          _mm256_and_si256(_mm256_srli_epi16(b, 4), mask)};
}
// The sum over 32 columns, of values 0..15 and activations -127..127: fits 16 bits (8 * 2 * 15 * 127 = 30480).
struct Sum4 {
  __m256i a, b;
  static Sum4 zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  Sum4 plus(const Line4& w, const int8_t* x) const {
    const __m256i low = quad_at(x), high = quad_at(x + 4);
    const __m256i sum_a = _mm256_add_epi16(_mm256_maddubs_epi16(w.low_a, low), _mm256_maddubs_epi16(w.high_a, high));
    const __m256i sum_b = _mm256_add_epi16(_mm256_maddubs_epi16(w.low_b, low), _mm256_maddubs_epi16(w.high_b, high));
    return {in_place(_mm256_add_epi16(a, sum_a)), in_place(_mm256_add_epi16(b, sum_b))};
  }
  Ints total() const {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(a, ones), _mm256_madd_epi16(b, ones)};
  }
};

// Column I of a line of 4 columns of int8, or of 8 columns of 4 bits.
template <int I>
inline Ints column8(const uint8_t* p) {
  return {_mm256_srai_epi32(_mm256_slli_epi32(half_line(p), 24 - 8 * I), 24),
          _mm256_srai_epi32(_mm256_slli_epi32(half_line(p + 32), 24 - 8 * I), 24)};
}
template <int I>
inline Ints column4(const uint8_t* p) {
  constexpr int kShift = 8 * (I % 4) + I / 4 * 4;
  const __m256i mask = _mm256_set1_epi32(15);
  return {_mm256_and_si256(_mm256_srli_epi32(half_line(p), kShift), mask),
          _mm256_and_si256(_mm256_srli_epi32(half_line(p + 32), kShift), mask)};
}
// Rounded to bfloat16, in pairs.
inline __m256i rounded_bits(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
}
inline __m256i pairs_of(__m256 even, __m256 odd) {
  const __m256i high = _mm256_and_si256(rounded_bits(odd), _mm256_set1_epi32(static_cast<int>(0xffff0000)));
  return _mm256_or_si256(_mm256_srli_epi32(rounded_bits(even), 16), high);
}
inline void store_pairs(uint16_t* p, Floats even, Floats odd) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pairs_of(even.a, odd.a));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16), pairs_of(even.b, odd.b));
}

inline __m128i halves(__m256i x, __m128i (*combine)(__m128i, __m128i)) {
  __m128i r = combine(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  r = combine(r, _mm_shuffle_epi32(r, 0x4e));
  return combine(r, _mm_shuffle_epi32(r, 0xb1));
}
// Largest magnitude of 32 floats as bits: NaN and infinity are above all others.
inline uint32_t magnitude_bits(const float* x) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  __m256i most = _mm256_setzero_si256();
  for (int i = 0; i < 32; i += 8) most = _mm256_max_epi32(most, _mm256_and_si256(half_line(x + i), mask));
  return static_cast<uint32_t>(
      _mm_cvtsi128_si32(halves(most, [](__m128i a, __m128i b) { return _mm_max_epi32(a, b); })));
}
// q = x * factor to the nearest, as int8 or in pairs; returns their sum.
template <class Q>
inline int32_t quantise32(const float* x, float factor, Q* q) {
  const __m256 inv = _mm256_set1_ps(factor);
  __m256i v[4];
  for (int i = 0; i < 4; ++i) v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), inv));
  // Packing works within 128 bits: 64-bit parts are put into order after it.
  const __m256i low = _mm256_permute4x64_epi64(_mm256_packs_epi32(v[0], v[1]), 0xd8);
  const __m256i high = _mm256_permute4x64_epi64(_mm256_packs_epi32(v[2], v[3]), 0xd8);
  if constexpr (sizeof(Q) == 1) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8));
  } else {
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_shuffle_epi8(low, order));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + 16), _mm256_shuffle_epi8(high, order));
  }
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(v[0], v[1]), _mm256_add_epi32(v[2], v[3]));
  return _mm_cvtsi128_si32(halves(sum, [](__m128i a, __m128i b) { return _mm_add_epi32(a, b); }));
}

inline void magnitudes16(const float* x, uint32_t* most) {
  for (int g = 0; g < 16; ++g) most[g] = magnitude_bits(x + 32 * g);
}
template <class Q>
inline void quantise16(const float* x, const float* factors, Q* q, int64_t stride, int32_t* sums) {
  for (int g = 0; g < 16; ++g) sums[g] = quantise32(x + 32 * g, factors[g], q + g * stride);
}

#else

constexpr int kTile = 1, kChains = 1, kUnroll = 1;  // little code

struct Floats {
  float v[16];
};
struct Ints {
  int32_t v[16];
};
template <class Result, class Fn>
inline Result each(const Fn& fn) {
  Result result;
  for (int r = 0; r < 16; ++r) result.v[r] = fn(r);
  return result;
}
inline uint16_t half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, sizeof half);
  return half;
}

inline Floats splat(float x) {
  return each<Floats>([&](int) { return x; });
}
inline Floats zero_floats() { return splat(0.0f); }
inline Floats load(const float* p) {
  return each<Floats>([&](int r) { return p[r]; });
}
inline void store(float* p, const Floats& a) { std::memcpy(p, a.v, sizeof a.v); }
inline Floats add(const Floats& a, const Floats& b) {
  return each<Floats>([&](int r) { return a.v[r] + b.v[r]; });
}
inline Floats mul(const Floats& a, const Floats& b) {
  return each<Floats>([&](int r) { return a.v[r] * b.v[r]; });
}
inline Floats mul_add(const Floats& a, const Floats& b, const Floats& c) {
  return each<Floats>([&](int r) { return a.v[r] * b.v[r] + c.v[r]; });
}
inline Floats load_f16(const uint8_t* p) {
  return each<Floats>([&](int r) { return from_f16(half_at(p + 2 * r)); });
}
inline Floats even_bf16(const uint8_t* p) {
  return each<Floats>([&](int r) { return from_bf16(half_at(p + 4 * r)); });
}
inline Floats odd_bf16(const uint8_t* p) {
  return each<Floats>([&](int r) { return from_bf16(half_at(p + 4 * r + 2)); });
}

inline Ints splat(int32_t x) {
  return each<Ints>([&](int) { return x; });
}
inline Floats to_floats(const Ints& a) {
  return each<Floats>([&](int r) { return static_cast<float>(a.v[r]); });
}
inline Ints add(const Ints& a, const Ints& b) {
  return each<Ints>([&](int r) { return a.v[r] + b.v[r]; });
}

constexpr bool kPairs8 = false, kShift8 = false;
struct Line8 {
  const uint8_t* p;
};
inline Line8 load8(const uint8_t* p) { return {p}; }
inline Ints dot8(const Ints& sum, Line8 w, const int8_t* x) {
  return each<Ints>([&](int r) {
    int32_t result = sum.v[r];
    for (int i = 0; i < 4; ++i) result += static_cast<int8_t>(w.p[4 * r + i]) * x[i];
    return result;
  });
}

struct Line4 {
  const uint8_t* p;
};
inline Line4 load4(const uint8_t* p) { return {p}; }
struct Sum4 {
  Ints sum;
  static Sum4 zero() { return {splat(int32_t{0})}; }
  Sum4 plus(Line4 w, const int8_t* x) const {
    return {each<Ints>([&](int r) {
      int32_t result = sum.v[r];
      for (int i = 0; i < 4; ++i) result += (w.p[4 * r + i] & 15) * x[i] + (w.p[4 * r + i] >> 4) * x[i + 4];
      return result;
    })};
  }
  Ints total() const { return sum; }
};

// Column I of a line of 4 columns of int8, or of 8 columns of 4 bits.
template <int I>
inline Ints column8(const uint8_t* p) {
  return each<Ints>([&](int r) { return static_cast<int8_t>(p[4 * r + I]); });
}
template <int I>
inline Ints column4(const uint8_t* p) {
  return each<Ints>([&](int r) { return I < 4 ? p[4 * r + I] & 15 : p[4 * r + I - 4] >> 4; });
}
// Rounded to bfloat16, in pairs.
inline void store_pairs(uint16_t* p, const Floats& even, const Floats& odd) {
  for (int r = 0; r < 16; ++r) {
    p[2 * r] = to_bf16(even.v[r]);
    p[2 * r + 1] = to_bf16(odd.v[r]);
  }
}

// Largest magnitude of 32 floats as bits: NaN and infinity are above all others.
inline uint32_t magnitude_bits(const float* x) {
  uint32_t most = 0;
  for (int i = 0; i < 32; ++i) {
    const uint32_t bits = bits_of(x[i]) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return most;
}
// q = x * factor to the nearest; returns their sum.
template <class Q>
inline int32_t quantise32(const float* x, float factor, Q* q) {
  int32_t sum = 0;
  for (int i = 0; i < 32; ++i) {
    const float rounded = (x[i] * factor + 12582912.0f) - 12582912.0f;
    q[i] = rounded >= -127.0f && rounded <= 127.0f ? static_cast<Q>(static_cast<int>(rounded)) : Q{0};  // not a NaN
    sum += q[i];
  }
  return sum;
}

inline void magnitudes16(const float* x, uint32_t* most) {
  for (int g = 0; g < 16; ++g) most[g] = magnitude_bits(x + 32 * g);
}
template <class Q>
inline void quantise16(const float* x, const float* factors, Q* q, int64_t stride, int32_t* sums) {
  for (int g = 0; g < 16; ++g) sums[g] = quantise32(x + 32 * g, factors[g], q + g * stride);
}

#endif

}  // namespace
}  // namespace anyaccel::llm
