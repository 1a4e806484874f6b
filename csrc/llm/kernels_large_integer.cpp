// SPDX-License-Identifier: Apache-2.0
// ISA: avx512 avx512_vnni
// Large products of quantised weights with activations rounded to 8 bits, which have a scale for each token and unit of
// 32 columns (as in small.h): sums of a unit are integers. VNNI multiplies int8 and 4-bit weights at four times the
// rate of floats. Without it sums of 4-bit weights fit 16 bits, at twice the rate; int8 ones do not, and are not for
// here.
//
// A panel of activations: for each unit [token][32 columns] int8, then [token] scale, then [token] scale * sum.
// Unpacked weights: for each unit 8 lines [16 rows][4 columns] unsigned, then 16 scales, then 16 minima.
#ifdef __AVX512F__  // other machines have nothing here
#include <immintrin.h>

#include "llm/large_avx512.h"
#include "llm/large_kernels.h"
#include "llm/tiles.h"

#define ANYACCEL_CONCAT_(a, b) a##b
#define ANYACCEL_CONCAT(a, b) ANYACCEL_CONCAT_(a, b)

namespace anyaccel::llm {
namespace {

constexpr int kTokens = 32;  // of a panel
constexpr int64_t kTokenBytes = kUnit + 8;
constexpr int64_t kPanelUnit = kTokens * kTokenBytes;
constexpr int kLines = 8;                           // of weights a unit
constexpr int64_t kWeightUnit = (kLines + 2) * 64;  // scales and minima too
constexpr int kWidth = 32;                          // rows of a tile

void pack(const float* x, int64_t stride, const int32_t* rows, int tokens, int64_t cols, int64_t total, void* panel) {
  for (int t = 0; t < tokens; ++t) {
    const float* row = x + (rows != nullptr ? rows[t] : t) * stride;
    auto* out = static_cast<uint8_t*>(panel);
    for (int64_t u = 0; u < total; ++u, out += kPanelUnit) {
      const int64_t left = cols - u * kUnit;
      const auto first = static_cast<__mmask16>(left >= 16 ? 0xffff : left > 0 ? (1 << left) - 1 : 0);
      const auto second = static_cast<__mmask16>(left >= 32 ? 0xffff : left > 16 ? (1 << (left - 16)) - 1 : 0);
      const __m512 a = _mm512_maskz_loadu_ps(first, row + u * kUnit);
      const __m512 b = second != 0 ? _mm512_maskz_loadu_ps(second, row + u * kUnit + 16) : _mm512_setzero_ps();
      // As bits, a NaN or an infinity is the largest: the scale becomes NaN.
      const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
      const int largest_bits = _mm512_reduce_max_epi32(_mm512_max_epi32(
          _mm512_and_si512(_mm512_castps_si512(a), magnitude), _mm512_and_si512(_mm512_castps_si512(b), magnitude)));
      float largest;
      std::memcpy(&largest, &largest_bits, sizeof largest);
      const bool finite = largest_bits < 0x7f800000;
      // Below that size the inverse of the scale is not finite, and zero is near enough.
      const bool some = finite && largest > 1e-30f;
      const float scale = finite ? (some ? largest / 127.0f : 0.0f) : __builtin_nanf("");
      const __m512 inverse = _mm512_set1_ps(some ? 127.0f / largest : 0.0f);
      const __m512i zero = _mm512_setzero_si512();
      const __m512i qa = some ? _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)) : zero;
      const __m512i qb = some ? _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse)) : zero;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + t * kUnit), _mm512_cvtsepi32_epi8(qa));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + t * kUnit + 16), _mm512_cvtsepi32_epi8(qb));
      const float sum = scale * static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(qa, qb)));
      std::memcpy(out + kTokens * kUnit + t * 4, &scale, 4);
      std::memcpy(out + kTokens * (kUnit + 4) + t * 4, &sum, 4);
    }
  }
}

void unpack(const BlockLayout& layout, const uint8_t* block, int64_t unit, int64_t units, uint8_t* to) {
  for (int64_t u = unit; u < unit + units; ++u, to += kWeightUnit) {
    for_quads(layout, block, u, [&](int quad, __m512i bytes) { _mm512_storeu_si512(to + quad * 64, bytes); });
    const Scales scales = scales_of(layout, block, u * kUnit);
    _mm512_storeu_ps(to + kLines * 64, scales.scale);
    _mm512_storeu_ps(to + (kLines + 1) * 64, scales.minimum);
  }
}

__m512i four_of(const uint8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  return _mm512_set1_epi32(four);
}

// The sums over a unit of two blocks of weights and a token, as floats.
struct UnitSums {
  __m512 a, b;
};
struct With_avx512 {};
struct With_avx512_vnni {};
inline UnitSums unit_sums(With_avx512_vnni, const __m512i (&a)[kLines], const __m512i (&b)[kLines], const uint8_t* x) {
  __m512i sum_a = _mm512_setzero_si512(), sum_b = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = 0; i < kLines; ++i) {
    const __m512i four = four_of(x + 4 * i);
    sum_a = dot_u8s8(sum_a, a[i], four);
    sum_b = dot_u8s8(sum_b, b[i], four);
  }
  return {_mm512_cvtepi32_ps(sum_a), _mm512_cvtepi32_ps(sum_b)};
}
// 4-bit weights only: 16 products of at most 15 * 127 a sum.
inline UnitSums unit_sums(With_avx512, const __m512i (&a)[kLines], const __m512i (&b)[kLines], const uint8_t* x) {
  const __m512i first = four_of(x);
  __m512i sum_a = _mm512_maddubs_epi16(a[0], first), sum_b = _mm512_maddubs_epi16(b[0], first);
#pragma GCC unroll 8
  for (int i = 1; i < kLines; ++i) {
    const __m512i four = four_of(x + 4 * i);
    sum_a = _mm512_add_epi16(sum_a, _mm512_maddubs_epi16(a[i], four));
    sum_b = _mm512_add_epi16(sum_b, _mm512_maddubs_epi16(b[i], four));
  }
  const __m512i ones = _mm512_set1_epi16(1);
  return {_mm512_cvtepi32_ps(_mm512_madd_epi16(sum_a, ones)), _mm512_cvtepi32_ps(_mm512_madd_epi16(sum_b, ones))};
}
using Variant = ANYACCEL_CONCAT(With_, ANYACCEL_ISA_VARIANT);

// A unit's weights of two blocks stay in registers for all tokens of the panel; the tokens' sums are in the L1 cache.
void multiply_tile(const uint8_t* x, int tokens, int64_t units, const uint8_t* weights, int64_t weight_stride,
                   const LargeTile& to) {
  alignas(64) float sums[kTokens][kWidth];
  for (int t = 0; t < tokens; ++t) {
    _mm512_store_ps(&sums[t][0], _mm512_setzero_ps());
    _mm512_store_ps(&sums[t][16], _mm512_setzero_ps());
    __builtin_prefetch(to.out + t * to.stride, 1);
    __builtin_prefetch(to.out + t * to.stride + 16, 1);
  }
  for (int64_t u = 0; u < units; ++u) {
    const uint8_t* other = weights + weight_stride;
    __m512i a[kLines], b[kLines];
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) {
      a[i] = _mm512_loadu_si512(weights + i * 64);
      b[i] = _mm512_loadu_si512(other + i * 64);
    }
    const __m512 scale_a = _mm512_loadu_ps(weights + kLines * 64), scale_b = _mm512_loadu_ps(other + kLines * 64);
    const __m512 minimum_a = _mm512_loadu_ps(weights + kLines * 64 + 64);
    const __m512 minimum_b = _mm512_loadu_ps(other + kLines * 64 + 64);
    for (int t = 0; t < tokens; ++t) {
      const UnitSums unit = unit_sums(Variant{}, a, b, x + t * kUnit);
      float scale_x, sum_x;
      std::memcpy(&scale_x, x + kTokens * kUnit + t * 4, 4);
      std::memcpy(&sum_x, x + kTokens * (kUnit + 4) + t * 4, 4);
      const __m512 scale = _mm512_set1_ps(scale_x), sum = _mm512_set1_ps(sum_x);
      __m512 total_a = _mm512_fmadd_ps(minimum_a, sum, _mm512_load_ps(&sums[t][0]));
      __m512 total_b = _mm512_fmadd_ps(minimum_b, sum, _mm512_load_ps(&sums[t][16]));
      total_a = _mm512_fmadd_ps(unit.a, _mm512_mul_ps(scale_a, scale), total_a);
      total_b = _mm512_fmadd_ps(unit.b, _mm512_mul_ps(scale_b, scale), total_b);
      _mm512_store_ps(&sums[t][0], total_a);
      _mm512_store_ps(&sums[t][16], total_b);
    }
    x += kPanelUnit;
    weights += kWeightUnit;
  }
  write_sums<kWidth>(&sums[0][0], tokens, to);
}

// The last block of a matrix may have no second one: it is multiplied twice, and written once.
void multiply(const void* panel, int tokens, int64_t total, int64_t unit, int64_t units, const uint8_t* weights,
              int64_t weight_stride, int64_t blocks, const LargeTile& to) {
  (void)total;
  const uint8_t* x = static_cast<const uint8_t*>(panel) + unit * kPanelUnit;
  LargeTile tile = to;
  for (int64_t b = 0; b < blocks; b += 2) {
    multiply_tile(x, tokens, units, weights, blocks - b > 1 ? weight_stride : 0, tile);
    weights += 2 * weight_stride;
    tile.out += kWidth;
    tile.rows -= kWidth;
    if (tile.bias != nullptr) tile.bias += kWidth;
  }
}

}  // namespace

const LargeKernels& ANYACCEL_CONCAT(large_integer_kernels_, ANYACCEL_ISA_VARIANT)() {
  static constexpr LargeKernels kernels{.operands = LargeKernels::Operands::bytes,
                                        .full_panels = true,
                                        .panel_tokens = kTokens,
                                        .tile_blocks = 2,
                                        .units = 64,
                                        .cache_bytes = size_t{512} << 10,
                                        .activation_bytes = kTokenBytes,
                                        .weight_bytes = kWeightUnit,
                                        .unpack_cost = 8,
                                        .pack = pack,
                                        .unpack = unpack,
                                        .multiply = multiply,
                                        .begin = nullptr,
                                        .end = nullptr};
  return kernels;
}

}  // namespace anyaccel::llm
#endif
