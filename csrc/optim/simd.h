// SPDX-License-Identifier: Apache-2.0
// Vectors of floats for one instruction set, and pairs of them read from and written to arrays of f32, bf16 and f16.
// A variant file defines ANYACCEL_SIMD as 0 (plain C++), 2 (AVX2) or 512 (AVX-512), includes this file behind its
// target pragma, and everything here stays in that file. What goes before the pragma is in simd_headers.h.
// No operation contracts to a fused multiply-add, so all variants give the same bits.

namespace anyaccel::optim {
namespace {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <DType kType>
struct CellOf {
  using Type = uint16_t;
};
template <>
struct CellOf<DType::f32> {
  using Type = float;
};
template <DType kType>
using Cell = typename CellOf<kType>::Type;

// --- one vector

#if ANYACCEL_SIMD == 512

using Vec = __m512;
constexpr int kLanes = 16;

inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }
// Zero for zero, NaN for NaN.
inline Vec sign(Vec a) {
  const __m512i sign_bit = _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(INT32_MIN));
  const Vec one = _mm512_castsi512_ps(_mm512_or_si512(sign_bit, _mm512_castps_si512(_mm512_set1_ps(1.0f))));
  return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NEQ_OQ), one);
}

// To the upper half of each word, rounded to nearest even; the lower half is rubbish.
inline __m512i round_bf16(Vec v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __m512i up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_mask_sub_epi32(up, odd, up, _mm512_set1_epi32(-1));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
}

#elif ANYACCEL_SIMD == 2

using Vec = __m256;
constexpr int kLanes = 8;

inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec sqrt(Vec a) { return _mm256_sqrt_ps(a); }
inline Vec sign(Vec a) {
  const Vec one = _mm256_or_ps(_mm256_and_ps(a, _mm256_set1_ps(-0.0f)), _mm256_set1_ps(1.0f));
  return _mm256_blendv_ps(a, one, _mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_OQ));
}

inline __m256i round_bf16(Vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
}

#else

using Vec = float;
constexpr int kLanes = 1;

inline Vec set1(float x) { return x; }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec sqrt(Vec a) { return __builtin_sqrtf(a); }
inline Vec sign(Vec a) { return a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : a; }

#endif

// --- two vectors: 2 * kLanes elements of an array. Split puts those of even index into `a` and those of odd index into
// `b`, which for 16-bit types takes no shuffles; what is calculated is the same for all elements, so the order does not
// matter as long as all arrays have it.

struct Pair {
  Vec a, b;
};

enum class Order { natural, split };

#if ANYACCEL_SIMD == 512

template <DType kType, Order kOrder>
inline Pair load(const void* at) {
  if constexpr (kType == DType::f32) {
    static_assert(kOrder == Order::natural);
    const auto* p = static_cast<const float*>(at);
    return {_mm512_loadu_ps(p), _mm512_loadu_ps(p + 16)};
  } else if constexpr (kType == DType::bf16 && kOrder == Order::split) {
    const __m512i both = _mm512_loadu_si512(at);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  } else {
    static_assert(kOrder == Order::natural);
    const auto* p = static_cast<const __m256i*>(at);
    const __m256i a = _mm256_loadu_si256(p), b = _mm256_loadu_si256(p + 1);
    if constexpr (kType == DType::f16)
      return {_mm512_cvtph_ps(a), _mm512_cvtph_ps(b)};
    else
      return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(a), 16)),
              _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16))};
  }
}

template <DType kType, Order kOrder>
inline __m512i packed(const Pair& v) {
  if constexpr (kType == DType::f16) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m512i a = _mm512_castsi256_si512(_mm512_cvtps_ph(v.a, kNearest));
    return _mm512_inserti64x4(a, _mm512_cvtps_ph(v.b, kNearest), 1);
  }
  const __m512i a = _mm512_srli_epi32(round_bf16(v.a), 16);
  if constexpr (kOrder == Order::split) return _mm512_mask_blend_epi16(0xaaaaaaaau, a, round_bf16(v.b));
  const __m512i b = _mm512_srli_epi32(round_bf16(v.b), 16);
  return _mm512_permutexvar_epi64(_mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0), _mm512_packus_epi32(a, b));
}

template <DType kType, Order kOrder>
inline void store(void* at, const Pair& v) {
  if constexpr (kType == DType::f32) {
    auto* p = static_cast<float*>(at);
    _mm512_storeu_ps(p, v.a);
    _mm512_storeu_ps(p + 16, v.b);
  } else {
    _mm512_storeu_si512(at, packed<kType, kOrder>(v));
  }
}

// Past the caches; `at` is a multiple of 64.
template <DType kType, Order kOrder>
inline void stream(void* at, const Pair& v) {
  _mm512_stream_si512(static_cast<__m512i*>(at), packed<kType, kOrder>(v));
}

#elif ANYACCEL_SIMD == 2

template <DType kType, Order kOrder>
inline Pair load(const void* at) {
  if constexpr (kType == DType::f32) {
    static_assert(kOrder == Order::natural);
    const auto* p = static_cast<const float*>(at);
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
  } else if constexpr (kType == DType::bf16 && kOrder == Order::split) {
    const __m256i both = _mm256_loadu_si256(static_cast<const __m256i*>(at));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
  } else {
    static_assert(kOrder == Order::natural);
    const auto* p = static_cast<const __m128i*>(at);
    const __m128i a = _mm_loadu_si128(p), b = _mm_loadu_si128(p + 1);
    if constexpr (kType == DType::f16)
      return {_mm256_cvtph_ps(a), _mm256_cvtph_ps(b)};
    else
      return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16)),
              _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(b), 16))};
  }
}

template <DType kType, Order kOrder>
inline __m256i packed(const Pair& v) {
  if constexpr (kType == DType::f16) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm256_set_m128i(_mm256_cvtps_ph(v.b, kNearest), _mm256_cvtps_ph(v.a, kNearest));
  }
  const __m256i a = _mm256_srli_epi32(round_bf16(v.a), 16);
  if constexpr (kOrder == Order::split) return _mm256_blend_epi16(a, round_bf16(v.b), 0xaa);
  const __m256i b = _mm256_srli_epi32(round_bf16(v.b), 16);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
}

template <DType kType, Order kOrder>
inline void store(void* at, const Pair& v) {
  if constexpr (kType == DType::f32) {
    auto* p = static_cast<float*>(at);
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
  } else {
    _mm256_storeu_si256(static_cast<__m256i*>(at), packed<kType, kOrder>(v));
  }
}

// Past the caches; `at` is a multiple of 32.
template <DType kType, Order kOrder>
inline void stream(void* at, const Pair& v) {
  _mm256_stream_si256(static_cast<__m256i*>(at), packed<kType, kOrder>(v));
}

#else

template <DType kType>
inline float widen(uint16_t half) {
  if constexpr (kType == DType::bf16) return float_of(static_cast<uint32_t>(half) << 16);
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0x1f) return float_of(sign | 0x7f800000u | (mantissa != 0 ? 0x400000u : 0u) | (mantissa << 13));
  if (exponent != 0) return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
  return float_of(sign | bits_of(static_cast<float>(mantissa) * 0x1p-24f));  // zero and subnormals, exact
}

template <DType kType>
inline uint16_t narrow(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if constexpr (kType == DType::bf16) {
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // stays a NaN, quiet
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
  const uint32_t sign = (bits >> 16) & 0x8000u;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above: infinity
  if (magnitude >= 0x38800000u)                                                // normal
    return static_cast<uint16_t>(sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13));
  // Subnormal: adding 0.5 lets the FPU round to a multiple of 2^-24.
  return static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
}

template <DType kType, Order kOrder>
inline Pair load(const void* at) {
  const auto* p = static_cast<const Cell<kType>*>(at);
  if constexpr (kType == DType::f32)
    return {p[0], p[1]};
  else
    return {widen<kType>(p[0]), widen<kType>(p[1])};
}

template <DType kType, Order kOrder>
inline void store(void* at, const Pair& v) {
  auto* p = static_cast<Cell<kType>*>(at);
  if constexpr (kType == DType::f32)
    p[0] = v.a, p[1] = v.b;
  else
    p[0] = narrow<kType>(v.a), p[1] = narrow<kType>(v.b);
}

template <DType kType, Order kOrder>
inline void stream(void* at, const Pair& v) {
  store<kType, kOrder>(at, v);
}

#endif

constexpr int kPair = 2 * kLanes;

}  // namespace
}  // namespace anyaccel::optim
