// SPDX-License-Identifier: Apache-2.0
// 8 lanes of AVX2, FMA and F16C. simd.h says what the names mean; avx_vnni.h includes this for all but the products of
// 8 and 4 bits.
#pragma once

#undef ANYACCEL_LANES
#define ANYACCEL_LANES 8
#undef ANYACCEL_REGISTERS
#define ANYACCEL_REGISTERS 16

#include <immintrin.h>

#include "simd/convert.h"

namespace anyaccel::simd::ANYACCEL_ISA_VARIANT {
namespace {

using Vec = __m256;
using IVec = __m256i;
using Mask = __m256;
constexpr int kLanes = ANYACCEL_LANES;
constexpr int kToNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline IVec broadcast(int32_t x) { return _mm256_set1_epi32(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline IVec first_lanes(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec load_n(const float* p, int64_t n, Vec other) {
  const IVec mask = first_lanes(n);
  return _mm256_blendv_ps(other, _mm256_maskload_ps(p, mask), _mm256_castsi256_ps(mask));
}
inline void store_n(float* p, int64_t n, Vec v) { _mm256_maskstore_ps(p, first_lanes(n), v); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline IVec add(IVec a, IVec b) { return _mm256_add_epi32(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec sqrt(Vec a) { return _mm256_sqrt_ps(a); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec abs(Vec a) { return _mm256_andnot_ps(broadcast(-0.0f), a); }
inline Vec copysign(Vec magnitude, Vec sign) { return _mm256_or_ps(magnitude, _mm256_and_ps(sign, broadcast(-0.0f))); }
inline Mask less(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline Mask not_less(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_NLT_UQ); }
inline Mask equal(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
inline Mask is_nan(Vec a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
inline Vec select(Mask m, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, m); }
inline Mask either(Mask a, Mask b) { return _mm256_or_ps(a, b); }
inline Mask no_lanes() { return _mm256_setzero_ps(); }
inline unsigned lanes(Mask m) { return static_cast<unsigned>(_mm256_movemask_ps(m)); }
inline Vec sign(Vec a) {
  return select(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_OQ), copysign(broadcast(1.0f), a), a);
}
inline float sum(Vec v) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float largest(Vec v) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline Vec iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
inline Vec convert(IVec v) { return _mm256_cvtepi32_ps(v); }
inline Vec nearest(Vec v) { return _mm256_round_ps(v, kToNearest); }
inline Vec limited_power(Vec n) { return min(broadcast(128.0f), max(broadcast(-126.0f), n)); }
// In two steps: n may be 128.
inline Vec times_power(Vec v, Vec n) {
  const IVec whole = _mm256_cvtps_epi32(n);
  const IVec half = _mm256_srai_epi32(whole, 1);
  const auto power = [](IVec e) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23));
  };
  return mul(mul(v, power(half)), power(_mm256_sub_epi32(whole, half)));
}
inline Vec times_power(Mask some, Vec v, Vec n) { return _mm256_and_ps(some, times_power(v, n)); }

inline Vec load_twice(const float* p) {
  return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
}
inline Vec swap_pairs(Vec v) { return _mm256_permute_ps(v, 0xb1); }
inline Vec fma_addsub(Vec a, Vec b, Vec c) { return _mm256_fmaddsub_ps(a, b, c); }

// --- 16 bits

inline IVec load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m128i load_halves(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline void store(void* p, IVec v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
inline void stream(void* p, IVec v) { _mm256_stream_si256(static_cast<__m256i*>(p), v); }
inline void stream_fence() { _mm_sfence(); }
inline Vec load_bf16(const void* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(p)), 16));
}
[[gnu::always_inline]] inline Vec load_f16(const void* p) { return _mm256_cvtph_ps(load_halves(p)); }
inline Vec load_power(const void* p) {
  const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23));
}
inline Vec load_i8(const void* p) {
  return convert(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
inline Vec even_bf16(const void* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(load_ints(p), 16)); }
inline Vec odd_bf16(const void* p) {
  return _mm256_castsi256_ps(_mm256_and_si256(load_ints(p), _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
// In the upper half of each lane; the lower half is undefined.
[[gnu::always_inline]] inline IVec round_bf16(Vec v) {
  const IVec bits = _mm256_castps_si256(v);
  const IVec odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const IVec rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const IVec quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan(v)));
}
inline void store_bf16(uint16_t* p, Vec v) {
  const IVec result = _mm256_srli_epi32(round_bf16(v), 16);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(result), _mm256_extracti128_si256(result, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
inline void store_f16(uint16_t* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, kToNearest));
}
[[gnu::always_inline]] inline IVec interleave_bf16(Vec even, Vec odd) {
  return _mm256_blend_epi16(_mm256_srli_epi32(round_bf16(even), 16), round_bf16(odd), 0xaa);
}
[[gnu::always_inline]] inline IVec pack_bf16(Vec a, Vec b) {
  const IVec low = _mm256_srli_epi32(round_bf16(a), 16), high = _mm256_srli_epi32(round_bf16(b), 16);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
}
[[gnu::always_inline]] inline IVec pack_f16(Vec a, Vec b) {
  return _mm256_set_m128i(_mm256_cvtps_ph(b, kToNearest), _mm256_cvtps_ph(a, kToNearest));
}

// --- 8 and 4 bits

inline IVec quad_at(const void* x) {
  int32_t quad;
  std::memcpy(&quad, x, sizeof quad);
  return broadcast(quad);
}
struct Nibbles {
  IVec low, high;
};
template <int kBits, int kFirst>
inline Nibbles load_bits(const uint8_t* p) {
  const IVec line = load_ints(p), mask = _mm256_set1_epi8((1 << kBits) - 1);
  const IVec low = kFirst == 0 ? line : _mm256_srli_epi16(line, kFirst);
  return {_mm256_and_si256(low, mask), _mm256_and_si256(_mm256_srli_epi16(line, kFirst + kBits), mask)};
}
inline Nibbles load_nibbles(const uint8_t* p) { return load_bits<4, 0>(p); }
template <int kShift>
inline Nibbles join(Nibbles a, Nibbles b) {
  return {_mm256_or_si256(a.low, _mm256_slli_epi16(b.low, kShift)),
          _mm256_or_si256(a.high, _mm256_slli_epi16(b.high, kShift))};
}
using Table = IVec;
inline Table load_table(const int8_t* codes) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
}
inline Nibbles look_up(Table table, Nibbles index) {
  return {_mm256_shuffle_epi8(table, index.low), _mm256_shuffle_epi8(table, index.high)};
}

// What x86_products.h is written to; a half is 16 bits.
inline IVec broadcast_byte(char x) { return _mm256_set1_epi8(x); }
inline IVec broadcast_half(short x) { return _mm256_set1_epi16(x); }
inline IVec bits_and(IVec a, IVec b) { return _mm256_and_si256(a, b); }
inline IVec bits_xor(IVec a, IVec b) { return _mm256_xor_si256(a, b); }
template <int kBits>
inline IVec shift_left_halves(IVec v) {
  return _mm256_slli_epi16(v, kBits);
}
template <int kBits>
inline IVec shift_right_halves(IVec v) {
  return _mm256_srli_epi16(v, kBits);
}
template <int kBits>
inline IVec sign_shift_right_halves(IVec v) {
  return _mm256_srai_epi16(v, kBits);
}
inline IVec add_halves(IVec a, IVec b) { return _mm256_add_epi16(a, b); }
inline IVec madd_halves(IVec a, IVec b) { return _mm256_madd_epi16(a, b); }
inline IVec madd_bytes(IVec a, IVec b) { return _mm256_maddubs_epi16(a, b); }
#if defined(ANYACCEL_VNNI) && !defined(ANYACCEL_EMULATE)
inline IVec dpbusd(IVec sum, IVec a, IVec b) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
#endif

template <int I>
inline IVec column8(const uint8_t* p) {
  return _mm256_srai_epi32(_mm256_slli_epi32(load_ints(p), 24 - 8 * I), 24);
}
template <int I>
inline IVec column4(const uint8_t* p) {
  return _mm256_and_si256(_mm256_srli_epi32(load_ints(p), 8 * (I % 4) + I / 4 * 4), _mm256_set1_epi32(15));
}

inline __m128i across(IVec x, __m128i (*combine)(__m128i, __m128i)) {
  __m128i r = combine(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  r = combine(r, _mm_shuffle_epi32(r, 0x4e));
  return combine(r, _mm_shuffle_epi32(r, 0xb1));
}
// Compared as integers, the bits of a NaN or an infinity are larger than those of any number.
inline uint32_t magnitude_bits(const float* x) {
  const IVec mask = _mm256_set1_epi32(0x7fffffff);
  IVec most = _mm256_setzero_si256();
  for (int i = 0; i < 32; i += 8) most = _mm256_max_epi32(most, _mm256_and_si256(load_ints(x + i), mask));
  return static_cast<uint32_t>(
      _mm_cvtsi128_si32(across(most, [](__m128i a, __m128i b) { return _mm_max_epi32(a, b); })));
}
template <class Q>
inline int32_t quantise32(const float* x, float factor, Q* q) {
  const Vec inv = broadcast(factor);
  IVec v[4];
  for (int i = 0; i < 4; ++i) v[i] = _mm256_cvtps_epi32(mul(load(x + 8 * i), inv));
  // Packing works within 128 bits: 64-bit parts are put into order after it.
  const IVec low = _mm256_permute4x64_epi64(_mm256_packs_epi32(v[0], v[1]), 0xd8);
  const IVec high = _mm256_permute4x64_epi64(_mm256_packs_epi32(v[2], v[3]), 0xd8);
  if constexpr (sizeof(Q) == 1) {
    store(static_cast<void*>(q), _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8));
  } else {
    const IVec order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    store(static_cast<void*>(q), _mm256_shuffle_epi8(low, order));
    store(static_cast<void*>(q + 16), _mm256_shuffle_epi8(high, order));
  }
  const IVec sum = _mm256_add_epi32(_mm256_add_epi32(v[0], v[1]), _mm256_add_epi32(v[2], v[3]));
  return _mm_cvtsi128_si32(across(sum, [](__m128i a, __m128i b) { return _mm_add_epi32(a, b); }));
}
inline void magnitudes16(const float* x, uint32_t* most) {
  for (int g = 0; g < 16; ++g) most[g] = magnitude_bits(x + 32 * g);
}
template <class Q>
inline void quantise16(const float* x, const float* factors, Q* q, int64_t stride, int32_t* sums) {
  for (int g = 0; g < 16; ++g) sums[g] = quantise32(x + 32 * g, factors[g], q + g * stride);
}

}  // namespace
}  // namespace anyaccel::simd::ANYACCEL_ISA_VARIANT

#include "simd/math.h"
#include "simd/x86_products.h"
