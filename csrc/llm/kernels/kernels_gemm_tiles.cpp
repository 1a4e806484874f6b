// SPDX-License-Identifier: Apache-2.0
// ISA: amx
// Matrix products (gemm) of pairs of bfloat16 with AMX. A panel of activations is two tiles high, [tile][step / 16][16
// tokens] [16 steps]; 16 steps of a block of weights are a tile as they are.
#include "llm/kernels/gemm_avx512.h"
#include "llm/kernels/gemm_kernels.h"

namespace anyaccel::llm {
namespace {

constexpr int kRows = 16;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileSteps = 16;  // of two columns: a unit

void pack(const float* x, int64_t stride, const int32_t* rows, int tokens, int64_t cols, int64_t total, void* panel) {
  const int64_t total_steps = total * kTileSteps;
  auto* out = static_cast<uint8_t*>(panel);
  for (int first = 0; first < tokens; first += kRows, out += total_steps * 64)
    for (int t = 0; t < kRows; ++t) {
      const int token = first + t;
      const float* row = token < tokens ? x + (rows != nullptr ? rows[token] : token) * stride : nullptr;
      for (int64_t s = 0; s < total_steps; s += kTileSteps)
        store(static_cast<void*>(out + s * 64 + t * 64),
              row != nullptr ? pairs_of(row + 2 * s, cols - 2 * s) : _mm512_setzero_si512());
    }
}

// kHigh x 2 tiles of sums: 0 1 / 2 3; activations in 4 and 5, weights in 6 and 7.
template <int kHigh>
void multiply_tiles(const uint8_t* x, int64_t x_tile, int64_t steps, const uint8_t* weights, int64_t weight_stride,
                    int tokens, const GemmTile& to) {
  for (int t = 0; t < tokens; ++t) {
    __builtin_prefetch(to.out + t * to.stride, 1);
    __builtin_prefetch(to.out + t * to.stride + kRows, 1);
  }
  tile_zero<0>();
  tile_zero<1>();
  if constexpr (kHigh > 1) {
    tile_zero<2>();
    tile_zero<3>();
  }
  for (int64_t s = 0; s < steps; s += kTileSteps) {
    fetch_share(to, s / kTileSteps, steps / kTileSteps);
    tile_load<6>(weights, 64);
    tile_load<4>(x, 64);
    tile_dot_bf16<0, 4, 6>();
    tile_load<7>(weights + weight_stride, 64);
    tile_dot_bf16<1, 4, 7>();
    if constexpr (kHigh > 1) {
      tile_load<5>(x + x_tile, 64);
      tile_dot_bf16<2, 5, 6>();
      tile_dot_bf16<3, 5, 7>();
    }
    x += kTileBytes;
    weights += kTileBytes;
  }
  constexpr int kWidth = 2 * kRows;
  alignas(64) float sums[kHigh * kRows * kWidth];
  tile_store<0>(sums, kWidth * 4);
  tile_store<1>(sums + kRows, kWidth * 4);
  if constexpr (kHigh > 1) {
    tile_store<2>(sums + kRows * kWidth, kWidth * 4);
    tile_store<3>(sums + kRows * kWidth + kRows, kWidth * 4);
  }
  write_sums<kWidth>(sums, tokens, to);
}

// The last block of a matrix may have no second one: it is multiplied twice, and written once.
template <int kHigh>
void multiply_panel(const uint8_t* x, int64_t x_tile, int64_t steps, const uint8_t* weights, int64_t weight_stride,
                    int64_t blocks, int tokens, GemmTile to) {
  for (int64_t b = 0; b < blocks; b += 2) {
    multiply_tiles<kHigh>(x, x_tile, steps, weights, blocks - b > 1 ? weight_stride : 0, tokens, to);
    weights += 2 * weight_stride;
    to.out += 2 * kRows;
    to.rows -= 2 * kRows;
    to.next_weights += to.next_stride;
    if (to.bias != nullptr) to.bias += 2 * kRows;
  }
}

void multiply(const void* panel, int tokens, int64_t total, int64_t unit, int64_t units, const uint8_t* weights,
              int64_t weight_stride, int64_t blocks, const GemmTile& to) {
  const uint8_t* x = static_cast<const uint8_t*>(panel) + unit * kTileBytes;
  const int64_t x_tile = total * kTileBytes, steps = units * kTileSteps;
  if (tokens > kRows)
    multiply_panel<2>(x, x_tile, steps, weights, weight_stride, blocks, tokens, to);
  else
    multiply_panel<1>(x, x_tile, steps, weights, weight_stride, blocks, tokens, to);
}

// A pass of 16 units: 32 KiB of activations in an L1 cache of 48, 256 KiB of weights and the results of as many rows
// in an L2 cache of 2 MiB.
constexpr TileGemmKernels kKernels{{.operands = GemmKernels::Operands::pairs,
                                    .full_panels = true,
                                    .panel_tokens = 2 * kRows,
                                    .tile_blocks = 2,
                                    .units = 16,
                                    .cache_bytes = size_t{256} << 10,
                                    .activation_bytes = kTileBytes / kRows,
                                    .weight_bytes = kTileBytes,
                                    .unpack_cost = 64,
                                    .pack = pack,
                                    .unpack = unpack_pairs,
                                    .multiply = multiply,
                                    .begin = tiles_begin,
                                    .end = tiles_end}};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::TileGemmKernels, anyaccel::llm::kKernels)
