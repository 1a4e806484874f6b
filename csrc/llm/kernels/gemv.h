// SPDX-License-Identifier: Apache-2.0
// Products with few tokens: the weights are read once, as a few streams a thread. One table of kernels for each
// instruction set.
//
// Activations ("x" below) lie in tiles of a few tokens, one tile after another, the tokens divided evenly among them:
//   f32, f16, bf16   [cols/16][token][16] float
//   others           [cols/32][token][32] int8 or (i8, codes) int16, then [cols/32][token] GroupParams, then with
//   weights in groups
//                    of 16 [cols/32][token] int32: the sum of q over the first 16 of the 32 columns
// Integer products are of activations rounded to 8 bits with a scale for each 32 columns: few columns, since
// activations of transformers have outliers in single columns (Dettmers et al., "LLM.int8()", 2022).
// The sums of one token are made in the same order whatever the number of tokens.
#pragma once

#include <cstddef>
#include <cstdint>

#include "llm/kernels/multiply.h"
#include "llm/pack/grouped.h"
#include "llm/pack/matrix.h"
#include "simd/isa.h"

namespace anyaccel::llm {

constexpr int kActivationGroup = 32;

struct GroupParams {
  float scale;       // x = scale * q; NaN when a value of the group is not finite
  float scaled_sum;  // scale * the sum of q
  int32_t sum_8;     // -8 * the sum of q
  int32_t sum_128;   // -128 * the sum of q
};

struct GemvProduct {
  BlockLayout layout;
  const uint8_t* weights;  // block 0
  int64_t rows;
  const uint8_t* x;
  int tokens;
  Output out;
  int64_t begin, end;  // blocks
};

struct GemvInput {
  BlockLayout layout;
  const float* x;
  int64_t stride;
  const int32_t* rows;  // may be null
  int tokens;
  uint8_t* data;
  int64_t begin, end;  // groups of kActivationGroup columns
};

struct GemvKernels {
  static constexpr bool compiled_for(const IsaRow& row) {
    return row.variants != Variants::some_kernels || row.isa == Isa::avx_vnni || row.isa == Isa::avx512_vnni ||
           row.isa == Isa::neon_dot;
  }

  void (*prepare)(const GemvInput& input);
  void (*multiply)(const GemvProduct& product);
  // Columns k0 .. k1 (multiples of 32, or the end) of a block as floats, panel[k1 - k0][16 rows]; and as pairs of
  // bfloat16 (rounded to nearest even), panel[(k1 - k0) / 2][16 rows][2]. 64-byte aligned panels. Padding is zero.
  void (*unpack)(const BlockLayout& layout, const uint8_t* block, int64_t k0, int64_t k1, float* panel);
  void (*unpack_bf16)(const BlockLayout& layout, const uint8_t* block, int64_t k0, int64_t k1, uint16_t* panel);
};
// Products of the formats that kernels_gemv_bits.cpp has.
struct GemvBitsKernels {
  static constexpr bool compiled_for(const IsaRow& row) { return GemvKernels::compiled_for(row); }
  decltype(GemvKernels::multiply) multiply;
};
// The part of them that kernels_gemv_float.cpp has.
struct GemvFloatKernels {
  decltype(GemvKernels::multiply) multiply;
  decltype(GemvKernels::unpack) unpack;
  decltype(GemvKernels::unpack_bf16) unpack_bf16;
};
// The functions of one format: activations are in a form of their own.
struct GemvFunctions {
  decltype(GemvKernels::prepare) prepare;
  decltype(GemvKernels::multiply) multiply;
};
// Those of bfloat16, where there is an instruction for pairs of it.
struct PairGemvKernels : GemvFunctions {
  static constexpr bool compiled_for(const IsaRow& row) { return row.isa == Isa::avx512_bf16; }
};
GemvFunctions gemv_for(Isa isa, Format format);
// Bytes of activations of up to kGemvTokens tokens.
size_t gemv_bytes(const Shape& shape, int tokens);

}  // namespace anyaccel::llm
