// SPDX-License-Identifier: Apache-2.0
// Products with blocks of keys and values, as each cache format but i4 has them, for attention_rows.h: as floats, or as
// pairs of bfloat16 by an instruction for them.
#pragma once

#include "llm/attention/kernels_attention.h"
#include "simd/simd.h"

namespace anyaccel::llm {
namespace {

using namespace simd::ANYACCEL_ISA_VARIANT;

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

struct I4 {};  // attention_nibbles.h

// Whether rows too are pairs of bfloat16: `a` of a product points to them, two in the place of a float. Such a format
// has columns(p), row(p), store_row(p, kLanes floats) and dot(sums, row, columns).
template <class B>
constexpr bool kPaired = false;
// Whether all columns of a page are multiplied, those too that its tokens do not fill.
template <class B>
constexpr bool kWholePages = false;

// --- c[rows][columns] = a[rows][k] * b[k][columns] (+ factor[row] * c)

struct Product {
  const float* a;
  int64_t a_stride;
  const uint8_t* b;    // of the first block
  size_t block_bytes;  // from one block of 16 columns to the next
  int k;
  float* c;
  int64_t c_stride;
  const float* factor;      // null: c is not read
  const uint8_t* prefetch;  // what is read next, as long as b: fetched meanwhile; null: nothing
};

// R rows and N vectors of columns. The order of the additions to a result is that of k, whatever R and N are.
template <class B, int R, int N>
void tile(const Product& p) {
  constexpr int kBlocks = N * kLanes / 16;
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
  const uint8_t* prefetch = p.prefetch;
  for (int pairs = p.k / 2; pairs > 0; --pairs) {
    if (prefetch != nullptr) {  // in the order in which blocks are read: in turn
#pragma GCC unroll 4
      for (int block = 0; block < kBlocks; ++block)
        for (size_t line = 0; line < B::kPairBytes; line += 64)
          __builtin_prefetch(prefetch + static_cast<size_t>(block) * p.block_bytes + line);
      prefetch += B::kPairBytes;
    }
    if constexpr (kPaired<B>) {
      IVec columns[N];
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        columns[n] = B::columns(column[n]);
        column[n] += B::kPairBytes;
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const auto row = B::row(a[r / 3] + r % 3 * stride);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) sums[r][n] = B::dot(sums[r][n], row, columns[n]);
      }
    } else {
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
    }
#pragma GCC unroll 4
    for (int r = 0; r < (R + 2) / 3; ++r) a[r] += kPaired<B> ? 1 : 2;
  }
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    if (p.k % 2 != 0) {  // what the last pair has beside it may be no number
      const auto even = B::first(column[n]);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const float* const from = a[r / 3] + r % 3 * stride;
        if constexpr (kPaired<B>)
          sums[r][n] = B::dot(sums[r][n], B::row(from), even);
        else
          sums[r][n] = fma(broadcast(*from), even, sums[r][n]);
      }
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

// Rows that are attended together.
template <class B>
constexpr int kRowsOf = kTileRows;

// Up to that many rows and any number of blocks of columns.
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
      if (p.prefetch != nullptr) p.prefetch += bytes;
      left -= 1 << size;
    }
    down.a += height * down.a_stride;
    down.c += height * down.c_stride;
    if (down.factor != nullptr) down.factor += height;
    down.prefetch = nullptr;  // fetched already
    rows -= height;
  }
}

}  // namespace
}  // namespace anyaccel::llm
