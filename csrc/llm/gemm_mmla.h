// SPDX-License-Identifier: Apache-2.0
// What the kernel files of gemm share whose instruction multiplies two tokens with two rows: the sums of a tile are
// vectors [2 tokens][2 rows].
#pragma once

#include <cstdint>

#include "llm/gemm_kernels.h"
#include "simd/simd.h"

namespace anyaccel::llm {
namespace {

using namespace simd::ANYACCEL_ISA_VARIANT;

constexpr int kTileRows = 8;  // half a block
constexpr int kRowPairs = kTileRows / 2;

// Two vectors of 32 bits from two pairs of rows' and as many columns' ones: each pair of rows by itself.
inline IVec first_rows(IVec a, IVec b) { return vzip1q_s32(a, b); }
inline IVec last_rows(IVec a, IVec b) { return vzip2q_s32(a, b); }

// out = scale * (sums + bias), or added to it. Not inlined: there would be dozens of copies.
[[gnu::noinline]] void write_vec(Vec sums, int row, int token, const GemmTile& to) {
  const int64_t valid = to.rows - row < kLanes ? to.rows - row : kLanes;
  if (valid <= 0) return;
  const Vec none = broadcast(0.0f);
  float* out = to.out + token * to.stride + row;
  if (to.bias != nullptr) sums = add(sums, load_n(to.bias + row, valid, none));
  sums = mul(sums, broadcast(to.scale));
  if (to.add) sums = add(sums, load_n(out, valid, none));
  store_n(out, valid, sums);
}

// The sums of kPairs pairs of tokens, of which `tokens` tokens exist.
template <int kPairs>
inline void write_sums(const Vec (&sums)[kPairs][kRowPairs], int tokens, const GemmTile& to) {
#pragma GCC unroll 5
  for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 2
    for (int r = 0; r < kRowPairs; r += 2) {
      const float64x2_t a = vreinterpretq_f64_f32(sums[p][r]), b = vreinterpretq_f64_f32(sums[p][r + 1]);
      write_vec(vreinterpretq_f32_f64(vzip1q_f64(a, b)), 2 * r, 2 * p, to);
      if (2 * p + 1 < tokens) write_vec(vreinterpretq_f32_f64(vzip2q_f64(a, b)), 2 * r, 2 * p + 1, to);
    }
}

// The place of the next tokens, and of the next rows.
inline GemmTile tokens_from(GemmTile to, int tokens) {
  to.out += tokens * to.stride;
  return to;
}
inline GemmTile rows_from(GemmTile to, int64_t rows) {
  to.out += rows;
  to.rows -= rows;
  if (to.bias != nullptr) to.bias += rows;
  return to;
}

}  // namespace
}  // namespace anyaccel::llm
