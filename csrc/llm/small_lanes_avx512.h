// SPDX-License-Identifier: Apache-2.0
// 16 lanes of AVX-512: a part of small_lanes.h, which says what the names mean.
#pragma once

namespace anyaccel::llm {
namespace {

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

}  // namespace
}  // namespace anyaccel::llm
