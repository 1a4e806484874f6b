// SPDX-License-Identifier: Apache-2.0
// 16 lanes of AVX2: a part of small_lanes.h, which says what the names mean.
#pragma once

namespace anyaccel::llm {
namespace {

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

}  // namespace
}  // namespace anyaccel::llm
