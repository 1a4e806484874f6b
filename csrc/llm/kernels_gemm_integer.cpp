// SPDX-License-Identifier: Apache-2.0
// ISA: avx512 avx512_vnni
// Matrix products (gemm) of quantised weights with activations rounded to 8 bits, which have a scale for each token and
// unit of 32 columns (as in gemv.h): sums of a unit are integers. VNNI multiplies int8 and 4-bit weights at four times
// the rate of floats. Without it sums of 4-bit weights fit 16 bits, at twice the rate; int8 ones do not, and are not
// for here.
//
// A panel of activations: for each unit [token][32 columns] int8, then [token] scale, then [token] scale * sum.
// Unpacked weights: for each unit 8 lines [16 rows][4 columns] unsigned, then 16 scales, then 16 minima.
#include "llm/gemm_avx512.h"
#include "llm/gemm_kernels.h"

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
      const Vec a = load_first(row + u * kUnit, left);
      const Vec b = left > 16 ? load_first(row + u * kUnit + 16, left - 16) : broadcast(0.0f);
      // Compared as integers, the bits of a NaN or an infinity are the largest, so the scale becomes NaN.
      const IVec magnitude = _mm512_set1_epi32(0x7fffffff);
      const int largest_bits = _mm512_reduce_max_epi32(_mm512_max_epi32(
          _mm512_and_si512(_mm512_castps_si512(a), magnitude), _mm512_and_si512(_mm512_castps_si512(b), magnitude)));
      float largest;
      std::memcpy(&largest, &largest_bits, sizeof largest);
      const bool finite = largest_bits < 0x7f800000;
      // Below that size the inverse of the scale is not finite, and zero is near enough.
      const bool some = finite && largest > 1e-30f;
      const float scale = finite ? (some ? largest / 127.0f : 0.0f) : __builtin_nanf("");
      const Vec inverse = broadcast(some ? 127.0f / largest : 0.0f);
      const IVec zero = _mm512_setzero_si512();
      const IVec qa = some ? _mm512_cvtps_epi32(mul(a, inverse)) : zero;
      const IVec qb = some ? _mm512_cvtps_epi32(mul(b, inverse)) : zero;
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
    for_quads(layout, block, u, [&](int quad, IVec bytes) { store(static_cast<void*>(to + quad * 64), bytes); });
    const Scales scales = scales_of(layout, block, u * kUnit);
    store(reinterpret_cast<float*>(to + kLines * 64), scales.scale);
    store(reinterpret_cast<float*>(to + (kLines + 1) * 64), scales.minimum);
  }
}

// The sums over a unit of two blocks of weights and a token, as floats.
struct UnitSums {
  Vec a, b;
};
#ifdef ANYACCEL_VNNI
inline UnitSums unit_sums(const IVec (&a)[kLines], const IVec (&b)[kLines], const uint8_t* x) {
  IVec sum_a = _mm512_setzero_si512(), sum_b = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = 0; i < kLines; ++i) {
    const IVec four = quad_at(x + 4 * i);
    sum_a = dot_bytes(sum_a, a[i], four);
    sum_b = dot_bytes(sum_b, b[i], four);
  }
  return {convert(sum_a), convert(sum_b)};
}
#else
// 4-bit weights only: 16 products of at most 15 * 127 a sum.
inline UnitSums unit_sums(const IVec (&a)[kLines], const IVec (&b)[kLines], const uint8_t* x) {
  const IVec first = quad_at(x);
  IVec sum_a = _mm512_maddubs_epi16(a[0], first), sum_b = _mm512_maddubs_epi16(b[0], first);
#pragma GCC unroll 8
  for (int i = 1; i < kLines; ++i) {
    const IVec four = quad_at(x + 4 * i);
    sum_a = _mm512_add_epi16(sum_a, _mm512_maddubs_epi16(a[i], four));
    sum_b = _mm512_add_epi16(sum_b, _mm512_maddubs_epi16(b[i], four));
  }
  const IVec ones = _mm512_set1_epi16(1);
  return {convert(_mm512_madd_epi16(sum_a, ones)), convert(_mm512_madd_epi16(sum_b, ones))};
}
#endif

// A unit's weights of two blocks stay in registers for all tokens of the panel; the tokens' sums are in the L1 cache.
void multiply_tile(const uint8_t* x, int tokens, int64_t units, const uint8_t* weights, int64_t weight_stride,
                   const GemmTile& to) {
  alignas(64) float sums[kTokens][kWidth];
  for (int t = 0; t < tokens; ++t) {
    store(&sums[t][0], broadcast(0.0f));
    store(&sums[t][16], broadcast(0.0f));
    __builtin_prefetch(to.out + t * to.stride, 1);
    __builtin_prefetch(to.out + t * to.stride + 16, 1);
  }
  for (int64_t u = 0; u < units; ++u) {
    const uint8_t* other = weights + weight_stride;
    IVec a[kLines], b[kLines];
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) {
      a[i] = load_ints(weights + i * 64);
      b[i] = load_ints(other + i * 64);
    }
    const Vec scale_a = load(reinterpret_cast<const float*>(weights + kLines * 64)),
              scale_b = load(reinterpret_cast<const float*>(other + kLines * 64));
    const Vec minimum_a = load(reinterpret_cast<const float*>(weights + kLines * 64 + 64));
    const Vec minimum_b = load(reinterpret_cast<const float*>(other + kLines * 64 + 64));
    for (int t = 0; t < tokens; ++t) {
      const UnitSums unit = unit_sums(a, b, x + t * kUnit);
      float scale_x, sum_x;
      std::memcpy(&scale_x, x + kTokens * kUnit + t * 4, 4);
      std::memcpy(&sum_x, x + kTokens * (kUnit + 4) + t * 4, 4);
      const Vec scale = broadcast(scale_x), sum = broadcast(sum_x);
      Vec total_a = fma(minimum_a, sum, load(&sums[t][0]));
      Vec total_b = fma(minimum_b, sum, load(&sums[t][16]));
      total_a = fma(unit.a, mul(scale_a, scale), total_a);
      total_b = fma(unit.b, mul(scale_b, scale), total_b);
      store(&sums[t][0], total_a);
      store(&sums[t][16], total_b);
    }
    x += kPanelUnit;
    weights += kWeightUnit;
  }
  write_sums<kWidth>(&sums[0][0], tokens, to);
}

// The last block of a matrix may have no second one: it is multiplied twice, and written once.
void multiply(const void* panel, int tokens, int64_t total, int64_t unit, int64_t units, const uint8_t* weights,
              int64_t weight_stride, int64_t blocks, const GemmTile& to) {
  (void)total;
  const uint8_t* x = static_cast<const uint8_t*>(panel) + unit * kPanelUnit;
  GemmTile tile = to;
  for (int64_t b = 0; b < blocks; b += 2) {
    multiply_tile(x, tokens, units, weights, blocks - b > 1 ? weight_stride : 0, tile);
    weights += 2 * weight_stride;
    tile.out += kWidth;
    tile.rows -= kWidth;
    if (tile.bias != nullptr) tile.bias += kWidth;
  }
}

constexpr IntegerGemmKernels kKernels{{.operands = GemmKernels::Operands::bytes,
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
                                       .end = nullptr}};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::IntegerGemmKernels, anyaccel::llm::kKernels)
