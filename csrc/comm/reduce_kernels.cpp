// SPDX-License-Identifier: Apache-2.0
// Compiled once per ISA variant (CMake: anyaccel_isa_variants); ANYACCEL_ISA_VARIANT names it.
#include "comm/reduce_kernels.h"

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define ANYACCEL_CONCAT_(a, b) a##b
#define ANYACCEL_CONCAT(a, b) ANYACCEL_CONCAT_(a, b)

namespace anyaccel::comm {
namespace {

// --- one element: the definition that the vector code must match bit by bit
// ---------------------------------------

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct F32 {
  using Storage = float;
  static float load1(const float* p) { return *p; }
  static void store1(float* p, float value) { *p = value; }
};

struct BF16 {
  using Storage = uint16_t;
  static float load1(const uint16_t* p) { return float_of(static_cast<uint32_t>(*p) << 16); }
  static void store1(uint16_t* p, float value) {
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
      *p = static_cast<uint16_t>((bits >> 16) | 0x40u);  // stays a NaN, quiet
    else
      *p = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

struct F16 {
  using Storage = uint16_t;
  static float load1(const uint16_t* p) {
    const uint32_t sign = static_cast<uint32_t>(*p & 0x8000u) << 16;
    const uint32_t exponent = (*p >> 10) & 0x1fu;
    const uint32_t mantissa = *p & 0x3ffu;
    if (exponent == 0x1f) {
      const uint32_t quiet = mantissa != 0 ? 0x400000u : 0u;
      return float_of(sign | 0x7f800000u | quiet | (mantissa << 13));
    }
    if (exponent != 0) return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // zero and subnormals, exact
    return float_of(sign | bits_of(magnitude));
  }
  static void store1(uint16_t* p, float value) {
    const uint32_t bits = bits_of(value);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
      *p = static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
      *p = static_cast<uint16_t>(sign | 0x7c00u);
    } else if (magnitude >= 0x38800000u) {  // normal half
      const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
      *p = static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
    } else {  // subnormal half: adding 0.5 lets the FPU round to a multiple of 2^-24
      const float shifted = float_of(magnitude) + 0.5f;
      *p = static_cast<uint16_t>(sign | (bits_of(shifted) - 0x3f000000u));
    }
  }
};

// --- one vector
// ---------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)

using Vec = __m512;
constexpr size_t kLanes = 16;

Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
Vec load(const float* p, F32) { return _mm512_loadu_ps(p); }
void store(float* p, Vec v, F32) { _mm512_storeu_ps(p, v); }
Vec load(const uint16_t* p, BF16) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
// Not vcvtneps2bf16: it flushes subnormals to zero, so the result would depend on the machine.
void store(uint16_t* p, Vec v, BF16) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i result = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(result));
}
Vec load(const uint16_t* p, F16) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
void store(uint16_t* p, Vec v, F16) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif defined(__AVX2__)

using Vec = __m256;
constexpr size_t kLanes = 8;

Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
Vec load(const float* p, F32) { return _mm256_loadu_ps(p); }
void store(float* p, Vec v, F32) { _mm256_storeu_ps(p, v); }
Vec load(const uint16_t* p, BF16) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
void store(uint16_t* p, Vec v, BF16) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i result = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(result), _mm256_extracti128_si256(result, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
Vec load(const uint16_t* p, F16) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
void store(uint16_t* p, Vec v, F16) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#endif

// --- the sum
// ------------------------------------------------------------------------------------------------------

template <class Type, int kSources>
void reduce_n(const typename Type::Storage* const* sources, int n_runtime, typename Type::Storage* dst,
              typename Type::Storage* dst2, size_t count) {
  const int n = kSources != 0 ? kSources : n_runtime;
  size_t i = 0;
#if defined(__AVX2__)
  for (; i + kLanes <= count; i += kLanes) {
    Vec sum = load(sources[0] + i, Type{});
    for (int s = 1; s < n; ++s) sum = add(sum, load(sources[s] + i, Type{}));
    store(dst + i, sum, Type{});
    if (dst2 != nullptr) store(dst2 + i, sum, Type{});
  }
#endif
  for (; i < count; ++i) {
    float sum = Type::load1(sources[0] + i);
    for (int s = 1; s < n; ++s) sum += Type::load1(sources[s] + i);
    Type::store1(dst + i, sum);
    if (dst2 != nullptr) Type::store1(dst2 + i, sum);
  }
}

template <class Type>
void reduce(const void* const* sources, int n_sources, void* dst, void* dst2, size_t count) {
  using Storage = typename Type::Storage;
  const auto* const* typed = reinterpret_cast<const Storage* const*>(sources);
  auto* out = static_cast<Storage*>(dst);
  auto* out2 = static_cast<Storage*>(dst2);
  if (n_sources == 2)
    reduce_n<Type, 2>(typed, 2, out, out2, count);
  else
    reduce_n<Type, 0>(typed, n_sources, out, out2, count);
}

}  // namespace

const ReduceKernels& ANYACCEL_CONCAT(reduce_kernels_, ANYACCEL_ISA_VARIANT)() {
  static const ReduceKernels kernels{{reduce<F32>, reduce<BF16>, reduce<F16>}};
  return kernels;
}

}  // namespace anyaccel::comm
