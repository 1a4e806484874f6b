// SPDX-License-Identifier: Apache-2.0
// ISA: neon_bf16_i8mm
// Matrix products (gemm) of bfloat16 with Armv8.6's BFMMLA, which multiplies two tokens with two rows over four
// columns. Weights are read where they are. A panel of activations: for each four columns [pair of tokens][2 tokens][4
// columns].
#include "llm/kernels/gemm_mmla.h"
#include "simd/pick.h"

namespace anyaccel::llm {
namespace {

constexpr int kTokens = 10;         // of a panel: 20 sums, 4 weights and 5 activations in registers
constexpr int64_t kLineBytes = 64;  // of two columns of a block
constexpr int64_t kStepBytes = 16;  // of a pair of tokens
constexpr int64_t kUnitSteps = kUnit / 4;
constexpr int64_t kTileBytes = kLineBytes / 2;  // of a line

// The four columns from `k` on, of which those below `cols` exist.
inline Vec columns_at(const float* row, int64_t k, int64_t cols) {
  return cols - k >= 4 ? load(row + k) : cols > k ? load_n(row + k, cols - k, broadcast(0.0f)) : broadcast(0.0f);
}

void pack(const float* x, int64_t stride, const int32_t* rows, int tokens, int64_t cols, int64_t total, void* panel) {
  const int pairs = (tokens + 1) / 2;
  for (int p = 0; p < pairs; ++p) {
    const auto row = [&](int t) { return x + (rows != nullptr ? rows[t] : t) * stride; };
    const float *first = row(2 * p), *second = 2 * p + 1 < tokens ? row(2 * p + 1) : nullptr;
    auto* out = static_cast<uint8_t*>(panel) + p * kStepBytes;
    for (int64_t k = 0; k < total * kUnit; k += 4, out += pairs * kStepBytes) {
      const Vec other = second != nullptr ? columns_at(second, k, cols) : broadcast(0.0f);
      const bfloat16x8_t both = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(columns_at(first, k, cols)), other);
      std::memcpy(out, &both, sizeof both);
    }
  }
}

template <int kPairs>
void multiply_tile(const uint8_t* x, int64_t steps, const uint8_t* weights, int tokens, const GemmTile& to) {
  Vec sums[kPairs][kRowPairs];
#pragma GCC unroll 5
  for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 4
    for (int r = 0; r < kRowPairs; ++r) sums[p][r] = broadcast(0.0f);
  for (int64_t s = 0; s < steps; ++s) {
    __builtin_prefetch(weights + 16 * kLineBytes);
    bfloat16x8_t w[kRowPairs];
#pragma GCC unroll 2
    for (int r = 0; r < kRowPairs; r += 2) {
      const IVec a = load_ints(weights + r * 8), b = load_ints(weights + kLineBytes + r * 8);
      w[r] = vreinterpretq_bf16_s32(first_rows(a, b));
      w[r + 1] = vreinterpretq_bf16_s32(last_rows(a, b));
    }
#pragma GCC unroll 5
    for (int p = 0; p < kPairs; ++p) {
      const auto both = read<bfloat16x8_t>(x + p * kStepBytes);
#pragma GCC unroll 4
      for (int r = 0; r < kRowPairs; ++r) sums[p][r] = vbfmmlaq_f32(sums[p][r], both, w[r]);
    }
    x += kPairs * kStepBytes;
    weights += 2 * kLineBytes;
  }
  write_sums(sums, tokens, to);
}

template <int kPairs = kTokens / 2>
void multiply_panel(const uint8_t* panel, int tokens, int64_t unit, int64_t units, const uint8_t* weights,
                    int64_t weight_stride, int64_t blocks, const GemmTile& to) {
  if constexpr (kPairs > 1)
    if (tokens <= 2 * (kPairs - 1))
      return multiply_panel<kPairs - 1>(panel, tokens, unit, units, weights, weight_stride, blocks, to);
  const uint8_t* x = panel + unit * kUnitSteps * kPairs * kStepBytes;
  for (int64_t tile = 0; tile < 2 * blocks; ++tile)
    multiply_tile<kPairs>(x, units * kUnitSteps, weights + tile / 2 * weight_stride + tile % 2 * kTileBytes, tokens,
                          rows_from(to, tile * kTileRows));
}

void multiply(const void* panel, int tokens, int64_t total, int64_t unit, int64_t units, const uint8_t* weights,
              int64_t weight_stride, int64_t blocks, const GemmTile& to) {
  (void)total;
  multiply_panel(static_cast<const uint8_t*>(panel), tokens, unit, units, weights, weight_stride, blocks, to);
}

// A pass of 32 units: 20 KiB of activations.
constexpr PairGemmKernels kKernels{{.operands = GemmKernels::Operands::pairs,
                                    .full_panels = false,
                                    .panel_tokens = kTokens,
                                    .tile_blocks = 1,
                                    .units = 32,
                                    .cache_bytes = size_t{256} << 10,
                                    .activation_bytes = kUnit * 2,
                                    .weight_bytes = kUnit * 32,
                                    .unpack_cost = 8,
                                    .pack = pack,
                                    .unpack = nullptr,
                                    .multiply = multiply,
                                    .begin = nullptr,
                                    .end = nullptr}};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::PairGemmKernels, anyaccel::llm::kKernels)
