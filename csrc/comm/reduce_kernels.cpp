// SPDX-License-Identifier: Apache-2.0
// Compiled once per ISA variant (CMake: anyaccel_isa_variants); ANYACCEL_ISA_VARIANT names it.
#include "comm/reduce_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

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

Vec splat(float value) { return _mm512_set1_ps(value); }
Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
// The instructions give b when a is NaN.
Vec min(Vec a, Vec b) { return _mm512_mask_mov_ps(_mm512_min_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a); }
Vec max(Vec a, Vec b) { return _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a); }
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

Vec splat(float value) { return _mm256_set1_ps(value); }
Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
// The instructions give b when a is NaN.
Vec min(Vec a, Vec b) { return _mm256_blendv_ps(_mm256_min_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
Vec max(Vec a, Vec b) { return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
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

// --- the operations: the scalar form is the definition
// ------------------------------------------------------------------------------------------------------

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a + b);
  }
#if defined(__AVX2__)
  static Vec apply(Vec a, Vec b) { return add(a, b); }
#endif
};

struct Avg : Sum {};  // divided at the end

struct Product {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a * b);
  }
#if defined(__AVX2__)
  static Vec apply(Vec a, Vec b) { return mul(a, b); }
#endif
};

struct Min {
  template <class T>
  static T apply(T a, T b) {
    return a < b || a != a ? a : b;
  }
#if defined(__AVX2__)
  static Vec apply(Vec a, Vec b) { return min(a, b); }
#endif
};

struct Max {
  template <class T>
  static T apply(T a, T b) {
    return a > b || a != a ? a : b;
  }
#if defined(__AVX2__)
  static Vec apply(Vec a, Vec b) { return max(a, b); }
#endif
};

struct Band {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct Bor {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct Bxor {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

// --- float32, bfloat16, float16: accumulated in fp32
// ------------------------------------------------------------------------------------------------------

template <class Type, class Op, int kSources>
void reduce_n(const typename Type::Storage* const* sources, int n_runtime, typename Type::Storage* dst,
              typename Type::Storage* dst2, size_t count) {
  const int n = kSources != 0 ? kSources : n_runtime;
  size_t i = 0;
#if defined(__AVX2__)
  const Vec divisor = splat(static_cast<float>(n));
  for (; i + kLanes <= count; i += kLanes) {
    Vec value = load(sources[0] + i, Type{});
    for (int s = 1; s < n; ++s) value = Op::apply(value, load(sources[s] + i, Type{}));
    if constexpr (std::is_same_v<Op, Avg>) value = div(value, divisor);
    store(dst + i, value, Type{});
    if (dst2 != nullptr) store(dst2 + i, value, Type{});
  }
#endif
  for (; i < count; ++i) {
    float value = Type::load1(sources[0] + i);
    for (int s = 1; s < n; ++s) value = Op::apply(value, Type::load1(sources[s] + i));
    if constexpr (std::is_same_v<Op, Avg>) value /= static_cast<float>(n);
    Type::store1(dst + i, value);
    if (dst2 != nullptr) Type::store1(dst2 + i, value);
  }
}

template <class Type, class Op>
void reduce(const void* const* sources, int n_sources, void* dst, void* dst2, size_t count) {
  using Storage = typename Type::Storage;
  const auto* const* typed = reinterpret_cast<const Storage* const*>(sources);
  auto* out = static_cast<Storage*>(dst);
  auto* out2 = static_cast<Storage*>(dst2);
  if (n_sources == 2)
    reduce_n<Type, Op, 2>(typed, 2, out, out2, count);
  else
    reduce_n<Type, Op, 0>(typed, n_sources, out, out2, count);
}

// --- float64 and integers: accumulated as they are, block by block so that the compiler makes vectors of it
// ------------------------------------------------------------------------------------------------------

// Overflow wraps around, which only unsigned types may do. Small ones would be promoted to int, so they are cast back.
template <class T, class Op>
struct Accumulator {
  using type = T;
};
template <class T>
  requires std::is_integral_v<T>
struct Accumulator<T, Sum> {
  using type = std::make_unsigned_t<T>;
};
// The sum that an average is made of is the true one.
__extension__ typedef __int128 Int128;
template <class T>
  requires std::is_integral_v<T>
struct Accumulator<T, Avg> {
  using type = std::conditional_t<sizeof(T) == 8, Int128, int64_t>;
};
template <class T>
  requires std::is_integral_v<T>
struct Accumulator<T, Product> {
  // uint16 times uint16 would overflow int.
  using type = std::conditional_t<sizeof(T) == 2, uint32_t, std::make_unsigned_t<T>>;
};

constexpr size_t kBlockBytes = 2048;

// Not inlined: several of the functions below share it.
template <class T, class Op>
[[gnu::noinline]] void accumulate(const T* const* sources, int n_sources, size_t at, size_t n,
                                  typename Accumulator<T, Op>::type* __restrict block) {
  using A = typename Accumulator<T, Op>::type;
  for (size_t i = 0; i < n; ++i) block[i] = static_cast<A>(sources[0][at + i]);
  for (int s = 1; s < n_sources; ++s) {
    const T* next = sources[s] + at;
    for (size_t i = 0; i < n; ++i) block[i] = Op::apply(block[i], static_cast<A>(next[i]));
  }
}

template <class T, class Op>
void reduce_plain(const void* const* sources, int n_sources, void* dst, void* dst2, size_t count) {
  using A = typename Accumulator<T, Op>::type;
  constexpr size_t kBlock = kBlockBytes / sizeof(A);
  alignas(64) A block[kBlock];
  const auto* const* typed = reinterpret_cast<const T* const*>(sources);
  auto* out = static_cast<T*>(dst);
  auto* out2 = static_cast<T*>(dst2);
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t n = std::min(kBlock, count - at);
    accumulate<T, Op>(typed, n_sources, at, n, block);
    for (size_t i = 0; i < n; ++i) {
      A value = block[i];
      if constexpr (std::is_same_v<Op, Avg>) value /= static_cast<A>(n_sources);
      out[at + i] = static_cast<T>(value);
    }
    if (out2 != nullptr) std::memcpy(out2 + at, out + at, n * sizeof(T));
  }
}

// What goes bit by bit is the same for every integer.
template <class T, class Op>
void reduce_bits(const void* const* sources, int n_sources, void* dst, void* dst2, size_t count) {
  reduce_plain<uint8_t, Op>(sources, n_sources, dst, dst2, count * sizeof(T));
}

// --- residual + sum, then RMS norm (Zhang and Sennrich, "Root mean square layer normalization", 2019)
// ------------------------------------------------------------------------------------------------------

// The squares are summed in 16 lanes and the lanes pairwise, so that the width of a vector does not show.
constexpr size_t kNormLanes = 16;

template <class Type>
void add_rms_norm(const void* const* sources, int n_sources, void* residual, const void* weight, float eps, void* out,
                  size_t rows, size_t width) {
  using Storage = typename Type::Storage;
  const auto* const* typed = reinterpret_cast<const Storage* const*>(sources);
  const auto* gain = static_cast<const Storage*>(weight);
  for (size_t row = 0; row < rows; ++row) {
    auto* r = static_cast<Storage*>(residual) + row * width;
    auto* o = static_cast<Storage*>(out) + row * width;
    alignas(64) float lanes[kNormLanes] = {};
    for (size_t i = 0; i < width; i += kNormLanes) {
      const size_t n = std::min(kNormLanes, width - i);
      alignas(64) float sum[kNormLanes] = {};
      for (size_t k = 0; k < n; ++k) sum[k] = Type::load1(typed[0] + row * width + i + k);
      for (int s = 1; s < n_sources; ++s)
        for (size_t k = 0; k < n; ++k) sum[k] += Type::load1(typed[s] + row * width + i + k);
      for (size_t k = 0; k < n; ++k) {
        Storage rounded;  // as an all-reduce in the dtype gives it
        Type::store1(&rounded, sum[k]);
        Type::store1(r + i + k, Type::load1(r + i + k) + Type::load1(&rounded));
      }
      for (size_t k = 0; k < n; ++k) {
        const float value = Type::load1(r + i + k);
        lanes[k] += value * value;
      }
    }
    for (size_t half = kNormLanes / 2; half > 0; half /= 2)
      for (size_t k = 0; k < half; ++k) lanes[k] += lanes[k + half];
    const float scale = 1.0f / std::sqrt(lanes[0] / static_cast<float>(width) + eps);
    for (size_t i = 0; i < width; ++i) Type::store1(o + i, Type::load1(r + i) * scale * Type::load1(gain + i));
  }
}

template <class Type>
void fill_narrow(ReduceFn* by) {
  const ReduceFn all[kReduceOps] = {reduce<Type, Sum>,
                                    reduce<Type, Avg>,
                                    reduce<Type, Product>,
                                    reduce<Type, Min>,
                                    reduce<Type, Max>,
                                    nullptr,
                                    nullptr,
                                    nullptr};
  std::copy(all, all + kReduceOps, by);
}

template <class T>
void fill_plain(ReduceFn* by) {
  // Overflow wraps around, so that a signed sum or product has the bits of the unsigned one.
  using U = typename Accumulator<T, Sum>::type;
  by[0] = reduce_plain<U, Sum>;
  by[1] = reduce_plain<T, Avg>;
  by[2] = reduce_plain<U, Product>;
  by[3] = reduce_plain<T, Min>;
  by[4] = reduce_plain<T, Max>;
  if constexpr (std::is_integral_v<T>) {
    by[5] = reduce_bits<T, Band>;
    by[6] = reduce_bits<T, Bor>;
    by[7] = reduce_bits<T, Bxor>;
  }
}

ReduceKernels make_kernels() {
  ReduceKernels kernels{};
  fill_narrow<F32>(kernels.by[static_cast<int>(DType::f32)]);
  fill_narrow<BF16>(kernels.by[static_cast<int>(DType::bf16)]);
  fill_narrow<F16>(kernels.by[static_cast<int>(DType::f16)]);
  fill_plain<double>(kernels.by[static_cast<int>(DType::f64)]);
  fill_plain<int8_t>(kernels.by[static_cast<int>(DType::i8)]);
  fill_plain<int16_t>(kernels.by[static_cast<int>(DType::i16)]);
  fill_plain<int32_t>(kernels.by[static_cast<int>(DType::i32)]);
  fill_plain<int64_t>(kernels.by[static_cast<int>(DType::i64)]);
  fill_plain<uint8_t>(kernels.by[static_cast<int>(DType::u8)]);
  kernels.add_rms_norm[0] = add_rms_norm<F32>;
  kernels.add_rms_norm[1] = add_rms_norm<BF16>;
  kernels.add_rms_norm[2] = add_rms_norm<F16>;
  return kernels;
}

}  // namespace

const ReduceKernels& ANYACCEL_CONCAT(reduce_kernels_, ANYACCEL_ISA_VARIANT)() {
  static const ReduceKernels kernels = make_kernels();
  return kernels;
}

}  // namespace anyaccel::comm
