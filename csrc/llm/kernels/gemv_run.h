// SPDX-License-Identifier: Apache-2.0
// What the kernel files of gemv share: how activations lie, and the way through all blocks and tokens.
#pragma once

#include <type_traits>

#include "llm/kernels/gemv.h"
#include "simd/pick.h"
#include "simd/simd.h"
#include "simd/wide.h"

namespace anyaccel::llm {
namespace {

using namespace simd::ANYACCEL_ISA_VARIANT;

constexpr int kRows = 16;              // of a block
constexpr int kVecs = kRows / kLanes;  // of them
constexpr size_t kLine = 64;           // bytes of a step of a block
constexpr size_t kVecBytes = kLine / kVecs;
// kTile: tokens whose sums fit the registers, kFloatTile: beside weights of one column of floats. kChains: sums a
// token, to hide the latency of an addition. kUnroll: of the loops over tokens and over the lines of a group.
constexpr bool kWide = kLanes >= 8 || ANYACCEL_REGISTERS == 32;  // as much as this is written for
constexpr int kTile = kLanes == 16 ? 8 : kWide ? 4 : kLanes == 4 ? 2 : 1;
constexpr int kFloatTile = kLanes == 8 ? 6 : kTile;
constexpr int kChains = kLanes == 16 ? 2 : 1;
constexpr int kUnroll = kWide ? 8 : 1;

// The rows of a block: 16 lanes of floats, of integers, and of what a step's products are made of.
using Floats = Many<Vec, kVecs>;
using Ints = Many<IVec, kVecs>;
template <class V>
inline auto all(V v) {
  return each<kVecs>([&](int) { return v; });
}
inline Floats load_rows(const float* p) {
  return each<kVecs>([&](int i) { return load(p + i * kLanes); });
}
inline Floats load_rows_f16(const uint8_t* p) {
  return each<kVecs>([&](int i) { return load_f16(p + 2 * i * kLanes); });
}
inline Floats load_rows_i8(const uint8_t* p) {
  return each<kVecs>([&](int i) { return load_i8(p + i * kLanes); });
}
inline Floats load_rows_power(const uint8_t* p) {
  return each<kVecs>([&](int i) { return load_power(p + i * kLanes); });
}
inline void store_rows(float* p, const Floats& v) {
  for (int i = 0; i < kVecs; ++i) store(p + i * kLanes, v.x[i]);
}
// Blocks far from each other that a thread multiplies at once with a single token: a core's own prefetchers serve
// several streams of weights faster than one, and the sums of one block are too few to hide what an addition takes.
// With more tokens one block is enough, or as many do not fit the registers.
constexpr int kStreams = kWide ? 4 : kLanes == 4 ? 2 : 1;
// How far ahead of the product weights are asked for, all streams together: hardware prefetchers stop at the ends of
// 4 KiB pages, and what is asked for has to be on its way for as long as memory takes to answer.
constexpr size_t kAhead = 8192;

template <int S>
inline void ask_for(const uint8_t* p) {
  __builtin_prefetch(p + kAhead / S, 0, 3);
}

// The scales of a block, group after group (grouped.h); S blocks are read at once.
template <int S>
class Scales {
 public:
  // A section begins at w: its scales, and then its values, where w is left.
  void begin(const BlockLayout& layout, const uint8_t*& w) {
    const bool superblocks = layout.scales == ScaleKind::superblocks;
    powers_ = layout.scales == ScaleKind::powers;
    factors_ = superblocks ? w : nullptr;
    at_ = superblocks ? w + kFactorBytes : w;
    const uint8_t* values = w + layout.section_scales;
    for (; w < values; w += kLine) ask_for<S>(w);
  }
  // After a superblock that does not end a section.
  void next_superblock() { factors_ += factors_ != nullptr ? kFactorBytes / 2 : 0; }
  void next(const BlockLayout& layout) { at_ += layout.scale_stride; }

  Floats of_rows() const { return load_rows(reinterpret_cast<const float*>(at_)); }  // without groups
  Floats scale() const { return at(0); }
  Floats minimum() const { return at(kRows); }

 private:
  Floats at(int first) const {
    if (powers_) return load_rows_power(at_);
    if (factors_ == nullptr) return load_rows_f16(at_ + 2 * first);
    return mul(load_rows_i8(at_ + first), load_rows_f16(factors_ + 2 * first));
  }

  const uint8_t* at_ = nullptr;
  const uint8_t* factors_ = nullptr;  // of superblocks
  bool powers_ = false;
};

using Q8 = std::conditional_t<kPairs8, int16_t, int8_t>;

bool is_float(Format format) { return !is_quantised(format); }
// Whether weights are multiplied as bytes with a sign, with activations as Q8.
bool in_quads(Format format) { return format == Format::i8 || row_of(format).codes != nullptr; }
int tiles_of(Format format, int tokens) {
  const int most = is_float(format) ? kFloatTile : kTile;
  return (tokens + most - 1) / most;
}
int tile_begin(int tokens, int tile, int tiles) { return tokens * tile / tiles; }
size_t value_bytes(Format format) {
  return is_float(format) ? sizeof(float) : in_quads(format) ? sizeof(Q8) : sizeof(int8_t);
}
// Bytes of one token's activations.
size_t token_bytes(const BlockLayout& layout) {
  const size_t cols = static_cast<size_t>(layout.padded_cols);
  const size_t sums = layout.group == 16 ? sizeof(int32_t) : 0;
  const size_t params = is_float(layout.format) ? 0 : cols / kActivationGroup * (sizeof(GroupParams) + sums);
  return cols * value_bytes(layout.format) + params;
}

// --- all blocks of a part, and all tokens

// Not inlined, there would be a copy for each token of each kernel: GCC 12 leaves it alone as long as it is not
// declared inline, which is what the time to compile this hangs on.
void write(const Output& out, int64_t row, int64_t rows, int token, const Floats& sums) {
  float* to = out.data + token * out.stride + row;
  if (row + kRows <= rows) {
    Floats value = out.bias != nullptr ? add(sums, load_rows(out.bias + row)) : sums;
    value = mul(value, broadcast(out.scale));
    store_rows(to, out.add ? add(load_rows(to), value) : value);
    return;
  }
  float values[kRows];
  store_rows(values, sums);
  for (int r = 0; r < rows - row; ++r) {
    const float scaled = (values[r] + (out.bias != nullptr ? out.bias[row + r] : 0.0f)) * out.scale;
    to[r] = out.add ? to[r] + scaled : scaled;
  }
}

// Blocks `block`, `block` + `apart`, ..., S of them, and the M tokens of a tile.
template <class Kernel, int M, int S>
void run_tile(const GemvProduct& product, int64_t block, int64_t apart, int first, const uint8_t* x) {
  const uint8_t* w[S];
  for (int s = 0; s < S; ++s)
    w[s] = product.weights + static_cast<size_t>(block + s * apart) * product.layout.block_bytes;
  Floats sums[S][M];
  Kernel::template blocks<M>(product.layout, w, x, sums);
  for (int s = 0; s < S; ++s)
    for (int t = 0; t < M; ++t) write(product.out, (block + s * apart) * kRows, product.rows, first + t, sums[s][t]);
}

using Tile = void (*)(const GemvProduct&, int64_t block, int64_t apart, int first, const uint8_t* x);
template <class Kernel, int M = kTile>
Tile tile_for(int count) {
  if constexpr (M > 1)
    if (count < M) return tile_for<Kernel, M - 1>(count);
  return run_tile<Kernel, M, 1>;
}

// The blocks from `begin` on times one token: S at once, each S-th part of them as one stream, then the rest.
template <class Kernel, int S = kStreams>
void run_streams(const GemvProduct& product, int64_t begin) {
  const int64_t each = (product.end - begin) / S;
  for (int64_t block = begin; block < begin + each; ++block) run_tile<Kernel, 1, S>(product, block, each, 0, product.x);
  if constexpr (S > 1) run_streams<Kernel, S / 2>(product, begin + each * S);
}

template <class Kernel>
void run(const GemvProduct& product) {
  if (product.tokens == 1) return run_streams<Kernel>(product, product.begin);
  const int tiles = tiles_of(product.layout.format, product.tokens);
  const size_t bytes = token_bytes(product.layout);
  for (int64_t block = product.begin; block < product.end; ++block)
    for (int tile = 0; tile < tiles; ++tile) {
      const int first = tile_begin(product.tokens, tile, tiles);
      const int count = tile_begin(product.tokens, tile + 1, tiles) - first;
      tile_for<Kernel>(count)(product, block, 0, first, product.x + static_cast<size_t>(first) * bytes);
    }
}

}  // namespace
}  // namespace anyaccel::llm
