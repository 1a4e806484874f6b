// SPDX-License-Identifier: Apache-2.0
// ISA: avx512_bf16
// Large products of pairs of bfloat16.
#ifdef __AVX512F__  // other machines have nothing here
#include <immintrin.h>

#include "llm/large_avx512.h"
#include "llm/large_tile.h"
#include "llm/tiles.h"

#define ANYACCEL_CONCAT_(a, b) a##b
#define ANYACCEL_CONCAT(a, b) ANYACCEL_CONCAT_(a, b)

namespace anyaccel::llm {
namespace {

struct Pairs {
  using Vec = __m512;
  using Operand = __m512i;
  static constexpr int kTokens = 14, kBlocks = 2, kVecs = 1, kColumns = 2;
  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
  static Vec broadcast(float value) { return _mm512_set1_ps(value); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Operand operand(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static Operand broadcast_operand(const uint8_t* p) {
    int32_t value;
    std::memcpy(&value, p, sizeof value);
    return _mm512_set1_epi32(value);
  }
  static Vec fma(Operand a, Operand b, Vec c) { return dot_bf16(c, a, b); }
  static __m512i lanes(const float* p, int64_t count) { return pairs_of(p, count); }
};

}  // namespace

const LargeKernels& ANYACCEL_CONCAT(large_pair_kernels_, ANYACCEL_ISA_VARIANT)() {
  static constexpr LargeKernels kernels =
      kernels_of<Pairs>(LargeKernels::Operands::pairs, 32, size_t{512} << 10, unpack_pairs);
  return kernels;
}

}  // namespace anyaccel::llm
#endif
