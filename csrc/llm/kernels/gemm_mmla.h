// SPDX-License-Identifier: Apache-2.0
// What the kernel files of gemm share whose instruction multiplies two tokens with two rows: the sums of a tile are
// vectors [2 tokens][2 rows].
#pragma once

#include "llm/kernels/gemm_neon.h"

namespace anyaccel::llm {
namespace {

constexpr int kRowPairs = kTileRows / 2;

// Two vectors of 32 bits from two pairs of rows' and as many columns' ones: each pair of rows by itself.
inline IVec first_rows(IVec a, IVec b) { return vzip1q_s32(a, b); }
inline IVec last_rows(IVec a, IVec b) { return vzip2q_s32(a, b); }

// The sums of kPairs pairs of tokens, of which `tokens` tokens exist.
template <int kPairs>
inline void write_sums(const Vec (&sums)[kPairs][kRowPairs], int tokens, const GemmTile& to) {
  Vec rows[2 * kPairs][kRowVecs];
#pragma GCC unroll 5
  for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 2
    for (int v = 0; v < kRowVecs; ++v) {
      const float64x2_t a = vreinterpretq_f64_f32(sums[p][2 * v]), b = vreinterpretq_f64_f32(sums[p][2 * v + 1]);
      rows[2 * p][v] = vreinterpretq_f32_f64(vzip1q_f64(a, b));
      rows[2 * p + 1][v] = vreinterpretq_f32_f64(vzip2q_f64(a, b));
    }
  write_rows(rows, tokens, to);
}

}  // namespace
}  // namespace anyaccel::llm
