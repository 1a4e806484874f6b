// SPDX-License-Identifier: Apache-2.0
// Attention over keys and values of four bits, for kernels_attention.cpp: products of whole numbers. Queries are
// rounded to 8 bits with a scale for each group of values, weights with one for each 32 tokens of a page, both times
// less than what four bits have lost already.
#pragma once

#include "llm/attention/kernels_attention.h"
#include "llm/attention/rotate_groups.h"
#include "simd/simd.h"

namespace anyaccel::llm {
namespace {

using namespace simd::ANYACCEL_ISA_VARIANT;

constexpr int kNibbleRows = 4;  // of a tile: their sums fit the registers
constexpr int kNibbleLine = 64;
constexpr int kGroupLines = 4;  // of 8 values, or tokens, each
constexpr int kPageHalves = kPageTokens / 32;

// x[32] = scale * q; NaN when a value is not finite.
inline float round_group(const float* x, int8_t* q) {
  const uint32_t bits = magnitude_bits(x);
  const float largest = simd::float_of(bits);
  if (bits >= 0x7f800000u || largest < 1e-30f) {
    std::memset(q, 0, 32);
    return bits >= 0x7f800000u ? __builtin_nanf("") : 0.0f;
  }
  quantise32(x, 127.0f / largest, q);
  return largest / 127.0f;
}

// The queries of a task's rows.
struct RoundedQueries {
  float* sums;  // [groups][kTaskRows]: of what is rounded, for the minima
  float* scales;
  int8_t* q;  // [kTaskRows][groups * 32]
  int groups;

  RoundedQueries(const HeadLayout& layout, float* scratch)
      : sums(scratch),
        scales(scratch + layout.key_groups() * kTaskRows),
        q(reinterpret_cast<int8_t*>(scratch + 2 * layout.key_groups() * kTaskRows)),
        groups(layout.key_groups()) {}

  // Row `row` of x[k], which it rotates.
  void set(int row, float* x, int n, int k) {
    rotate_groups(x, n);
    for (int g = 0; g < groups; ++g) {
      float group[kCacheGroup] = {}, total = 0;
      for (int i = g * kCacheGroup; i < k && i < (g + 1) * kCacheGroup; ++i) {
        group[i - g * kCacheGroup] = x[i];
        total += x[i];
      }
      sums[g * kTaskRows + row] = total;
      scales[g * kTaskRows + row] = round_group(group, q + (row * groups + g) * kCacheGroup);
    }
  }
};

template <int R>
inline void set_zero(NibbleSum (&sums)[R]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sums[r] = NibbleSum::zero();
}
// Adds the products of `lines` lines with R rows of x.
template <int R>
[[gnu::always_inline]] inline void add_lines(const uint8_t* from, int lines, const int8_t* x, int64_t stride,
                                             NibbleSum (&sums)[R]) {
#pragma GCC unroll 4
  for (int line = 0; line < lines; ++line) {
    const Nibbles w = load_nibbles(from + line * kNibbleLine);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[r] = sums[r].plus(w, x + r * stride + 8 * line);
  }
}

// Scores [R][kPageTokens] of a block of 16 tokens. `halves`: the scales of the first of them. `prefetch`: as much as
// the block has, fetched meanwhile; null: nothing.
template <int R>
void score_tile(const HeadLayout& layout, const uint8_t* keys, const uint8_t* halves, const RoundedQueries& queries,
                int row, float* scores, const uint8_t* prefetch) {
  const int64_t stride = queries.groups * kCacheGroup;
  for (int v = 0; v < 16; v += kLanes) {
    Vec sums[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[r] = broadcast(0.0f);
    int lines = layout.padded_head_dim / 8;
    for (int g = 0; g < queries.groups; ++g, lines -= kGroupLines) {
      const uint8_t* const from = keys + g * kGroupLines * kNibbleLine + 4 * v;
      if (prefetch != nullptr && v == 0)
        for (int line = 0; line < kGroupLines; ++line)
          __builtin_prefetch(prefetch + (g * kGroupLines + line) * kNibbleLine);
      const int8_t* const x = queries.q + row * stride + g * kCacheGroup;
      NibbleSum whole[R];
      set_zero(whole);
      if (lines >= kGroupLines)
        add_lines(from, kGroupLines, x, stride, whole);
      else
        add_lines(from, lines, x, stride, whole);
      const uint8_t* const at = halves + static_cast<size_t>(g) * kGroupScaleBytes + 2 * v;
      const Vec scale = load_f16(at), minimum = load_f16(at + 2 * kPageTokens);
      const float* const row_scales = queries.scales + g * kTaskRows + row;
      const float* const row_sums = queries.sums + g * kTaskRows + row;
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        sums[r] = fma(minimum, broadcast(row_sums[r]), sums[r]);
        sums[r] = fma(mul(scale, broadcast(row_scales[r])), convert(whole[r].total()), sums[r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store(scores + r * kPageTokens + v, sums[r]);
  }
}

// The weights of a tile's rows times the scales of one group of values.
struct RoundedWeights {
  int8_t q[kNibbleRows][kPageTokens];
  float scales[kNibbleRows][kPageHalves];
  float sums[kNibbleRows];  // with the minima

  void set(int row, const float* weights, int tokens, const uint8_t* halves) {
    float scaled[kPageTokens];
    Vec total = broadcast(0.0f);
    int j = 0;
    for (; j < tokens; j += kLanes) {
      const Vec weight = load(weights + j);
      const Mask none = equal(weight, broadcast(0.0f));  // of a token that is not seen, or not there: any scale
      store(scaled + j, select(none, weight, mul(weight, load_f16(halves + 2 * j))));
      total = add(total, select(none, weight, mul(weight, load_f16(halves + 2 * (kPageTokens + j)))));
    }
    for (; j < kPageTokens; ++j) scaled[j] = 0;
    sums[row] = sum(total);
    for (int half = 0; half < kPageHalves; ++half)
      scales[row][half] = round_group(scaled + 32 * half, q[row] + 32 * half);
  }
};

// sums[R][16 values] = factor * sums + weights times a block of values.
template <int R>
void value_tile(const uint8_t* values, const RoundedWeights& weights, int tokens, const float* factors, float* sums,
                int64_t stride, const uint8_t* prefetch) {
  const int halves = tokens > 32 ? 2 : 1;
  for (int v = 0; v < 16; v += kLanes) {
    Vec result[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      result[r] = fma(load(sums + r * stride + v), broadcast(factors[r]), broadcast(weights.sums[r]));
    for (int half = 0; half < halves; ++half) {
      if (prefetch != nullptr && v == 0)
        for (int line = 0; line < kGroupLines; ++line)
          __builtin_prefetch(prefetch + (half * kGroupLines + line) * kNibbleLine);
      NibbleSum whole[R];
      set_zero(whole);
      add_lines(values + half * kGroupLines * kNibbleLine + 4 * v, kGroupLines, weights.q[0] + 32 * half, kPageTokens,
                whole);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
        result[r] = fma(convert(whole[r].total()), broadcast(weights.scales[r][half]), result[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store(sums + r * stride + v, result[r]);
  }
}

// Calls fn(first row, rows as a constant) for rows in tiles.
template <class Fn>
inline void in_tiles(int rows, const Fn& fn) {
  int first = 0;
  for (; rows - first >= kNibbleRows; first += kNibbleRows) fn(first, std::integral_constant<int, kNibbleRows>{});
  if (rows - first == 3) fn(first, std::integral_constant<int, 3>{});
  if (rows - first == 2) fn(first, std::integral_constant<int, 2>{});
  if (rows - first == 1) fn(first, std::integral_constant<int, 1>{});
}

// Rows of a task over one page. `prefetch`: what is read after the keys, or after the values; null: not fetched.
inline void score_nibbles(const HeadLayout& layout, const uint8_t* keys, const RoundedQueries& queries, int row,
                          int rows, int tokens, float* scores, const uint8_t* prefetch) {
  in_tiles(rows, [&](int first, auto count) {
    for (int block = 0; 16 * block < tokens; ++block) {
      const size_t bytes = static_cast<size_t>(block) * layout.key_block_bytes;
      score_tile<decltype(count)::value>(layout, keys + bytes, keys + layout.scales + 32 * block, queries, row + first,
                                         scores + first * kPageTokens + 16 * block,
                                         prefetch == nullptr || first > 0 ? nullptr : prefetch + bytes);
    }
  });
}
inline void add_nibbles(const HeadLayout& layout, const uint8_t* keys, const float* scores, int rows, int tokens,
                        const float* factors, float* sums, const uint8_t* prefetch) {
  const int width = layout.padded_value_dim;
  const uint8_t* const all_halves = keys + layout.scales + static_cast<size_t>(layout.key_groups()) * kGroupScaleBytes;
  in_tiles(rows, [&](int first, auto count) {
    constexpr int kRows = decltype(count)::value;
    RoundedWeights weights;
    for (int column = 0; column < width; column += 16) {
      if (column % kCacheGroup == 0)
        for (int r = 0; r < kRows; ++r)
          weights.set(r, scores + (first + r) * kPageTokens, tokens,
                      all_halves + static_cast<size_t>(column / kCacheGroup) * kGroupScaleBytes);
      const size_t bytes = static_cast<size_t>(column / 16) * layout.value_block_bytes;
      value_tile<kRows>(keys + layout.values + bytes, weights, tokens, factors + first, sums + first * width + column,
                        width, prefetch == nullptr || first > 0 ? nullptr : prefetch + bytes);
    }
  });
}

}  // namespace
}  // namespace anyaccel::llm
