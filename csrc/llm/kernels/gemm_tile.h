// SPDX-License-Identifier: Apache-2.0
// The register tile of gemm: some tokens times some blocks of 16 rows, summed over the steps of a pass while
// all sums stay in registers (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008).
// Math says what a step is: operand() and broadcast_operand() read what fma() multiplies. A line of weights is one
// step, or several that operand<step>() takes out of it.
#pragma once

#include <cstdint>
#include <cstring>

#include "llm/kernels/gemm_kernels.h"
#include "simd/pick.h"
#include "simd/simd.h"

namespace anyaccel::llm {
namespace {

using namespace simd::ANYACCEL_ISA_VARIANT;

constexpr int kRows = 16;                   // of a block
constexpr int kBlockVecs = kRows / kLanes;  // vectors of them
constexpr int64_t kLineBytes = 64;          // of a step of a block
constexpr int64_t kCacheAhead = 8;  // lines: weights come from the L2 cache, which hides its latency badly by itself

// out = scale * (sums + bias), or added to it: for the last rows of a matrix.
template <int kWidth>
[[gnu::noinline, gnu::noclone]] void write_rest(const float* sums, int tokens, const GemmTile& to) {
  for (int t = 0; t < tokens; ++t)
    for (int64_t r = 0; r < to.rows; ++r) {
      float* out = to.out + t * to.stride + r;
      const float value = sums[t * kWidth + r];
      const float sum = (to.bias != nullptr ? value + to.bias[r] : value) * to.scale;
      *out = to.add ? *out + sum : sum;
    }
}

template <class Math, int kTokens>
inline void write(const Vec (&sums)[kTokens][Math::kBlocks * kBlockVecs], const GemmTile& to) {
  constexpr int kVecs = Math::kBlocks * kBlockVecs;
  constexpr int kWidth = Math::kBlocks * kRows;
  if (to.rows < kWidth) {
    alignas(64) float rest[kTokens][kWidth];
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) store(&rest[t][v * kLanes], sums[t][v]);
    write_rest<kWidth>(&rest[0][0], kTokens, to);
    return;
  }
  const auto scale = broadcast(to.scale);
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) {
      float* out = to.out + t * to.stride + v * kLanes;
      auto sum = sums[t][v];
      if (to.bias != nullptr) sum = add(sum, load(to.bias + v * kLanes));
      sum = mul(sum, scale);
      if (to.add) sum = add(sum, load(out));
      store(out, sum);
    }
}

template <class Math>
constexpr int kLineSteps = 1;

template <class Math, int kStep>
inline auto operand_of(const uint8_t* p) {
  if constexpr (kLineSteps<Math> == 1)
    return Math::operand(p);
  else
    return Math::template operand<kStep>(p);
}

// Adds a step of some tokens, whose activations are at `x`.
template <class Math, int kStep, int kTokens>
[[gnu::always_inline]] inline void multiply_step(const uint8_t* x, const uint8_t* weights, int64_t weight_stride,
                                                 Vec (&sums)[kTokens][Math::kBlocks * kBlockVecs]) {
  constexpr int kVecs = Math::kBlocks * kBlockVecs;
  constexpr int64_t kVecBytes = kLineBytes / kBlockVecs;
  typename Math::Operand w[kVecs];
#pragma GCC unroll 16
  for (int b = 0; b < Math::kBlocks; ++b) {
    if (kStep == 0) __builtin_prefetch(weights + b * weight_stride + Math::kAhead * kLineBytes);
#pragma GCC unroll 16
    for (int v = 0; v < kBlockVecs; ++v)
      w[b * kBlockVecs + v] = operand_of<Math, kStep>(weights + b * weight_stride + v * kVecBytes);
  }
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) {
    const auto value = Math::broadcast_operand(x + t * 4);
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) sums[t][v] = Math::fma(value, w[v], sums[t][v]);
  }
}

// `lines`: of a block.
template <class Math, int kTokens>
inline void multiply_tile(const uint8_t* x, int64_t lines, const uint8_t* weights, int64_t weight_stride,
                          const uint8_t* prefetch, int64_t prefetch_step, const GemmTile& to) {
  constexpr int kBlocks = Math::kBlocks, kVecs = kBlocks * kBlockVecs;
  Vec sums[kTokens][kVecs];
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) sums[t][v] = broadcast(0.0f);
    const float* out = to.out + t * to.stride;
    for (int b = 0; b < kBlocks; ++b) __builtin_prefetch(out + b * kRows, 1);
  }
  const uint8_t* next = to.next_weights;
  const int64_t next_step = (to.next_bytes + lines - 1) / lines;  // at most a line of the cache
#pragma GCC unroll 2
  for (int64_t line = 0; line < lines; ++line) {
    multiply_step<Math, 0>(x, weights, weight_stride, sums);
    if constexpr (kLineSteps<Math> == 2) multiply_step<Math, 1>(x + kTokens * 4, weights, weight_stride, sums);
    __builtin_prefetch(prefetch, 0, 2);
    prefetch += prefetch_step;
    __builtin_prefetch(next, 0, 2);
    next += next_step;
    x += kLineSteps<Math> * kTokens * 4;
    weights += kLineBytes;
  }
  write<Math, kTokens>(sums, to);
}

// The last block of a matrix may have no second one: it is multiplied twice, and written once.
template <class Math, int kTokens>
void multiply_panel(const uint8_t* x, int64_t lines, const uint8_t* weights, int64_t weight_stride, int64_t blocks,
                    const uint8_t* prefetch, GemmTile to) {
  // Each tile fetches its share of the next panel: the L1 cache would wait for it else, at every panel's start.
  const int64_t tiles = (blocks + Math::kBlocks - 1) / Math::kBlocks;
  const int64_t prefetch_step = (kLineSteps<Math> * kTokens * 4 + tiles - 1) / tiles;
  for (int64_t b = 0; b < blocks; b += Math::kBlocks) {
    multiply_tile<Math, kTokens>(x, lines, weights, blocks - b >= Math::kBlocks ? weight_stride : 0, prefetch,
                                 prefetch_step, to);
    prefetch += lines * prefetch_step;
    weights += Math::kBlocks * weight_stride;
    to.out += Math::kBlocks * kRows;
    to.rows -= Math::kBlocks * kRows;
    to.next_weights += to.next_stride;
    if (to.bias != nullptr) to.bias += Math::kBlocks * kRows;
  }
}

// More tokens than one panel's are divided into panels of at least half the size; a prompt of few has a smaller one.
template <class Math, int kTokens = Math::kTokens>
void multiply(const void* panel, int tokens, int64_t total, int64_t unit, int64_t units, const uint8_t* weights,
              int64_t weight_stride, int64_t blocks, const GemmTile& to) {
  constexpr int64_t kUnitSteps = kUnit / Math::kColumns;
  if (tokens == kTokens) {
    const int64_t offset = unit * kUnitSteps * kTokens * 4;
    multiply_panel<Math, kTokens>(static_cast<const uint8_t*>(panel) + offset, units * kUnitSteps / kLineSteps<Math>,
                                  weights, weight_stride, blocks, to.next_panel + offset, to);
  } else if constexpr (kTokens > 1)
    multiply<Math, kTokens - 1>(panel, tokens, total, unit, units, weights, weight_stride, blocks, to);
}

#if ANYACCEL_LANES == 16
template <int kOrder>
inline IVec lanes128(IVec a, IVec b) {
  return _mm512_shuffle_i32x4(a, b, kOrder);
}

// Sixteen vectors of sixteen lanes: rows become columns.
inline void transpose(IVec (&v)[16]) {
  IVec a[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    a[i] = lanes128<0x88>(v[i], v[i + 4]);
    a[i + 4] = lanes128<0xdd>(v[i], v[i + 4]);
    a[i + 8] = lanes128<0x88>(v[i + 8], v[i + 12]);
    a[i + 12] = lanes128<0xdd>(v[i + 8], v[i + 12]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    v[i] = lanes128<0x88>(a[i], a[i + 8]);
    v[i + 8] = lanes128<0xdd>(a[i], a[i + 8]);
    v[i + 4] = lanes128<0x88>(a[i + 4], a[i + 12]);
    v[i + 12] = lanes128<0xdd>(a[i + 4], a[i + 12]);
  }
}

// Panel [step][token]. Math::lanes(x, count) are the sixteen steps that start at x, of `count` valid columns.
template <class Math>
void pack(const float* x, int64_t stride, const int32_t* rows, int tokens, int64_t cols, int64_t total, void* panel) {
  const int64_t total_steps = total * kUnit / Math::kColumns;
  auto* out = static_cast<uint8_t*>(panel);
  const auto valid = first_lanes(tokens);
  for (int64_t s = 0; s < total_steps; s += 16) {
    IVec v[16];
#pragma GCC unroll 16
    for (int t = 0; t < 16; ++t) {
      const int64_t column = s * Math::kColumns;
      v[t] = t < tokens ? Math::lanes(x + (rows != nullptr ? rows[t] : t) * stride + column, cols - column)
                        : _mm512_setzero_si512();
    }
    transpose(v);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_mask_storeu_epi32(out + (s + i) * tokens * 4, valid, v[i]);
  }
}
#else
template <class Math>
void pack(const float* x, int64_t stride, const int32_t* rows, int tokens, int64_t cols, int64_t total, void* panel) {
  const int64_t total_steps = total * kUnit / Math::kColumns;
  auto* out = static_cast<float*>(panel);
  for (int t = 0; t < tokens; ++t) {
    const float* row = x + (rows != nullptr ? rows[t] : t) * stride;
    for (int64_t s = 0; s < cols; ++s) out[s * tokens + t] = row[s];
    for (int64_t s = cols; s < total_steps; ++s) out[s * tokens + t] = 0.0f;
  }
}
#endif

template <class Math>
constexpr GemmKernels kernels_of(GemmKernels::Operands operands, int64_t units, size_t cache_bytes,
                                 decltype(GemmKernels::unpack) unpack,
                                 decltype(GemmKernels::multiply) multiply_bf16 = nullptr) {
  constexpr int64_t kUnitSteps = kUnit / Math::kColumns;
  return {operands, false,       Math::kTokens,  Math::kBlocks,
          units,    cache_bytes, kUnitSteps * 4, kUnitSteps * kLineBytes,
          8,        pack<Math>,  unpack,         multiply<Math>,
          nullptr,  nullptr,     multiply_bf16};
}

}  // namespace
}  // namespace anyaccel::llm
