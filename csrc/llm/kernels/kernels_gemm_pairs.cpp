// SPDX-License-Identifier: Apache-2.0
// ISA: avx512_bf16
// Matrix products (gemm) of pairs of bfloat16.
#include "llm/kernels/gemm_avx512.h"
#include "llm/kernels/gemm_tile.h"

namespace anyaccel::llm {
namespace {

struct Pairs {
  using Operand = IVec;
  static constexpr int kTokens = 14, kBlocks = 2, kColumns = 2;
  static constexpr int64_t kAhead = kCacheAhead;
  static Operand operand(const uint8_t* p) { return load_ints(p); }
  static Operand broadcast_operand(const uint8_t* p) { return quad_at(p); }
  static Vec fma(Operand a, Operand b, Vec c) { return dot_bf16(c, a, b); }
  static IVec lanes(const float* p, int64_t count) { return pairs_of(p, count); }
};

constexpr PairGemmKernels kKernels{
    kernels_of<Pairs>(GemmKernels::Operands::pairs, 64, size_t{256} << 10, unpack_pairs)};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::PairGemmKernels, anyaccel::llm::kKernels)
