// SPDX-License-Identifier: Apache-2.0
// What the kernel files of gemm share that multiply half a block at once, with 4 lanes.
#pragma once

#include <cstdint>

#include "llm/kernels/expand.h"
#include "llm/kernels/gemm_kernels.h"
#include "simd/simd.h"

namespace anyaccel::llm {
namespace {

using namespace simd::ANYACCEL_ISA_VARIANT;

constexpr int kTileRows = 8;  // half a block
constexpr int kRowVecs = kTileRows / kLanes;

// A unit of a quantised block as 8 lines [16 rows][4 columns] of int8, at `lines` or where it is: values of formats
// without minima have what stands for zero subtracted.
inline const uint8_t* signed_unit(const BlockLayout& layout, const uint8_t* block, int64_t unit, uint8_t* lines) {
  const FormatRow& format = row_of(layout.format);
  const uint8_t* from = block + layout.unit_at(unit * kUnit);
  if (layout.format == Format::i8) return from;
  const int plus = layout.minimum ? 0 : -(1 << (format.bits - 1));
  if (format.codes != nullptr) {
    const Table table = load_table(format.codes);
    expand_unit(format, from, lines, [&](Nibbles index) { return look_up(table, index); });
  } else {
    const int8x16_t added = vdupq_n_s8(static_cast<int8_t>(plus));
    const auto with = [&](IVec v) { return vreinterpretq_s32_s8(vaddq_s8(vreinterpretq_s8_s32(v), added)); };
    expand_unit(format, from, lines, [&](Nibbles values) { return Nibbles{with(values.low), with(values.high)}; });
  }
  return lines;
}

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

// The sums of kTokens tokens, of which `tokens` exist.
template <int kTokens>
inline void write_rows(const Vec (&sums)[kTokens][kRowVecs], int tokens, const GemmTile& to) {
  if (to.rows < kTileRows || to.bias != nullptr || to.scale != 1.0f) {
#pragma GCC unroll 10
    for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 2
      for (int v = 0; v < kRowVecs; ++v)
        if (t < tokens) write_vec(sums[t][v], v * kLanes, t, to);
    return;
  }
  float* out = to.out;
#pragma GCC unroll 10
  for (int t = 0; t < kTokens; ++t, out += to.stride) {
    if (t >= tokens) return;
#pragma GCC unroll 2
    for (int v = 0; v < kRowVecs; ++v)
      store(out + v * kLanes, to.add ? add(sums[t][v], load(out + v * kLanes)) : sums[t][v]);
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
