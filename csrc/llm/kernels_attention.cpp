// SPDX-License-Identifier: Apache-2.0
#include "llm/kernels_attention.h"

#include "simd/pick.h"
#include "simd/simd.h"

namespace anyaccel::llm {
namespace {

using namespace simd::ANYACCEL_ISA_VARIANT;

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504088896341f;

// --- cache formats: two neighbours k, k+1 of kLanes columns of a block ([k][16]; bf16 [k/2][16][2])

struct F32 {
  static constexpr size_t kColumnBytes = 4, kPairBytes = 128;
  static Vec first(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
  static void pair(const uint8_t* p, Vec& a, Vec& b) {
    a = first(p);
    b = first(p + 64);
  }
};

struct BF16 {
  static constexpr size_t kColumnBytes = 4, kPairBytes = 64;
  static Vec first(const uint8_t* p) { return even_bf16(p); }
  static void pair(const uint8_t* p, Vec& a, Vec& b) {
    a = even_bf16(p);
    b = odd_bf16(p);
  }
};

struct I8 {
  static constexpr size_t kColumnBytes = 1, kPairBytes = 32;
  static Vec first(const uint8_t* p) { return load_i8(p); }
  static void pair(const uint8_t* p, Vec& a, Vec& b) {
    a = first(p);
    b = first(p + 16);
  }
};

// --- c[rows][columns] = a[rows][k] * b[k][columns] (+ factor[row] * c)

struct Product {
  const float* a;
  int64_t a_stride;
  const uint8_t* b;    // of the first block
  size_t block_bytes;  // from one block of 16 columns to the next
  int k;
  float* c;
  int64_t c_stride;
  const float* factor;   // null: c is not read
  const uint8_t* ahead;  // what is read next, as long as b: fetched meanwhile; null: nothing
};

// R rows and N vectors of columns. The order of the additions to a result is that of k, whatever R and N are.
template <class B, int R, int N>
void tile(const Product& p) {
  constexpr size_t kStepBytes = N * B::kPairBytes * kLanes / 16;
  const uint8_t* column[N];
  Vec sums[R][N];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    column[n] = p.b + static_cast<size_t>(n * kLanes / 16) * p.block_bytes + n * kLanes % 16 * B::kColumnBytes;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      sums[r][n] =
          p.factor == nullptr ? broadcast(0.0f) : mul(load(p.c + r * p.c_stride + n * kLanes), broadcast(p.factor[r]));
  }
  // Every third row has a pointer: an address reaches two strides further.
  const float* a[(R + 2) / 3];
#pragma GCC unroll 4
  for (int r = 0; r < R; r += 3) {
    a[r / 3] = p.a + r * p.a_stride;
    asm("" : "+r"(a[r / 3]));  // or GCC makes vectors of these few pointers, through memory
  }
  const int64_t stride = p.a_stride;
  const uint8_t* ahead = p.ahead;
  for (int pairs = p.k / 2; pairs > 0; --pairs) {
    if (ahead != nullptr) {
      for (size_t line = 0; line < (kStepBytes + 63) / 64; ++line) __builtin_prefetch(ahead + 64 * line);
      ahead += kStepBytes;
    }
    Vec even[N], odd[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      B::pair(column[n], even[n], odd[n]);
      column[n] += B::kPairBytes;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float* const from = a[r / 3] + r % 3 * stride;
      const Vec x = broadcast(from[0]), y = broadcast(from[1]);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sums[r][n] = fma(x, even[n], sums[r][n]);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sums[r][n] = fma(y, odd[n], sums[r][n]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < (R + 2) / 3; ++r) a[r] += 2;
  }
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    if (p.k % 2 != 0) {
      const Vec even = B::first(column[n]);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sums[r][n] = fma(broadcast(a[r / 3][r % 3 * stride]), even, sums[r][n]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) store(p.c + r * p.c_stride + n * kLanes, sums[r][n]);
  }
}

using Tile = void (*)(const Product&);

// Sizes that fill the registers: many rows for prefill, many columns (several streams of memory) for decode. A number
// of rows without a tile of its own is made of several.
#if ANYACCEL_LANES == 16
constexpr int kTileRows = 12;
constexpr int rows_of_tile(int rows) { return rows >= 12 ? 12 : rows >= 8 ? 8 : rows > 4 ? 4 : rows; }
template <class B>
constexpr Tile kTiles[kTileRows][3] = {{tile<B, 1, 1>, tile<B, 1, 2>, tile<B, 1, 4>},
                                       {tile<B, 2, 1>, tile<B, 2, 2>, tile<B, 2, 4>},
                                       {tile<B, 3, 1>, tile<B, 3, 2>, tile<B, 3, 4>},
                                       {tile<B, 4, 1>, tile<B, 4, 2>, tile<B, 4, 4>},
                                       {},
                                       {},
                                       {},
                                       {tile<B, 8, 1>, tile<B, 8, 2>, nullptr},
                                       {},
                                       {},
                                       {},
                                       {tile<B, 12, 1>, tile<B, 12, 2>, nullptr}};
#elif ANYACCEL_LANES == 8 || ANYACCEL_REGISTERS == 32
constexpr int kTileRows = 4;
constexpr int rows_of_tile(int rows) { return rows; }
template <class B>
constexpr Tile kTiles[kTileRows][1] = {
    {tile<B, 1, 16 / kLanes>}, {tile<B, 2, 16 / kLanes>}, {tile<B, 3, 16 / kLanes>}, {tile<B, 4, 16 / kLanes>}};
#else
constexpr int kTileRows = 2;
constexpr int rows_of_tile(int rows) { return rows; }
template <class B>
constexpr Tile kTiles[kTileRows][1] = {{tile<B, 1, 16 / kLanes>}, {tile<B, 2, 16 / kLanes>}};
#endif

// Up to kTileRows rows and any number of blocks of columns.
template <class B>
void multiply(const Product& product, int rows, int blocks) {
  for (Product down = product; rows > 0;) {
    const int height = rows_of_tile(rows);
    Product p = down;
    for (int left = blocks; left > 0;) {
      int size = 0;  // log2 of the blocks of this tile
      if (kLanes == 16) size = left >= 4 && height <= 4 ? 2 : left >= 2 ? 1 : 0;
      kTiles<B>[height - 1][size](p);
      const size_t bytes = p.block_bytes << size;
      p.b += bytes;
      p.c += 16 << size;
      if (p.ahead != nullptr) p.ahead += bytes;
      left -= 1 << size;
    }
    down.a += height * down.a_stride;
    down.c += height * down.c_stride;
    if (down.factor != nullptr) down.factor += height;
    down.ahead = nullptr;  // fetched already
    rows -= height;
  }
}

// --- softmax of the scores of a tile's rows in one page. Scores are in units of log 2: 2^x costs less than e^x.

// What is known of a task's rows. Arrays are read in whole vectors.
struct Rows {
  int64_t position[kTaskRows];
  int64_t first_seen[kTaskRows];
  float slope[kTaskRows];
  float largest[kTaskRows + kLanes];  // score so far
  float total[kTaskRows][kLanes];     // of 2^(score - largest), by lanes
};

// Scores of rows [first, first + count) become weights; factors are what their earlier sums are to be multiplied by.
// Without branches on the scores, in loops over rows that do not wait for each other.
template <bool kScaled, bool kChanged>
void weigh(Rows& rows, int first, int count, float* scores, int columns, int64_t page_begin, const float* scales,
           float cap, float* factors) {
  float found[kTileRows + kLanes], shift[kTileRows + kLanes];
  for (int r = 0; r < count; ++r) {
    float* const s = scores + r * kPageTokens;
    const int64_t position = rows.position[first + r];
    const int64_t low = rows.first_seen[first + r] - page_begin, high = position + 1 - page_begin;
    Vec top = broadcast(-kInfinity);
    if (!kScaled && !kChanged && low <= 0 && high >= columns) {
      for (int j = 0; j < columns; j += kLanes) top = max(load(s + j), top);
      found[r] = largest(top);
      continue;
    }
    for (int j = 0; j < columns; j += kLanes) {
      Vec v = load(s + j);
      if (kScaled) v = mul(v, load(scales + j));
      if (kChanged) {
        if (cap > 0) v = mul(broadcast(cap), tanh(mul(v, broadcast(1.0f / cap))));
        v = fma(broadcast(rows.slope[first + r]), add(iota(), broadcast(static_cast<float>(page_begin + j - position))),
                v);
        v = mul(v, broadcast(kLog2E));
      }
      if (j < low || j + kLanes > high) {
        const Vec index = add(iota(), broadcast(static_cast<float>(j)));
        v = select(less(index, broadcast(static_cast<float>(low))), broadcast(-kInfinity), v);
        v = select(less(index, broadcast(static_cast<float>(high))), v, broadcast(-kInfinity));
      }
      store(s + j, v);
      top = max(v, top);
    }
    found[r] = largest(top);
  }
  for (int r = 0; r < count; r += kLanes) {
    const int n = count - r < kLanes ? count - r : kLanes;
    const Vec before = load_n(rows.largest + first + r, n, broadcast(0.0f));
    const Vec now = max(load_n(found + r, n, broadcast(0.0f)), before);
    const Mask none = equal(now, broadcast(-kInfinity));  // nothing seen yet
    store_n(rows.largest + first + r, n, now);
    store_n(shift + r, n, select(none, broadcast(0.0f), now));
    store_n(factors + r, n, select(none, broadcast(1.0f), exp2(sub(before, now))));
  }
  for (int r = 0; r < count; ++r) {
    float* const s = scores + r * kPageTokens;
    const Vec subtract = broadcast(shift[r]);
    Vec total = mul(load(rows.total[first + r]), broadcast(factors[r]));
#pragma GCC unroll 4
    for (int j = 0; j < columns; j += kLanes) {
      Vec v = exp2(sub(load(s + j), subtract));
      total = add(total, v);
      if (kScaled) v = select(equal(v, broadcast(0.0f)), v, mul(v, load(scales + kPageTokens + j)));
      store(s + j, v);
    }
    store(rows.total[first + r], total);
  }
}

int64_t first_seen(const AttentionOptions& options, int64_t position) {
  int64_t first = 0;
  if (options.window > 0 && position - options.window + 1 > first) first = position - options.window + 1;
  if (options.chunk > 0 && position / options.chunk * options.chunk > first)
    first = position / options.chunk * options.chunk;
  return first;
}

float exp2_of(float x) {
  float result[kLanes];
  store(result, exp2(broadcast(x)));
  return result[0];
}

void copy_scaled(const float* from, float factor, int n, float* to) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, mul(load(from + i), broadcast(factor)));
  if (i < n) store_n(to + i, n - i, mul(load_n(from + i, n - i, broadcast(0.0f)), broadcast(factor)));
}

// 1 / (sum of weights), where a sink's weight is part of the sum; `total` is of 2^(score - largest).
float normaliser(float largest_score, float total, const float* sink) {
  if (sink == nullptr) return 1.0f / total;
  const float score = *sink * kLog2E;
  if (score <= largest_score) return 1.0f / (total + exp2_of(score - largest_score));
  const float shrink = exp2_of(largest_score - score);
  return shrink / (total * shrink + 1.0f);
}

template <class B>
void attend_rows(const AttendTask& task) {
  constexpr bool kScaled = B::kColumnBytes == 1;
  const HeadLayout& layout = *task.layout;
  const AttentionOptions& options = *task.options;
  const int k = layout.padded_head_dim, width = layout.padded_value_dim;
  float* const q = task.scratch;
  float* const sums = q + kTaskRows * k;
  float* const scores = sums + kTaskRows * width;
  const bool changed = options.softcap > 0 || options.alibi_slopes != nullptr;
  const float scale = changed ? options.scale : options.scale * kLog2E;
  Rows rows;
  const auto token_of = [&](int r) { return (task.first_row + r) / task.group; };
  const auto head_of = [&](int r) { return (task.first_row + r) % task.group; };
  const auto query = [&](int r) { return task.q + token_of(r) * task.q_stride + head_of(r) * layout.head_dim; };
  for (int r = 0; r < task.rows; ++r)  // far apart in memory, and written by other cores
    for (int i = 0; i < layout.head_dim; i += 16) __builtin_prefetch(query(r) + i);
  for (int r = 0; r < task.rows; ++r) {
    copy_scaled(query(r), scale, layout.head_dim, q + r * k);
    for (int i = layout.head_dim; i < k; ++i) q[r * k + i] = 0;
    for (int i = 0; i < width; i += kLanes) store(sums + r * width + i, broadcast(0.0f));
    rows.position[r] = task.position + token_of(r);
    rows.first_seen[r] = first_seen(options, rows.position[r]);
    rows.slope[r] = options.alibi_slopes == nullptr ? 0.0f : options.alibi_slopes[head_of(r)];
    rows.largest[r] = -kInfinity;
    store(rows.total[r], broadcast(0.0f));
  }
  const auto weights = changed ? weigh<kScaled, true> : weigh<kScaled, false>;
  const bool stream = task.rows <= kTileRows;  // memory bound: the next bytes are fetched during the arithmetic
  for (int64_t page = task.begin / kPageTokens; page * kPageTokens < task.end; ++page) {
    const uint8_t* const keys = task.pages[page] + task.offset;
    const float* const scales = reinterpret_cast<const float*>(keys + layout.scales);
    const int64_t page_begin = page * kPageTokens;
    for (int first = 0; first < task.rows; first += kTileRows) {
      const int count = task.rows - first < kTileRows ? task.rows - first : kTileRows;
      const int64_t last = rows.position[first + count - 1] + 1;
      const int64_t end = (last < task.end ? last : task.end) - page_begin;
      if (end <= 0 || rows.first_seen[first] >= page_begin + kPageTokens) continue;
      const int tokens = end < kPageTokens ? static_cast<int>(end) : kPageTokens;
      const int blocks = (tokens + 15) / 16;
      const bool more = page_begin + kPageTokens < task.end;
      multiply<B>({q + first * k, k, keys, layout.key_block_bytes, k, scores, kPageTokens, nullptr,
                   stream ? keys + layout.values : nullptr},
                  count, blocks);
      float factors[kTileRows];
      weights(rows, first, count, scores, 16 * blocks, page_begin, scales, options.softcap, factors);
      multiply<B>({scores, kPageTokens, keys + layout.values, layout.value_block_bytes, tokens, sums + first * width,
                   width, factors, stream && more ? task.pages[page + 1] + task.offset : nullptr},
                  count, width / 16);
    }
  }
  for (int r = 0; r < task.rows; ++r) {
    const float total = sum(load(rows.total[r]));
    if (task.out == nullptr) {
      float* const to = task.partial + r * partial_floats(layout);
      for (int i = 0; i < width; ++i) to[i] = sums[r * width + i];
      to[width] = rows.largest[r];
      to[width + 1] = total;
      continue;
    }
    const float* const sink = options.sinks == nullptr ? nullptr : options.sinks + head_of(r);
    copy_scaled(sums + r * width, normaliser(rows.largest[r], total, sink), layout.value_dim,
                task.out + token_of(r) * task.out_stride + head_of(r) * layout.value_dim);
  }
}

void attend_task(const AttendTask& task) {
  switch (task.layout->format) {
    case CacheFormat::f32:
      return attend_rows<F32>(task);
    case CacheFormat::bf16:
      return attend_rows<BF16>(task);
    case CacheFormat::i8:
      return attend_rows<I8>(task);
  }
}

void combine_row(const CombineTask& task) {
  const int width = task.padded_value_dim;
  const auto part = [&](int index) { return task.partials + index * task.part_stride; };
  float top = -kInfinity;
  for (int i = 0; i < task.parts; ++i)
    if (part(i)[width] > top) top = part(i)[width];
  float total = 0;
  for (int i = 0; i < task.parts; ++i) total += exp2_of(part(i)[width] - top) * part(i)[width + 1];
  const float factor = normaliser(top, total, task.sink);
  for (int first = 0; first < task.value_dim; first += kLanes) {
    Vec v = broadcast(0.0f);
    for (int i = 0; i < task.parts; ++i) v = fma(broadcast(exp2_of(part(i)[width] - top)), load(part(i) + first), v);
    const int rest = task.value_dim - first;
    if (rest >= kLanes)
      store(task.out + first, mul(v, broadcast(factor)));
    else
      store_n(task.out + first, rest, mul(v, broadcast(factor)));
  }
}

constexpr AttentionKernels kKernels{attend_task, combine_row};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::AttentionKernels, anyaccel::llm::kKernels)
