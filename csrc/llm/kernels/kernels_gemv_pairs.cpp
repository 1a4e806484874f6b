// SPDX-License-Identifier: Apache-2.0
// ISA: avx512_bf16
// Products with few tokens (gemv) of weights in bfloat16, with activations rounded to it as those of many tokens are.
//
// Activations: [cols/32][token][16 pairs]. Each sum is made of one pair of columns after the other, whatever the number
// of tokens.
#include "llm/kernels/gemv_run.h"

namespace anyaccel::llm {
namespace {

constexpr int kMostOfTwo = 14;  // tokens whose sums for two blocks fit the registers
constexpr int kPairs = kActivationGroup / 2;

void prepare(const GemvInput& in) {
  for (int t = 0; t < in.tokens; ++t) {
    const float* x = in.x + (in.rows != nullptr ? in.rows[t] : t) * in.stride;
    for (int64_t g = in.begin; g < in.end; ++g)
      store(static_cast<void*>(reinterpret_cast<uint32_t*>(in.data) + (g * in.tokens + t) * kPairs),
            pairs_of(x + g * kActivationGroup, in.layout.cols - g * kActivationGroup));
  }
}

// S blocks that are `apart` blocks from each other, times M tokens.
template <int M, int S>
void multiply_blocks(const GemvProduct& product, int64_t block, int64_t apart) {
  const auto* x = reinterpret_cast<const uint32_t*>(product.x);
  const uint8_t* w[S];
  for (int s = 0; s < S; ++s)
    w[s] = product.weights + static_cast<size_t>(block + s * apart) * product.layout.block_bytes;
  Vec sums[S][M];
#pragma GCC unroll 4
  for (int s = 0; s < S; ++s)
#pragma GCC unroll 16
    for (int t = 0; t < M; ++t) sums[s][t] = broadcast(0.0f);
  for (int64_t k = 0; k < product.layout.padded_cols; k += kActivationGroup, x += M * kPairs) {
#pragma GCC unroll 4
    for (int j = 0; j < kPairs; ++j) {
      IVec columns[S];
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) {
        ask_for<S>(w[s]);
        columns[s] = load_ints(w[s]);
        w[s] += kLine;
      }
#pragma GCC unroll 16
      for (int t = 0; t < M; ++t) {
        const IVec pair = quad_at(x + t * kPairs + j);
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) sums[s][t] = dot_bf16(sums[s][t], pair, columns[s]);
      }
    }
  }
  for (int s = 0; s < S; ++s)
    for (int t = 0; t < M; ++t) write(product.out, (block + s * apart) * kRows, product.rows, t, Floats{{sums[s][t]}});
}

using Blocks = void (*)(const GemvProduct&, int64_t block, int64_t apart);
template <int S, int M>
Blocks blocks_for(int tokens) {
  if constexpr (M > 1)
    if (tokens < M) return blocks_for<S, M - 1>(tokens);
  return multiply_blocks<M, S>;
}

// The blocks from `begin` on times one token: see run_streams().
template <int S>
void multiply_streams(const GemvProduct& product, int64_t begin) {
  const int64_t each = (product.end - begin) / S;
  for (int64_t block = begin; block < begin + each; ++block) multiply_blocks<1, S>(product, block, each);
  if constexpr (S > 1) multiply_streams<S / 2>(product, begin + each * S);
}

void multiply(const GemvProduct& product) {
  if (product.tokens == 1) return multiply_streams<kStreams>(product, product.begin);
  int64_t block = product.begin;
  if (product.tokens <= kMostOfTwo) {
    const Blocks two = blocks_for<2, kMostOfTwo>(product.tokens);
    for (; block + 1 < product.end; block += 2) two(product, block, 1);
  }
  const Blocks one = blocks_for<1, kGemvTokens>(product.tokens);
  for (; block < product.end; ++block) one(product, block, 1);
}

constexpr PairGemvKernels kKernels{{prepare, multiply}};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::PairGemvKernels, anyaccel::llm::kKernels)
