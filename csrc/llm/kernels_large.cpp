// SPDX-License-Identifier: Apache-2.0
// ISA: scalar avx2 avx512
// Large products in float.
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "llm/large_tile.h"
#if defined(__AVX512F__)
#include "llm/large_avx512.h"
#endif

#define ANYACCEL_CONCAT_(a, b) a##b
#define ANYACCEL_CONCAT(a, b) ANYACCEL_CONCAT_(a, b)

namespace anyaccel::llm {
namespace {

#if defined(__AVX512F__)
struct Float {
  using Vec = __m512;
  using Operand = __m512;
  // 28 sums, 2 weights and an activation of 32 registers; 28 multiplications for 16 loads.
  static constexpr int kTokens = 14, kBlocks = 2, kVecs = 1, kColumns = 1;
  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
  static Vec broadcast(float value) { return _mm512_set1_ps(value); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Operand operand(const uint8_t* p) { return _mm512_loadu_ps(p); }
  static Operand broadcast_operand(const uint8_t* p) {
    float value;
    std::memcpy(&value, p, sizeof value);
    return _mm512_set1_ps(value);
  }
  static Vec fma(Operand a, Operand b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static __m512i lanes(const float* p, int64_t count) {
    const auto valid = static_cast<__mmask16>(count >= 16 ? 0xffff : count > 0 ? (1 << count) - 1 : 0);
    return _mm512_maskz_loadu_epi32(valid, p);
  }
};
constexpr int64_t kUnits = 16;                // 28 KiB of activations
constexpr size_t kCache = size_t{512} << 10;  // of an L2 cache of at least 1 MiB

void unpack_quantised(const BlockLayout& layout, const uint8_t* block, int64_t unit, int64_t units, uint8_t* to) {
  for (int64_t u = unit; u < unit + units; ++u, to += kUnit * kLineBytes)
    for_columns(layout, block, u, [&](int column, const __m512(&values)[4]) {
      for (int i = 0; i < 4; ++i) _mm512_storeu_ps(to + (column + i) * kLineBytes, values[i]);
    });
}
#elif defined(__AVX2__)
struct Float {
  using Vec = __m256;
  using Operand = __m256;
  static constexpr int kTokens = 6, kBlocks = 1, kVecs = 2, kColumns = 1;  // 12 sums of 16 registers
  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
  static Vec broadcast(float value) { return _mm256_set1_ps(value); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Operand operand(const uint8_t* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
  static Operand broadcast_operand(const uint8_t* p) { return _mm256_broadcast_ss(reinterpret_cast<const float*>(p)); }
  static Vec fma(Operand a, Operand b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
};
constexpr int64_t kUnits = 12;
constexpr size_t kCache = size_t{160} << 10;  // of an L2 cache of at least 256 KiB
#else
// Vectors of the compiler: SSE here, NEON elsewhere.
typedef float Float4 __attribute__((vector_size(16)));
struct Float {
  using Vec = Float4;
  using Operand = Float4;
  static constexpr int kTokens = 3, kBlocks = 1, kVecs = 4, kColumns = 1;
  static Vec zero() { return Vec{}; }
  static Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
  static Vec broadcast(float value) { return Vec{value, value, value, value}; }
  static Vec add(Vec a, Vec b) { return a + b; }
  static Vec mul(Vec a, Vec b) { return a * b; }
  static Operand operand(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
  static Operand broadcast_operand(const uint8_t* p) { return broadcast(*reinterpret_cast<const float*>(p)); }
  static Vec fma(Operand a, Operand b, Vec c) { return a * b + c; }
};
constexpr int64_t kUnits = 12;
constexpr size_t kCache = size_t{160} << 10;
#endif

#if !defined(__AVX512F__)
constexpr decltype(LargeKernels::unpack) unpack_quantised = nullptr;
#endif

}  // namespace

const LargeKernels& ANYACCEL_CONCAT(large_kernels_, ANYACCEL_ISA_VARIANT)() {
  static constexpr LargeKernels kernels =
      kernels_of<Float>(LargeKernels::Operands::floats, kUnits, kCache, unpack_quantised);
  return kernels;
}

}  // namespace anyaccel::llm
