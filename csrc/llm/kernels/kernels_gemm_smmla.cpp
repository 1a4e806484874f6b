// SPDX-License-Identifier: Apache-2.0
// ISA: neon_bf16_i8mm
// Matrix products (gemm) of quantised weights with activations rounded to 8 bits, as in kernels_gemm_integer.cpp, with
// Armv8.6's SMMLA, which multiplies two tokens with two rows over eight columns.
//
// A panel of activations: for each unit [pair of tokens] of [4 steps][2 tokens][8 columns] int8, then both scales, each
// twice, then both scale * sum, each twice.
// Unpacked weights: for each half of the rows and unit [4 steps][4 pairs of rows][2 rows][8 columns] int8, with a sign,
// then [4 pairs of rows][twice][2 rows] scales, then as many minima.
#include "llm/kernels/gemm_integer.h"
#include "llm/kernels/gemm_mmla.h"

namespace anyaccel::llm {
namespace {

constexpr int kTokens = 16;  // of a panel
constexpr int kPairsAtOnce = 2;
constexpr int kSteps = kUnit / 8;
constexpr int64_t kPairUnit = kSteps * 16 + 32;
constexpr int64_t kPanelUnit = kTokens / 2 * kPairUnit;
constexpr int64_t kHalfUnit = kSteps * kRowPairs * 16 + 4 * kTileRows * 4;

// Both tokens of a pair are written together: the second one of the last pair may not exist, and is zeros.
void pack(const float* x, int64_t stride, const int32_t* rows, int tokens, int64_t cols, int64_t total, void* panel) {
  for (int t = 0; t < tokens + tokens % 2; ++t) {
    const float* row = t < tokens ? x + (rows != nullptr ? rows[t] : t) * stride : nullptr;
    auto* out = static_cast<uint8_t*>(panel) + t / 2 * kPairUnit;
    for (int64_t u = 0; u < total; ++u, out += kPanelUnit) {
      int8_t q[kUnit] = {};
      const QuantisedUnit unit =
          row != nullptr ? quantise_unit(row + u * kUnit, cols - u * kUnit, q) : QuantisedUnit{0, 0};
      for (int s = 0; s < kSteps; ++s) std::memcpy(out + s * 16 + t % 2 * 8, q + s * 8, 8);
      vst1_f32(reinterpret_cast<float*>(out + kSteps * 16 + t % 2 * 8), vdup_n_f32(unit.scale));
      vst1_f32(reinterpret_cast<float*>(out + kSteps * 16 + 16 + t % 2 * 8), vdup_n_f32(unit.scaled_sum()));
    }
  }
}

// Two pairs of values, each pair twice.
inline void store_twice(float* to, Vec v) {
  const float64x2_t pairs = vreinterpretq_f64_f32(v);
  store(to, vreinterpretq_f32_f64(vdupq_laneq_f64(pairs, 0)));
  store(to + 4, vreinterpretq_f32_f64(vdupq_laneq_f64(pairs, 1)));
}

void unpack(const BlockLayout& layout, const uint8_t* block, int64_t unit, int64_t units, uint8_t* to) {
  for (int64_t u = unit; u < unit + units; ++u, to += kHalfUnit) {
    uint8_t lines[kUnit * kRows];
    const uint8_t* from = signed_unit(layout, block, u, lines);
    for (int row = 0; row < kRows; row += kLanes) {
      uint8_t* half = to + row / kTileRows * units * kHalfUnit;
      for (int s = 0; s < kSteps; ++s) {
        const IVec low = load_ints(from + (2 * s * kRows + row) * 4),
                   high = load_ints(from + ((2 * s + 1) * kRows + row) * 4);
        uint8_t* pairs = half + (s * kRowPairs + row % kTileRows / 2) * 16;
        store(static_cast<void*>(pairs), first_rows(low, high));
        store(static_cast<void*>(pairs + 16), last_rows(low, high));
      }
      const RowScales of = row_scales(layout, block, u * kUnit, row);
      auto* scales = reinterpret_cast<float*>(half + kSteps * kRowPairs * 16) + row % kTileRows * 2;
      store_twice(scales, of.scale);
      store_twice(scales + 2 * kTileRows, of.minimum);
    }
  }
}

// Half a block times kPairs pairs of tokens.
template <bool kMinimum, int kPairs>
inline void multiply_tile(const uint8_t* x, int64_t units, const uint8_t* weights, int tokens, const GemmTile& to) {
  Vec sums[kPairs][kRowPairs];
#pragma GCC unroll 2
  for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 4
    for (int r = 0; r < kRowPairs; ++r) sums[p][r] = broadcast(0.0f);
  for (int64_t u = 0; u < units; ++u) {
    IVec unit[kPairs][kRowPairs];
#pragma GCC unroll 2
    for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 4
      for (int r = 0; r < kRowPairs; ++r) unit[p][r] = broadcast(int32_t{0});
    int8x16x4_t q[kPairs];
#pragma GCC unroll 2
    for (int p = 0; p < kPairs; ++p) q[p] = vld1q_s8_x4(reinterpret_cast<const int8_t*>(x + p * kPairUnit));
#pragma GCC unroll 4
    for (int s = 0; s < kSteps; ++s) {
      const int8x16x4_t w = vld1q_s8_x4(reinterpret_cast<const int8_t*>(weights + s * kRowPairs * 16));
#pragma GCC unroll 2
      for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 4
        for (int r = 0; r < kRowPairs; ++r) unit[p][r] = vmmlaq_s32(unit[p][r], q[p].val[s], w.val[r]);
    }
    const auto* scales = reinterpret_cast<const float*>(weights + kSteps * kRowPairs * 16);
#pragma GCC unroll 4
    for (int r = 0; r < kRowPairs; ++r) {
      const Vec scale = load(scales + r * kLanes);
#pragma GCC unroll 2
      for (int p = 0; p < kPairs; ++p) {
        const auto* params = reinterpret_cast<const float*>(x + p * kPairUnit + kSteps * 16);
        if constexpr (kMinimum)
          sums[p][r] = fma(load(scales + 2 * kTileRows + r * kLanes), load(params + kLanes), sums[p][r]);
        sums[p][r] = fma(convert(unit[p][r]), mul(scale, load(params)), sums[p][r]);
      }
    }
    x += kPanelUnit;
    weights += kHalfUnit;
  }
  write_sums(sums, tokens, to);
}

template <bool kMinimum>
void multiply(const void* panel, int tokens, int64_t total, int64_t unit, int64_t units, const uint8_t* weights,
              int64_t weight_stride, int64_t blocks, const GemmTile& to) {
  (void)total;
  const uint8_t* x = static_cast<const uint8_t*>(panel) + unit * kPanelUnit;
  for (int64_t tile = 0; tile < 2 * blocks; ++tile) {
    const uint8_t* half = weights + tile / 2 * weight_stride + tile % 2 * units * kHalfUnit;
    const GemmTile rows = rows_from(to, tile * kTileRows);
    int t = 0;
    for (; tokens - t > 2; t += 2 * kPairsAtOnce)
      multiply_tile<kMinimum, kPairsAtOnce>(x + t / 2 * kPairUnit, units, half, tokens - t, tokens_from(rows, t));
    if (t < tokens) multiply_tile<kMinimum, 1>(x + t / 2 * kPairUnit, units, half, tokens - t, tokens_from(rows, t));
  }
}

// A pass of 32 units: 24 KiB of activations, and 20 of a block of weights.
constexpr GemmKernels kGemm{.operands = GemmKernels::Operands::bytes,
                            .full_panels = true,
                            .panel_tokens = kTokens,
                            .tile_blocks = 1,
                            .units = 32,
                            .cache_bytes = size_t{256} << 10,
                            .activation_bytes = kPairUnit / 2,
                            .weight_bytes = 2 * kHalfUnit,
                            .unpack_cost = 8,
                            .pack = pack,
                            .unpack = unpack,
                            .multiply = multiply<true>,
                            .begin = nullptr,
                            .end = nullptr,
                            .multiply_symmetric = multiply<false>};
// Groups of 16 have two scales a unit.
constexpr IntegerGemmKernels kKernels{[](const Shape& shape) { return shape.group == kUnit / 2 ? nullptr : &kGemm; }};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::IntegerGemmKernels, anyaccel::llm::kKernels)
