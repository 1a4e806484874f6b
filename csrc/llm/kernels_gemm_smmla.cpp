// SPDX-License-Identifier: Apache-2.0
// ISA: neon_bf16_i8mm
// Matrix products (gemm) of quantised weights with activations rounded to 8 bits, as in kernels_gemm_integer.cpp, with
// Armv8.6's SMMLA, which multiplies two tokens with two rows over eight columns.
//
// A panel of activations: for each unit [pair of tokens] of [4 steps][2 tokens][8 columns] int8, then both scales, each
// twice, then both scale * sum, each twice.
// Unpacked weights: for each unit [half of the rows][4 steps][4 pairs of rows][2 rows][8 columns] int8, then 16 scales,
// then 16 minima.
#include "llm/bit_planes.h"
#include "llm/gemm_integer.h"
#include "llm/gemm_mmla.h"

namespace anyaccel::llm {
namespace {

constexpr int kTokens = 16;  // of a panel
constexpr int kPairsAtOnce = 2;
constexpr int kSteps = kUnit / 8;
constexpr int64_t kPairUnit = kSteps * 16 + 32;
constexpr int64_t kPanelUnit = kTokens / 2 * kPairUnit;
constexpr int64_t kHalfUnit = kSteps * kRowPairs * 16;
constexpr int64_t kWeightUnit = 2 * kHalfUnit + 2 * kRows * 4;

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
      vst1_f32(reinterpret_cast<float*>(out + kSteps * 16 + 16 + t % 2 * 8), vdup_n_f32(unit.sum));
    }
  }
}

// Four rows' first four and last four columns of a step.
inline void put_rows(IVec low, IVec high, int step, int row, uint8_t* unit) {
  uint8_t* to = unit + row / kTileRows * kHalfUnit + (step * kRowPairs + row % kTileRows / 2) * 16;
  store(static_cast<void*>(to), first_rows(low, high));
  store(static_cast<void*>(to + 16), last_rows(low, high));
}

void unpack(const BlockLayout& layout, const uint8_t* block, int64_t unit, int64_t units, uint8_t* to) {
  for (int64_t u = unit; u < unit + units; ++u, to += kWeightUnit) {
    const FormatRow& format = row_of(layout.format);
    const bool nibbles = layout.format == Format::i4;
    const uint8_t* from = block + u * kUnit * kRows * format.bits / 8;
    uint8_t expanded[kUnit * kRows];
    if (!nibbles && layout.format != Format::i8) {
      expand_unit(format, from, 0, expanded);
      from = expanded;
    }
    for (int s = 0; s < kSteps; ++s)
      for (int row = 0; row < kRows; row += kLanes) {
        if (!nibbles) {
          const uint8_t* line = from + s * 128 + row * 4;
          put_rows(load_ints(line), load_ints(line + 64), s, row, to);
        } else {
          const Nibbles line = load_nibbles(from + s * 64 + row * 4);
          put_rows(line.low, line.high, s, row, to);
        }
      }
    write_scales(layout, block, u * kUnit, to + 2 * kHalfUnit);
  }
}

// Two values, twice.
inline Vec twice(const uint8_t* p) { return vreinterpretq_f32_f64(vdupq_n_f64(read<double>(p))); }

// Half a block times kPairs pairs of tokens.
template <int kPairs>
inline void multiply_tile(const uint8_t* x, int64_t units, const uint8_t* weights, const uint8_t* scales, int tokens,
                          const GemmTile& to) {
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
#pragma GCC unroll 4
    for (int s = 0; s < kSteps; ++s) {
      int8x16_t w[kRowPairs];
#pragma GCC unroll 4
      for (int r = 0; r < kRowPairs; ++r) w[r] = read<int8x16_t>(weights + (s * kRowPairs + r) * 16);
#pragma GCC unroll 2
      for (int p = 0; p < kPairs; ++p) {
        const auto both = read<int8x16_t>(x + p * kPairUnit + s * 16);
#pragma GCC unroll 4
        for (int r = 0; r < kRowPairs; ++r) unit[p][r] = vmmlaq_s32(unit[p][r], both, w[r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRowPairs; ++r) {
      const Vec scale = twice(scales + r * 8), minimum = twice(scales + kRows * 4 + r * 8);
#pragma GCC unroll 2
      for (int p = 0; p < kPairs; ++p) {
        const uint8_t* params = x + p * kPairUnit + kSteps * 16;
        const Vec total = fma(minimum, read<Vec>(params + 16), sums[p][r]);
        sums[p][r] = fma(convert(unit[p][r]), mul(scale, read<Vec>(params)), total);
      }
    }
    x += kPanelUnit;
    weights += kWeightUnit;
    scales += kWeightUnit;
  }
  write_sums(sums, tokens, to);
}

void multiply(const void* panel, int tokens, int64_t total, int64_t unit, int64_t units, const uint8_t* weights,
              int64_t weight_stride, int64_t blocks, const GemmTile& to) {
  (void)total;
  const uint8_t* x = static_cast<const uint8_t*>(panel) + unit * kPanelUnit;
  for (int64_t tile = 0; tile < 2 * blocks; ++tile) {
    const uint8_t* block = weights + tile / 2 * weight_stride;
    const uint8_t *half = block + tile % 2 * kHalfUnit, *scales = block + 2 * kHalfUnit + tile % 2 * kTileRows * 4;
    const GemmTile rows = rows_from(to, tile * kTileRows);
    int t = 0;
    for (; tokens - t > 2; t += 2 * kPairsAtOnce)
      multiply_tile<kPairsAtOnce>(x + t / 2 * kPairUnit, units, half, scales, tokens - t, tokens_from(rows, t));
    if (t < tokens) multiply_tile<1>(x + t / 2 * kPairUnit, units, half, scales, tokens - t, tokens_from(rows, t));
  }
}

// A pass of 32 units: 24 KiB of activations, and 20 of a block of weights.
constexpr IntegerGemmKernels kKernels{{.operands = GemmKernels::Operands::bytes,
                                       .full_panels = true,
                                       .panel_tokens = kTokens,
                                       .tile_blocks = 1,
                                       .units = 32,
                                       .cache_bytes = size_t{256} << 10,
                                       .activation_bytes = kPairUnit / 2,
                                       .weight_bytes = kWeightUnit,
                                       .unpack_cost = 8,
                                       .pack = pack,
                                       .unpack = unpack,
                                       .multiply = multiply,
                                       .begin = nullptr,
                                       .end = nullptr},
                                      true};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::IntegerGemmKernels, anyaccel::llm::kKernels)
