// SPDX-License-Identifier: Apache-2.0
// Products with few tokens (gemv) of float weights, and weights as floats.
#include <cstring>

#include "llm/kernels/gemv_integer.h"
#include "llm/kernels/gemv_run.h"
#include "llm/kernels/scales.h"
#include "llm/pack/bit_planes.h"
#if ANYACCEL_LANES == 8
#include "llm/kernels/bf16_columns.h"
#endif

namespace anyaccel::llm {
namespace {

// --- weights of two columns as floats

struct FloatPair {
  Floats even, odd;
};
struct F32 {
  static constexpr size_t bytes = 2 * kLine;
  static FloatPair load_pair(const uint8_t* p) {
    const auto* values = reinterpret_cast<const float*>(p);
    return {load_rows(values), load_rows(values + kRows)};
  }
};
struct F16 {
  static constexpr size_t bytes = kLine;
  static FloatPair load_pair(const uint8_t* p) { return {load_rows_f16(p), load_rows_f16(p + kLine / 2)}; }
};
struct BF16 {
  static constexpr size_t bytes = kLine;
  static FloatPair load_pair(const uint8_t* p) {
    return {each<kVecs>([&](int v) { return even_bf16(p + v * kVecBytes); }),
            each<kVecs>([&](int v) { return odd_bf16(p + v * kVecBytes); })};
  }
};

// --- one block of rows times M tokens

template <class Weights, int M, int S>
inline void float_blocks(const BlockLayout& layout, const uint8_t* (&w)[S], const uint8_t* x_bytes,
                         Floats (&out)[S][M]) {
  const auto* x = reinterpret_cast<const float*>(x_bytes);
  Floats sums[S][M][kChains];
  for (int s = 0; s < S; ++s)
    for (int t = 0; t < M; ++t)
      for (int c = 0; c < kChains; ++c) sums[s][t][c] = all(broadcast(0.0f));
  for (int64_t k = 0; k < layout.padded_cols; k += kRows) {
#pragma GCC unroll kUnroll
    for (int j = 0; j < kRows; j += 2) {
#pragma GCC unroll kStreams
      for (int s = 0; s < S; ++s) {
        for (size_t line = 0; line < Weights::bytes; line += kLine) ask_for<S>(w[s] + line);
        const FloatPair pair = Weights::load_pair(w[s]);
        w[s] += Weights::bytes;
#pragma GCC unroll kUnroll
        for (int t = 0; t < M; ++t) {
          sums[s][t][0] = fma(pair.even, broadcast(x[t * kRows + j]), sums[s][t][0]);
          sums[s][t][kChains - 1] = fma(pair.odd, broadcast(x[t * kRows + j + 1]), sums[s][t][kChains - 1]);
        }
      }
    }
    x += M * kRows;
  }
  for (int s = 0; s < S; ++s)
    for (int t = 0; t < M; ++t) out[s][t] = kChains == 1 ? sums[s][t][0] : add(sums[s][t][0], sums[s][t][kChains - 1]);
}

// --- one block of rows times several tiles of tokens

#if ANYACCEL_LANES == 8
// Columns of a block that all tiles of tokens are multiplied with in turn, while they and the activations are in the L1
// cache.
constexpr int64_t kPart = 128;

// One of the two columns that are together.
template <class Weights, int kColumn>
inline Floats load_column(const uint8_t* p) {
  if constexpr (std::is_same_v<Weights, BF16>)
    return each<kVecs>([&](int v) { return column_of_pairs<kColumn>(p + v * kVecBytes); });
  else if constexpr (std::is_same_v<Weights, F16>)
    return load_rows_f16(p + kColumn * kLine / 2);
  else
    return load_rows(reinterpret_cast<const float*>(p) + kColumn * kRows);
}

template <class Weights, int kColumn, int M>
[[gnu::always_inline]] inline void add_column(const uint8_t* w, const float* x, Floats (&sums)[M]) {
  const Floats column = load_column<Weights, kColumn>(w);
#pragma GCC unroll 8
  for (int t = 0; t < M; ++t) sums[t] = fma(column, broadcast(x[t * kRows + kColumn]), sums[t]);
}

// Adds some columns to the sums of M tokens, which are in memory between two parts of the columns, and asks for weights
// of the next part: `ask` bytes for two columns.
template <class Weights, int M>
void add_part(const uint8_t* w, const float* x, int64_t cols, const uint8_t* next, size_t ask, float* kept) {
  Floats sums[M];
#pragma GCC unroll 8
  for (int t = 0; t < M; ++t) sums[t] = load_rows(kept + t * kRows);
  for (int64_t k = 0; k < cols; k += kRows) {
#pragma GCC unroll 8
    for (int j = 0; j < kRows; j += 2) {
      for (size_t line = 0; line < Weights::bytes; line += kLine) __builtin_prefetch(next + line, 0, 3);
      next += ask;
      add_column<Weights, 0>(w, x + j, sums);
      add_column<Weights, 1>(w, x + j, sums);
      w += Weights::bytes;
    }
    x += M * kRows;
  }
#pragma GCC unroll 8
  for (int t = 0; t < M; ++t) store_rows(kept + t * kRows, sums[t]);
}

template <class Weights>
void run_parts(const GemvProduct& product) {
  constexpr decltype(&add_part<Weights, 1>) kAdd[] = {add_part<Weights, 3>, add_part<Weights, 4>, add_part<Weights, 5>,
                                                      add_part<Weights, 6>};
  constexpr int kLeast = 3;  // of a tile, where there are several or a large one
  const int tiles = tiles_of(product.layout.format, product.tokens);
  const int64_t cols = product.layout.padded_cols;
  alignas(64) float kept[kGemvTokens][kRows];
  for (int64_t block = product.begin; block < product.end; ++block) {
    const uint8_t* w = product.weights + static_cast<size_t>(block) * product.layout.block_bytes;
    std::memset(kept, 0, sizeof kept);
    for (int64_t k = 0; k < cols; k += kPart) {
      const int64_t part = cols - k < kPart ? cols - k : kPart;
      const uint8_t* next = w + static_cast<size_t>(part / 2) * Weights::bytes;  // after the last part, the next block
      const size_t ask = Weights::bytes / static_cast<size_t>(tiles);
      for (int tile = 0; tile < tiles; ++tile) {
        const int first = tile_begin(product.tokens, tile, tiles);
        const int count = tile_begin(product.tokens, tile + 1, tiles) - first;
        const float* x = reinterpret_cast<const float*>(product.x) + first * cols + k * count;
        kAdd[count - kLeast](w, x, part, next + static_cast<size_t>(tile * part / 2) * ask, ask, kept[first]);
      }
      w = next;
    }
    for (int t = 0; t < product.tokens; ++t) write(product.out, block * kRows, product.rows, t, load_rows(kept[t]));
  }
}
#endif

template <class Weights>
struct FloatKernel {
  template <int M, int S>
  static void blocks(const BlockLayout& layout, const uint8_t* (&w)[S], const uint8_t* x, Floats (&out)[S][M]) {
    float_blocks<Weights>(layout, w, x, out);
  }
};

template <class Weights>
void multiply_as(const GemvProduct& product) {
#if ANYACCEL_LANES == 8
  if (product.tokens > kTile) return run_parts<Weights>(product);
#endif
  run<FloatKernel<Weights>>(product);
}

void multiply_floats(const GemvProduct& product) {
  switch (product.layout.format) {
    case Format::f32:
      return multiply_as<F32>(product);
    case Format::f16:
      return multiply_as<F16>(product);
    case Format::bf16:
      return multiply_as<BF16>(product);
    default:
      return;  // not floats
  }
}

// --- weights as floats, for products that are not made from this form

template <int I>
inline Ints column8_rows(const uint8_t* line) {
  return each<kVecs>([&](int v) { return column8<I>(line + v * kVecBytes); });
}
template <int I>
inline Ints column4_rows(const uint8_t* line) {
  return each<kVecs>([&](int v) { return column4<I>(line + v * kVecBytes); });
}
void store_pairs(uint16_t* panel, const Floats& even, const Floats& odd) {
  for (int v = 0; v < kVecs; ++v) store(panel + 2 * v * kLanes, interleave_bf16(even.x[v], odd.x[v]));
}

// Calls put(k, column k, column k + 1) for the columns k0 .. k1.
template <class Weights, class Put>
void for_float_columns(const uint8_t* block, int64_t k0, int64_t k1, const Put& put) {
  for (int64_t k = k0; k < k1; k += 2) {
    const FloatPair pair = Weights::load_pair(block + static_cast<size_t>(k / 2) * Weights::bytes);
    put(k, pair.even, pair.odd);
  }
}

void read_scales(const BlockLayout& layout, const uint8_t* block, int64_t column, Floats& scale, Floats& minimum) {
  for (int v = 0; v < kVecs; ++v) {
    const RowScales rows = row_scales(layout, block, column, v * kLanes);
    scale.x[v] = rows.scale;
    minimum.x[v] = rows.minimum;
  }
}

template <class Put>
void for_i8_columns(const BlockLayout& layout, const uint8_t* block, int64_t k0, int64_t k1, const Put& put) {
  Floats scale =
      layout.group == 0 ? load_rows(reinterpret_cast<const float*>(block + layout.scales_at(0))) : all(broadcast(0.0f));
  Floats minimum = all(broadcast(0.0f));
  for (int64_t k = k0; k < k1; k += 4) {
    if (layout.group != 0 && (k == k0 || k % layout.group == 0)) read_scales(layout, block, k, scale, minimum);
    const uint8_t* line = block + layout.unit_at(k) + static_cast<size_t>(k % kUnitColumns / 4) * kLine;
    const auto value = [&](const Ints& q) { return fma(convert(q), scale, minimum); };
    put(k, value(column8_rows<0>(line)), value(column8_rows<1>(line)));
    put(k + 2, value(column8_rows<2>(line)), value(column8_rows<3>(line)));
  }
}

template <class Put>
void for_i4_columns(const BlockLayout& layout, const uint8_t* block, int64_t k0, int64_t k1, const Put& put) {
  Floats scale = all(broadcast(0.0f)), minimum = all(broadcast(0.0f));
  for (int64_t k = k0; k < k1; k += 8) {
    if (k == k0 || k % layout.group == 0) {
      read_scales(layout, block, k, scale, minimum);
      if (!layout.minimum) minimum = mul(scale, broadcast(-8.0f));
    }
    const uint8_t* line = block + layout.unit_at(k) + static_cast<size_t>(k % kUnitColumns / 8) * kLine;
    const auto value = [&](const Ints& q) { return fma(convert(q), scale, minimum); };
    put(k, value(column4_rows<0>(line)), value(column4_rows<1>(line)));
    put(k + 2, value(column4_rows<2>(line)), value(column4_rows<3>(line)));
    put(k + 4, value(column4_rows<4>(line)), value(column4_rows<5>(line)));
    put(k + 6, value(column4_rows<6>(line)), value(column4_rows<7>(line)));
  }
}

// Units as lines of i8, in a place of this thread's own.
template <class Put>
void for_bits_columns(const BlockLayout& layout, const uint8_t* block, int64_t k0, int64_t k1, const Put& put) {
  const FormatRow& format = row_of(layout.format);
  const bool zero = !layout.minimum && format.codes == nullptr;
  alignas(64) uint8_t lines[kUnitColumns / 4 * kPlaneLine];
  Floats scale = all(broadcast(0.0f)), minimum = scale;
  for (int64_t k = k0; k < k1; k += 4) {
    if (k == k0 || k % kUnitColumns == 0)
      expand_unit(format, block + layout.unit_at(k), zero ? -(1 << (format.bits - 1)) : 0, lines);
    if (k == k0 || k % layout.group == 0) read_scales(layout, block, k, scale, minimum);
    const uint8_t* line = lines + k % kUnitColumns / 4 * kPlaneLine;
    const auto value = [&](const Ints& q) { return fma(convert(q), scale, minimum); };
    put(k, value(column8_rows<0>(line)), value(column8_rows<1>(line)));
    put(k + 2, value(column8_rows<2>(line)), value(column8_rows<3>(line)));
  }
}

template <class Put>
void for_columns(const BlockLayout& layout, const uint8_t* block, int64_t k0, int64_t k1, const Put& put) {
  switch (layout.format) {
    case Format::f32:
      return for_float_columns<F32>(block, k0, k1, put);
    case Format::f16:
      return for_float_columns<F16>(block, k0, k1, put);
    case Format::bf16:
      return for_float_columns<BF16>(block, k0, k1, put);
    case Format::i8:
      return for_i8_columns(layout, block, k0, k1, put);
    case Format::i4:
      return for_i4_columns(layout, block, k0, k1, put);
    default:
      return for_bits_columns(layout, block, k0, k1, put);
  }
}

void unpack_floats(const BlockLayout& layout, const uint8_t* block, int64_t k0, int64_t k1, float* panel) {
  for_columns(layout, block, k0, k1, [=](int64_t k, const Floats& even, const Floats& odd) {
    store_rows(panel + (k - k0) * kRows, even);
    store_rows(panel + (k - k0 + 1) * kRows, odd);
  });
  for (int64_t k = layout.cols > k0 ? layout.cols : k0; k < k1; ++k)
    store_rows(panel + (k - k0) * kRows, all(broadcast(0.0f)));
}

void unpack_pairs(const BlockLayout& layout, const uint8_t* block, int64_t k0, int64_t k1, uint16_t* panel) {
  for_columns(layout, block, k0, k1, [=](int64_t k, const Floats& even, const Floats& odd) {
    store_pairs(panel + (k - k0) * kRows, even, odd);
  });
  for (int64_t k = layout.cols > k0 ? layout.cols : k0; k < k1; ++k)
    for (int r = 0; r < kRows; ++r) panel[((k - k0) / 2 * kRows + r) * 2 + k % 2] = 0;
}

constexpr GemvFloatKernels kKernels{multiply_floats, unpack_floats, unpack_pairs};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::GemvFloatKernels, anyaccel::llm::kKernels)
