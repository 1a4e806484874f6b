// SPDX-License-Identifier: Apache-2.0
// One vector of floats of the instruction set that a kernel file is compiled for, and functions of it: 16, 8 or 1
// lanes. For kernels_*.cpp only: everything is in an anonymous namespace, since each variant has its own.
//
// exp and what is made of it have relative errors below 1e-6 (a test holds it). The scalar variant calls libm.
#pragma once

#include <math.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
// GCC 12 takes _mm512_undefined_ps for an uninitialised variable (its bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace anyaccel::llm {
namespace {

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
// Round to nearest even; a NaN stays one.
inline uint16_t to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(__AVX512F__)

using Vec = __m512;
using Mask = __mmask16;
constexpr int kLanes = 16;

inline Vec set(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
// The first n lanes, 0 < n <= kLanes; `other` in the rest.
inline Vec load_n(const float* p, int64_t n, Vec other) {
  return _mm512_mask_loadu_ps(other, static_cast<__mmask16>((1u << n) - 1), p);
}
inline void store_n(float* p, int64_t n, Vec v) { _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), v); }
inline Vec plus(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
// The second argument where either is a NaN, or where both are equal.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec abs(Vec a) { return _mm512_abs_ps(a); }
inline Vec copysign(Vec magnitude, Vec sign) { return _mm512_or_ps(magnitude, _mm512_and_ps(sign, set(-0.0f))); }
inline Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Mask equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask is_nan(Vec a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
inline Vec select(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_ps(m, no, yes); }
inline Mask either(Mask a, Mask b) { return static_cast<Mask>(a | b); }
inline Mask no_lanes() { return 0; }
inline unsigned lanes(Mask m) { return m; }
inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }
inline float largest(Vec v) { return _mm512_reduce_max_ps(v); }
inline Vec iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline Vec nearest(Vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec times_power(Vec v, Vec n) { return _mm512_scalef_ps(v, n); }  // v * 2^n

#elif defined(__AVX2__)

using Vec = __m256;
using Mask = __m256;
constexpr int kLanes = 8;

inline Vec set(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline __m256i first_lanes(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec load_n(const float* p, int64_t n, Vec other) {
  const __m256i mask = first_lanes(n);
  return _mm256_blendv_ps(other, _mm256_maskload_ps(p, mask), _mm256_castsi256_ps(mask));
}
inline void store_n(float* p, int64_t n, Vec v) { _mm256_maskstore_ps(p, first_lanes(n), v); }
inline Vec plus(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec abs(Vec a) { return _mm256_andnot_ps(set(-0.0f), a); }
inline Vec copysign(Vec magnitude, Vec sign) { return _mm256_or_ps(magnitude, _mm256_and_ps(sign, set(-0.0f))); }
inline Mask less(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline Mask equal(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
inline Mask is_nan(Vec a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
inline Vec select(Mask m, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, m); }
inline Mask either(Mask a, Mask b) { return _mm256_or_ps(a, b); }
inline Mask no_lanes() { return _mm256_setzero_ps(); }
inline unsigned lanes(Mask m) { return static_cast<unsigned>(_mm256_movemask_ps(m)); }
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
inline Vec nearest(Vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// In two steps: n may be 128.
inline Vec times_power(Vec v, Vec n) {
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  const auto power = [](__m256i e) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23));
  };
  return mul(mul(v, power(half)), power(_mm256_sub_epi32(whole, half)));
}

#else

using Vec = float;
using Mask = bool;
constexpr int kLanes = 1;

inline Vec set(float x) { return x; }
inline Vec load(const float* p) { return *p; }
inline void store(float* p, Vec v) { *p = v; }
inline Vec load_n(const float* p, int64_t, Vec) { return *p; }
inline void store_n(float* p, int64_t, Vec v) { *p = v; }
inline Vec plus(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec fnma(Vec a, Vec b, Vec c) { return c - a * b; }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }
inline Vec abs(Vec a) { return bits_float(float_bits(a) & 0x7fffffffu); }
inline Vec copysign(Vec magnitude, Vec sign) {
  return bits_float(float_bits(magnitude) | (float_bits(sign) & 0x80000000u));
}
inline Mask less(Vec a, Vec b) { return a < b; }
inline Mask equal(Vec a, Vec b) { return a == b; }
inline Mask is_nan(Vec a) { return a != a; }
inline Vec select(Mask m, Vec yes, Vec no) { return m ? yes : no; }
inline Mask either(Mask a, Mask b) { return a || b; }
inline Mask no_lanes() { return false; }
inline unsigned lanes(Mask m) { return m; }
inline float sum(Vec v) { return v; }
inline float largest(Vec v) { return v; }
inline Vec iota() { return 0; }

#endif

#if defined(__AVX2__)

// 0 instead of subnormal results, which are slow to make and to use; infinite above 88.7.
// 2^n * e^r with n whole and |r| <= ln(2)/2, which is split in two so that r is exact; Cephes' expf polynomial.
inline Vec exp(Vec x) {
  // NaN goes through: it is the second argument.
  const Mask zero = less(x, set(-87.3365447f));
  x = min(set(89.0f), max(set(-87.3365447f), x));
  const Vec n = nearest(mul(x, set(1.44269504088896341f)));
  Vec r = fnma(n, set(0.693359375f), x);
  r = fnma(n, set(-2.12194440e-4f), r);
  Vec p = set(1.9875691500e-4f);
  p = fma(p, r, set(1.3981999507e-3f));
  p = fma(p, r, set(8.3334519073e-3f));
  p = fma(p, r, set(4.1665795894e-2f));
  p = fma(p, r, set(1.6666665459e-1f));
  p = fma(p, r, set(5.0000001201e-1f));
  p = fma(p, mul(r, r), r);
  return select(zero, set(0), times_power(plus(p, set(1.0f)), n));
}

// 2^x for x below infinity; 0 instead of subnormal results. 2^n * 2^r with n whole and |r| <= 1/2, a minimax polynomial
// of 2^r that is 1 at 0.
inline Vec exp2(Vec x) {
#if defined(__AVX512F__)
  const Mask some = _mm512_cmp_ps_mask(x, set(-126.0f), _CMP_NLT_UQ);  // a NaN stays one
  const Vec n = nearest(x);
#else
  const Mask zero = less(x, set(-126.0f));
  x = min(set(128.0f), max(set(-126.0f), x));
  const Vec n = nearest(x);
#endif
  const Vec r = sub(x, n);
  Vec p = set(1.3264727313e-3f);
  p = fma(p, r, set(9.6715129912e-3f));
  p = fma(p, r, set(5.5507335812e-2f));
  p = fma(p, r, set(2.4022242427e-1f));
  p = fma(p, r, set(6.9314700365e-1f));
  p = fma(p, r, set(1.0f));
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(some, p, n);
#else
  return select(zero, set(0), times_power(p, n));
#endif
}

// Cephes' tanhf: a polynomial near 0, where 1 - 2 / (e^2x + 1) loses digits.
inline Vec tanh(Vec x) {
  const Vec magnitude = abs(x);
  const Vec square = mul(x, x);
  Vec p = set(-5.70498872745e-3f);
  p = fma(p, square, set(2.06390887954e-2f));
  p = fma(p, square, set(-5.37397155531e-2f));
  p = fma(p, square, set(1.33314422036e-1f));
  p = fma(p, square, set(-3.33332819422e-1f));
  p = fma(mul(p, square), x, x);
  const Vec large = sub(set(1.0f), div(set(2.0f), plus(exp(plus(magnitude, magnitude)), set(1.0f))));
  return select(less(magnitude, set(0.625f)), p, copysign(large, x));
}

// Phi(x) = erfc(-x / sqrt 2) / 2 with the Chebyshev fit of "Numerical Recipes" (erfcc), good to 1.2e-7 of the value in
// both tails, where 1 + erf would lose all digits.
inline Vec normal_cdf(Vec x) {
  const Vec z = mul(abs(x), set(0.70710678118654752f));
  const Vec t = div(set(1.0f), fma(z, set(0.5f), set(1.0f)));
  Vec p = set(0.17087277f);
  p = fma(p, t, set(-0.82215223f));
  p = fma(p, t, set(1.48851587f));
  p = fma(p, t, set(-1.13520398f));
  p = fma(p, t, set(0.27886807f));
  p = fma(p, t, set(-0.18628806f));
  p = fma(p, t, set(0.09678418f));
  p = fma(p, t, set(0.37409196f));
  p = fma(p, t, set(1.00002368f));
  p = fma(p, t, set(-1.26551223f));
  const Vec tail = mul(mul(t, set(0.5f)), exp(fnma(z, z, p)));
  return select(less(set(0.0f), x), sub(set(1.0f), tail), tail);
}

#else

inline Vec exp(Vec x) { return x < -87.3365447f ? 0.0f : ::expf(x); }
inline Vec exp2(Vec x) { return x < -126.0f ? 0.0f : ::exp2f(x); }
inline Vec tanh(Vec x) { return ::tanhf(x); }
inline Vec normal_cdf(Vec x) { return 0.5f * ::erfcf(-x * 0.70710678118654752f); }

#endif

inline Vec sigmoid(Vec x) { return div(set(1.0f), plus(set(1.0f), exp(sub(set(0.0f), x)))); }

}  // namespace
}  // namespace anyaccel::llm
