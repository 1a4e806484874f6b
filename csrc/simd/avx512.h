// SPDX-License-Identifier: Apache-2.0
// 16 lanes of AVX-512 F, BW, VL and DQ. simd.h says what the names mean; avx512_vnni.h includes this for all but the
// products of 8 and 4 bits.
#pragma once

#undef ANYACCEL_LANES
#define ANYACCEL_LANES 16
#undef ANYACCEL_REGISTERS
#define ANYACCEL_REGISTERS 32

#include <immintrin.h>

#include "simd/convert.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // of the undefined operands inside GCC 12's own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace anyaccel::simd::ANYACCEL_ISA_VARIANT {
namespace {

using Vec = __m512;
using IVec = __m512i;
using Mask = __mmask16;
constexpr int kLanes = ANYACCEL_LANES;
constexpr int kToNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline IVec broadcast(int32_t x) { return _mm512_set1_epi32(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
// The lanes below n, which may be negative or above 16.
inline Mask first_lanes(int64_t n) { return static_cast<Mask>(n >= 16 ? 0xffff : n > 0 ? (1u << n) - 1 : 0); }
inline Vec load_n(const float* p, int64_t n, Vec other) {
  return _mm512_mask_loadu_ps(other, static_cast<Mask>((1u << n) - 1), p);
}
inline void store_n(float* p, int64_t n, Vec v) { _mm512_mask_storeu_ps(p, static_cast<Mask>((1u << n) - 1), v); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline IVec add(IVec a, IVec b) { return _mm512_add_epi32(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec abs(Vec a) { return _mm512_abs_ps(a); }
inline Vec copysign(Vec magnitude, Vec sign) { return _mm512_or_ps(magnitude, _mm512_and_ps(sign, broadcast(-0.0f))); }
inline Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Mask not_less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
inline Mask equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask is_nan(Vec a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
inline Vec select(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_ps(m, no, yes); }
inline Mask either(Mask a, Mask b) { return static_cast<Mask>(a | b); }
inline Mask no_lanes() { return 0; }
inline unsigned lanes(Mask m) { return m; }
inline Vec sign(Vec a) {
  return select(_mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NEQ_OQ), copysign(broadcast(1.0f), a), a);
}
inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }
inline float largest(Vec v) { return _mm512_reduce_max_ps(v); }
inline Vec iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline Vec convert(IVec v) { return _mm512_cvtepi32_ps(v); }
inline Vec nearest(Vec v) { return _mm512_roundscale_ps(v, kToNearest); }
inline Vec limited_power(Vec n) { return n; }  // the instruction takes any
inline Vec times_power(Vec v, Vec n) { return _mm512_scalef_ps(v, n); }
inline Vec times_power(Mask some, Vec v, Vec n) { return _mm512_maskz_scalef_ps(some, v, n); }

inline Vec load_twice(const float* p) {
  const IVec twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  return _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(p)));
}
inline Vec swap_pairs(Vec v) { return _mm512_permute_ps(v, 0xb1); }
inline Vec fma_addsub(Vec a, Vec b, Vec c) { return _mm512_fmaddsub_ps(a, b, c); }

// --- 16 bits

inline IVec load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline __m256i load_halves(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store(void* p, IVec v) { _mm512_storeu_si512(p, v); }
inline void stream(void* p, IVec v) { _mm512_stream_si512(static_cast<__m512i*>(p), v); }
inline void stream_fence() { _mm_sfence(); }
inline Vec load_bf16(const void* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(p)), 16));
}
[[gnu::always_inline]] inline Vec load_f16(const void* p) { return _mm512_cvtph_ps(load_halves(p)); }
// Floats whose exponents are bytes: 2^(byte - 127), or zero.
inline Vec load_power(const void* p) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23));
}
inline Vec load_i8(const void* p) {
  return convert(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
inline Vec even_bf16(const void* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(load_ints(p), 16)); }
inline Vec odd_bf16(const void* p) {
  return _mm512_castsi512_ps(_mm512_and_si512(load_ints(p), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
// In the upper half of each lane; the lower half is undefined. Not VCVTNEPS2BF16, which makes subnormal numbers zero,
// so that results would depend on the machine.
[[gnu::always_inline]] inline IVec round_bf16(Vec v) {
  const IVec bits = _mm512_castps_si512(v);
  const Mask odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const IVec up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  const IVec rounded = _mm512_mask_sub_epi32(up, odd, up, _mm512_set1_epi32(-1));
  return _mm512_mask_or_epi32(rounded, is_nan(v), bits, _mm512_set1_epi32(0x400000));
}
inline __m256i narrow_bf16(Vec v) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_bf16(v), 16)); }
inline void store_bf16(uint16_t* p, Vec v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(v)); }
inline void store_f16(uint16_t* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, kToNearest));
}
[[gnu::always_inline]] inline IVec interleave_bf16(Vec even, Vec odd) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(round_bf16(even), 16), round_bf16(odd));
}
[[gnu::always_inline]] inline IVec pack_bf16(Vec a, Vec b) {
  const IVec low = _mm512_srli_epi32(round_bf16(a), 16), high = _mm512_srli_epi32(round_bf16(b), 16);
  return _mm512_permutexvar_epi64(_mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0), _mm512_packus_epi32(low, high));
}
[[gnu::always_inline]] inline IVec pack_f16(Vec a, Vec b) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(a, kToNearest)), _mm512_cvtps_ph(b, kToNearest), 1);
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
  const IVec line = load_ints(p), mask = _mm512_set1_epi8((1 << kBits) - 1);
  const IVec low = kFirst == 0 ? line : _mm512_srli_epi16(line, kFirst);
  return {_mm512_and_si512(low, mask), _mm512_and_si512(_mm512_srli_epi16(line, kFirst + kBits), mask)};
}
inline Nibbles load_nibbles(const uint8_t* p) { return load_bits<4, 0>(p); }
template <int kShift>
inline Nibbles join(Nibbles a, Nibbles b) {
  return {_mm512_or_si512(a.low, _mm512_slli_epi16(b.low, kShift)),
          _mm512_or_si512(a.high, _mm512_slli_epi16(b.high, kShift))};
}
using Table = IVec;
inline Table load_table(const int8_t* codes) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
}
inline Nibbles look_up(Table table, Nibbles index) {
  return {_mm512_shuffle_epi8(table, index.low), _mm512_shuffle_epi8(table, index.high)};
}
template <int I>
inline IVec column8(const uint8_t* p) {
  return _mm512_srai_epi32(_mm512_slli_epi32(load_ints(p), 24 - 8 * I), 24);
}
template <int I>
inline IVec column4(const uint8_t* p) {
  return _mm512_and_si512(_mm512_srli_epi32(load_ints(p), 8 * (I % 4) + I / 4 * 4), _mm512_set1_epi32(15));
}

// What x86_products.h is written to; a half is 16 bits.
inline IVec broadcast_byte(char x) { return _mm512_set1_epi8(x); }
inline IVec broadcast_half(short x) { return _mm512_set1_epi16(x); }
inline IVec bits_and(IVec a, IVec b) { return _mm512_and_si512(a, b); }
inline IVec bits_xor(IVec a, IVec b) { return _mm512_xor_si512(a, b); }
template <int kBits>
inline IVec shift_left_halves(IVec v) {
  return _mm512_slli_epi16(v, kBits);
}
template <int kBits>
inline IVec shift_right_halves(IVec v) {
  return _mm512_srli_epi16(v, kBits);
}
template <int kBits>
inline IVec sign_shift_right_halves(IVec v) {
  return _mm512_srai_epi16(v, kBits);
}
inline IVec add_halves(IVec a, IVec b) { return _mm512_add_epi16(a, b); }
inline IVec madd_halves(IVec a, IVec b) { return _mm512_madd_epi16(a, b); }
inline IVec madd_bytes(IVec a, IVec b) { return _mm512_maddubs_epi16(a, b); }
#if defined(ANYACCEL_VNNI) && !defined(ANYACCEL_EMULATE)
inline IVec dpbusd(IVec sum, IVec a, IVec b) { return _mm512_dpbusd_epi32(sum, a, b); }
#endif

// Compared as integers, the bits of a NaN or an infinity are larger than those of any number.
inline uint32_t magnitude_bits(const float* x) {
  const IVec mask = _mm512_set1_epi32(0x7fffffff);
  const IVec a = _mm512_and_si512(load_ints(x), mask), b = _mm512_and_si512(load_ints(x + 16), mask);
  return static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_max_epi32(a, b)));
}
// As quantise32(), but returns sums of two.
template <class Q>
inline IVec quantise_lanes(const float* x, float factor, Q* q) {
  const Vec inv = broadcast(factor);
  const IVec a = _mm512_cvtps_epi32(mul(load(x), inv)), b = _mm512_cvtps_epi32(mul(load(x + 16), inv));
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
template <class Q>
inline int32_t quantise32(const float* x, float factor, Q* q) {
  return _mm512_reduce_add_epi32(quantise_lanes(x, factor, q));
}

// Element i is vector i combined across its lanes: a tree of transpositions, 3 instructions a vector instead of 8.
template <class Vector, class Op>
inline IVec across16(const Vector& vector, const Op& op) {
  const auto two = [&](int i) {
    const IVec a = vector(i), b = vector(i + 1);
    return op(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  };
  const auto four = [&](int i) {
    const IVec a = two(i), b = two(i + 2);
    return op(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  };
  const auto pairs = [&](IVec a, IVec b) {
    return op(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
  };
  return pairs(pairs(four(0), four(4)), pairs(four(8), four(12)));
}
inline void magnitudes16(const float* x, uint32_t* most) {
  const IVec mask = _mm512_set1_epi32(0x7fffffff);
  const auto group = [&](int g) {
    const IVec a = load_ints(x + 32 * g), b = load_ints(x + 32 * g + 16);
    return _mm512_max_epi32(_mm512_and_si512(a, mask), _mm512_and_si512(b, mask));
  };
  _mm512_storeu_si512(most, across16(group, [](IVec a, IVec b) { return _mm512_max_epi32(a, b); }));
}
template <class Q>
inline void quantise16(const float* x, const float* factors, Q* q, int64_t stride, int32_t* sums) {
  const auto group = [&](int g) { return quantise_lanes(x + 32 * g, factors[g], q + g * stride); };
  _mm512_storeu_si512(sums, across16(group, [](IVec a, IVec b) { return _mm512_add_epi32(a, b); }));
}

}  // namespace
}  // namespace anyaccel::simd::ANYACCEL_ISA_VARIANT

#include "simd/math.h"
#include "simd/x86_products.h"
