// SPDX-License-Identifier: Apache-2.0
// ISA: neon_dot
// Matrix products (gemm) of quantised weights with activations rounded to 8 bits, as in kernels_gemm_integer.cpp, with
// Armv8.2's SDOT of one lane: a register of activations holds four columns of four tokens, and one instruction
// multiplies a token's with four rows.
//
// A panel of activations: for each unit and four tokens [8 steps][4 tokens][4 columns] int8, 4 scales, 4 times scale *
// sum. Tokens that do not exist are zeros.
// Unpacked weights: for each half of the rows and unit [8 steps][8 rows][4 columns] int8, with a sign, then 8 scales,
// then 8 minima.
#include "llm/kernels/gemm_integer.h"
#include "llm/kernels/gemm_neon.h"

namespace anyaccel::llm {
namespace {

constexpr int kTokens = 16;  // of a panel
constexpr int kAtOnce = 4;
constexpr int kSteps = kUnit / 4;
constexpr int64_t kTileUnit = kSteps * 16 + 2 * kAtOnce * 4;
constexpr int64_t kPanelUnit = kTokens / kAtOnce * kTileUnit;
constexpr int64_t kHalfUnit = kSteps * kTileRows * 4 + 2 * kTileRows * 4;

void pack(const float* x, int64_t stride, const int32_t* rows, int tokens, int64_t cols, int64_t total, void* panel) {
  for (int first = 0; first < tokens; first += kAtOnce) {
    const float* row[kAtOnce] = {};
    for (int t = 0; t < kAtOnce && first + t < tokens; ++t)
      row[t] = x + (rows != nullptr ? rows[first + t] : first + t) * stride;
    auto* out = static_cast<uint8_t*>(panel) + first / kAtOnce * kTileUnit;
    for (int64_t u = 0; u < total; ++u, out += kPanelUnit) {
      int8_t q[kAtOnce][kUnit] = {};
      auto* params = reinterpret_cast<float*>(out + kSteps * 16);
      for (int t = 0; t < kAtOnce; ++t) {
        QuantisedUnit unit{0, 0};
        if (row[t] != nullptr) unit = quantise_unit(row[t] + u * kUnit, cols - u * kUnit, q[t]);
        params[t] = unit.scale;
        params[kAtOnce + t] = unit.scaled_sum();
      }
      for (int half = 0; half < 2; ++half) {
        int32x4x4_t columns;
        for (int t = 0; t < kAtOnce; ++t) columns.val[t] = load_ints(q[t] + half * 16);
        vst4q_s32(reinterpret_cast<int32_t*>(out + half * 64), columns);
      }
    }
  }
}

void unpack(const BlockLayout& layout, const uint8_t* block, int64_t unit, int64_t units, uint8_t* to) {
  for (int64_t u = unit; u < unit + units; ++u, to += kHalfUnit) {
    uint8_t lines[kUnit * kRows];
    const uint8_t* from = signed_unit(layout, block, u, lines);
    for (int s = 0; s < kSteps; ++s)
      for (int row = 0; row < kRows; row += kLanes)
        store(static_cast<void*>(to + row / kTileRows * units * kHalfUnit + (s * kTileRows + row % kTileRows) * 4),
              load_ints(from + (s * kRows + row) * 4));
    for (int half = 0; half < 2; ++half) {
      auto* scales = reinterpret_cast<float*>(to + half * units * kHalfUnit + kSteps * kTileRows * 4);
      for (int v = 0; v < kRowVecs; ++v) {
        const RowScales of = row_scales(layout, block, u * kUnit, half * kTileRows + v * kLanes);
        store(scales + v * kLanes, of.scale);
        store(scales + kTileRows + v * kLanes, of.minimum);
      }
    }
  }
}

// fn<0>(), fn<1>(), ...: numbers of lanes have to be constants.
template <class Fn>
[[gnu::always_inline]] inline void each_token(const Fn& fn) {
  fn.template operator()<0>();
  fn.template operator()<1>();
  fn.template operator()<2>();
  fn.template operator()<3>();
}

// Half a block times four tokens.
template <bool kMinimum>
inline void multiply_tile(const uint8_t* x, int64_t units, const uint8_t* weights, int tokens, const GemmTile& to) {
  Vec sums[kAtOnce][kRowVecs];
  each_token([&]<int T>() {
    for (int v = 0; v < kRowVecs; ++v) sums[T][v] = broadcast(0.0f);
  });
  for (int64_t u = 0; u < units; ++u) {
    IVec unit[kAtOnce][kRowVecs];
    each_token([&]<int T>() {
#pragma GCC unroll 2
      for (int v = 0; v < kRowVecs; ++v) unit[T][v] = broadcast(int32_t{0});
    });
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int8x16x4_t q = vld1q_s8_x4(reinterpret_cast<const int8_t*>(x + half * 64));
#pragma GCC unroll 2
      for (int pair = 0; pair < 2; ++pair) {
        const int8x16x4_t w = vld1q_s8_x4(reinterpret_cast<const int8_t*>(weights + half * 128 + pair * 64));
#pragma GCC unroll 2
        for (int s = 0; s < 2; ++s)
          each_token([&]<int T>() {
#pragma GCC unroll 2
            for (int v = 0; v < kRowVecs; ++v)
              unit[T][v] = vdotq_laneq_s32(unit[T][v], w.val[s * kRowVecs + v], q.val[pair * 2 + s], T);
          });
      }
    }
    const float *params = reinterpret_cast<const float*>(x + kSteps * 16),
                *scales = reinterpret_cast<const float*>(weights + kSteps * kTileRows * 4);
    const Vec scale_x = load(params);
    Vec scale[kRowVecs];
    for (int v = 0; v < kRowVecs; ++v) scale[v] = load(scales + v * kLanes);
    each_token([&]<int T>() {
#pragma GCC unroll 2
      for (int v = 0; v < kRowVecs; ++v) {
        if constexpr (kMinimum)
          sums[T][v] = vfmaq_laneq_f32(sums[T][v], load(scales + kTileRows + v * kLanes), load(params + kAtOnce), T);
        sums[T][v] = vfmaq_laneq_f32(sums[T][v], mul(convert(unit[T][v]), scale[v]), scale_x, T);
      }
    });
    x += kPanelUnit;
    weights += kHalfUnit;
  }
  write_rows<kAtOnce>(sums, tokens, to);
}

template <bool kMinimum>
void multiply(const void* panel, int tokens, int64_t total, int64_t unit, int64_t units, const uint8_t* weights,
              int64_t weight_stride, int64_t blocks, const GemmTile& to) {
  (void)total;
  const uint8_t* x = static_cast<const uint8_t*>(panel) + unit * kPanelUnit;
  for (int64_t tile = 0; tile < 2 * blocks; ++tile) {
    const uint8_t* half = weights + tile / 2 * weight_stride + tile % 2 * units * kHalfUnit;
    const GemmTile rows = rows_from(to, tile * kTileRows);
    for (int t = 0; t < tokens; t += kAtOnce)
      multiply_tile<kMinimum>(x + t / kAtOnce * kTileUnit, units, half, tokens - t, tokens_from(rows, t));
  }
}

// A pass of 48 units: 30 KiB of activations and 15 of half a block of weights.
constexpr GemmKernels kGemm{.operands = GemmKernels::Operands::bytes,
                            .full_panels = true,
                            .panel_tokens = kTokens,
                            .tile_blocks = 1,
                            .units = 48,
                            .cache_bytes = size_t{256} << 10,
                            .activation_bytes = kTileUnit / kAtOnce,
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
