// SPDX-License-Identifier: Apache-2.0
// ISA: amx
// Attention to keys and values in bfloat16 with AMX: sixteen rows of sixteen pairs are a tile as they are, and so are
// sixteen lines of a block of keys or values.

#include "llm/attention/attention_pairs.h"
#include "llm/attention/kernels_attention.h"
#include "simd/pick.h"

namespace anyaccel::llm {
namespace {

constexpr int kHeight = 16;  // rows of a tile
constexpr int kTilePairs = 16;
constexpr int64_t kTileBytes = 1024;

struct Tiles : Pairs {};
template <>
constexpr bool kPaired<Tiles> = true;
template <>
constexpr bool kWholePages<Tiles> = true;
template <>
constexpr int kRowsOf<Tiles> = 2 * kHeight;

// kHigh x kWide tiles of sums, 0 1 / 2 3; rows in 4 and 5, columns in 6 and 7.
template <int kHigh, int kWide>
void multiply_tiles(const Product& p) {
  const int64_t a_stride = p.a_stride * 4, c_stride = p.c_stride * 4;
  float* const below = p.c + kHeight * p.c_stride;
  if (p.factor == nullptr) {
    tile_zero<0>();
    if constexpr (kWide > 1) tile_zero<1>();
    if constexpr (kHigh > 1) tile_zero<2>();
    if constexpr (kHigh > 1 && kWide > 1) tile_zero<3>();
  } else {
    tile_load<0>(p.c, c_stride);
    if constexpr (kWide > 1) tile_load<1>(p.c + 16, c_stride);
    if constexpr (kHigh > 1) tile_load<2>(below, c_stride);
    if constexpr (kHigh > 1 && kWide > 1) tile_load<3>(below + 16, c_stride);
  }
  const uint8_t* columns = p.b;
  for (int pair = 0; pair < p.k / 2; pair += kTilePairs, columns += kTileBytes) {
    tile_load<6>(columns, 64);
    tile_load<4>(p.a + pair, a_stride);
    tile_dot_bf16<0, 4, 6>();
    if constexpr (kWide > 1) {
      tile_load<7>(columns + p.block_bytes, 64);
      tile_dot_bf16<1, 4, 7>();
    }
    if constexpr (kHigh > 1) {
      tile_load<5>(p.a + kHeight * p.a_stride + pair, a_stride);
      tile_dot_bf16<2, 5, 6>();
      if constexpr (kWide > 1) tile_dot_bf16<3, 5, 7>();
    }
  }
  tile_store<0>(p.c, c_stride);
  if constexpr (kWide > 1) tile_store<1>(p.c + 16, c_stride);
  if constexpr (kHigh > 1) tile_store<2>(below, c_stride);
  if constexpr (kHigh > 1 && kWide > 1) tile_store<3>(below + 16, c_stride);
}

// Rows up to the next multiple of sixteen are computed: memory has them.
template <>
void multiply<Tiles>(const Product& product, int rows, int blocks) {
  Product p = product;
  if (p.factor != nullptr)
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < 16 * blocks; i += kLanes) {
        float* const at = p.c + r * p.c_stride + i;
        store(at, mul(load(at), broadcast(p.factor[r])));
      }
  const bool high = rows > kHeight;
  for (; blocks > 0; blocks -= 2) {
    if (blocks > 1)
      high ? multiply_tiles<2, 2>(p) : multiply_tiles<1, 2>(p);
    else
      high ? multiply_tiles<2, 1>(p) : multiply_tiles<1, 1>(p);
    p.b += 2 * p.block_bytes;
    p.c += 2 * 16;
  }
}

void attend_task(const AttendTask& task) {
  // Few rows are bound by memory, and heads of other widths do not fill tiles.
  if (!task.many || task.layout->padded_head_dim % (2 * kTilePairs) != 0) return attend_rows<Pairs>(task);
  tiles_begin();
  attend_rows<Tiles>(task);
  tiles_end();
}

constexpr PairAttentionKernels kKernels{attend_task};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::PairAttentionKernels, anyaccel::llm::kKernels)
