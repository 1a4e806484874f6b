// SPDX-License-Identifier: Apache-2.0
// What gemm.cpp calls in the files that are compiled once per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "llm/kernels/multiply.h"
#include "llm/pack/grouped.h"
#include "simd/isa.h"

namespace anyaccel::llm {

// Where a kernel writes: `out` is token 0, row 0 of the tile.
struct GemmTile {
  float* out;
  int64_t stride;     // floats from token to token
  const float* bias;  // of the tile's rows; null: none
  float scale;
  bool add;                   // to what is in `out`
  int64_t rows;               // that may be written
  const uint8_t* next_panel;  // of activations: a kernel may fetch it into a cache
  // This panel's share of the weights that are multiplied next: so many bytes for each tile of blocks, `next_stride`
  // apart. A kernel may fetch them, some with each step of a tile: memory has no time to answer a panel that needs
  // them.
  const uint8_t* next_weights;
  int64_t next_stride, next_bytes;
};

// Fetches what belongs to step `step` of so many.
inline void fetch_share(const GemmTile& to, int64_t step, int64_t steps) {
  const int64_t bytes = (to.next_bytes + steps - 1) / steps;
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(to.next_weights + step * bytes + at, 0, 2);
}

// Columns are counted in units of kUnit, which have one scale in all quantised formats but i8 in groups of 16.
constexpr int64_t kUnit = 32;

// Activations lie in panels, which are one register tile high, in a form of the kernels' own.
struct GemmKernels {
  enum class Operands : uint8_t { floats, pairs, bytes };  // what is multiplied: float, bfloat16, int8
  Operands operands;
  bool full_panels;          // all panels but the last have panel_tokens; else all have nearly the same number
  int panel_tokens;          // at most
  int tile_blocks;           // blocks of 16 rows of a register tile
  int64_t units;             // of a pass over the weights, so that a panel of activations stays in the L1 cache
  size_t cache_bytes;        // of unpacked weights, which stay in the L2 cache
  int64_t activation_bytes;  // of a token and unit
  int64_t weight_bytes;      // of a block and unit, unpacked
  int unpack_cost;           // of a weight, in multiplications

  // Packs the tokens rows[0], rows[1], ... (or 0, 1, ... when null) of x into a panel of `total` units. Columns from
  // `cols` on are zeros.
  void (*pack)(const float* x, int64_t stride, const int32_t* rows, int tokens, int64_t cols, int64_t total,
               void* panel);
  // `units` units of a block of weights from `unit` on; null: these kernels read weights of this format where they are.
  void (*unpack)(const BlockLayout& layout, const uint8_t* block, int64_t unit, int64_t units, uint8_t* to);
  // One panel times `blocks` blocks, which are `weight_stride` bytes apart, over `units` units from `unit` on.
  void (*multiply)(const void* panel, int tokens, int64_t total, int64_t unit, int64_t units, const uint8_t* weights,
                   int64_t weight_stride, int64_t blocks, const GemmTile& to);
  // Before the first and after the last multiply() of a thread; may be null.
  void (*begin)();
  void (*end)();
  // As multiply(), of a bfloat16 matrix's own blocks; null: they are unpacked, or are what multiply() reads.
  decltype(multiply) multiply_bf16 = nullptr;
  // As multiply(), of weights without minima; null: it is multiply() too.
  decltype(multiply) multiply_symmetric = nullptr;
  // Fewer tokens are multiplied faster by gemv, kGemvTokens after kGemvTokens; null: all that are more than
  // kGemvTokens.
  int (*from_tokens)(const Shape& shape) = nullptr;
};

// The table as it is is that of products in float. Those of fewer instruction sets multiply something else.
struct IntegerGemmKernels {
  const GemmKernels* (*find)(const Shape& shape);  // of a quantised format; null: there are none

  static constexpr bool compiled_for(const IsaRow& row) {
    return row.isa == Isa::avx2 || row.isa == Isa::avx512 || row.isa == Isa::avx_vnni || row.isa == Isa::avx512_vnni ||
           row.isa == Isa::neon || row.isa == Isa::neon_dot || row.isa == Isa::neon_bf16_i8mm;
  }
};
struct PairGemmKernels : GemmKernels {
  static constexpr bool compiled_for(const IsaRow& row) {
    return row.isa == Isa::avx512_bf16 || row.isa == Isa::neon_bf16_i8mm;
  }
};
struct TileGemmKernels : GemmKernels {
  static constexpr bool compiled_for(const IsaRow& row) { return row.isa == Isa::amx; }
};

}  // namespace anyaccel::llm
