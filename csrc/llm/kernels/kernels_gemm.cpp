// SPDX-License-Identifier: Apache-2.0
// Matrix products (gemm) in float.
#include "llm/kernels/gemm_tile.h"
#if ANYACCEL_LANES == 16
#include "llm/kernels/gemm_avx512.h"
#elif ANYACCEL_LANES == 8
#include "llm/kernels/bf16_columns.h"
#endif

namespace anyaccel::llm {
namespace {

struct Float {
  using Operand = Vec;
  // What registers hold: of 32, 28 sums, 2 weights and an activation, 28 multiplications for 16 loads; of 16, 12 sums.
  // Of 32 with 4 lanes, 24 sums and 4 weights.
  static constexpr int kTokens = kLanes == 16 ? 14 : kLanes == 8 || ANYACCEL_REGISTERS == 32 ? 6 : kLanes == 4 ? 3 : 1;
  static constexpr int kBlocks = kLanes == 16 ? 2 : 1, kColumns = 1;
  static constexpr int64_t kAhead = kCacheAhead;
  static Operand operand(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
  static Operand broadcast_operand(const uint8_t* p) { return broadcast(*reinterpret_cast<const float*>(p)); }
  static Vec fma(Operand a, Operand b, Vec c) { return simd::ANYACCEL_ISA_VARIANT::fma(a, b, c); }
#if ANYACCEL_LANES == 16
  static IVec lanes(const float* p, int64_t count) { return _mm512_castps_si512(load_first(p, count)); }
#endif
};

#if ANYACCEL_LANES == 8
// Lines of bfloat16 as they are, of which each has two columns: making floats of them here is free beside the
// multiplications of six tokens, and their way through the caches is half as long. They come from memory.
struct Bf16Lines : Float {
  static constexpr int64_t kAhead = 32;
  template <int kStep>
  static Vec operand(const uint8_t* p) {
    return column_of_pairs<kStep>(p);
  }
};
template <>
constexpr int kLineSteps<Bf16Lines> = 2;
constexpr auto multiply_bf16 = multiply<Bf16Lines>;
#else
constexpr decltype(GemmKernels::multiply) multiply_bf16 = nullptr;
#endif

#if ANYACCEL_LANES == 16
constexpr int64_t kUnits = 16;                // 28 KiB of activations
constexpr size_t kCache = size_t{512} << 10;  // of an L2 cache of at least 1 MiB

void unpack_quantised(const BlockLayout& layout, const uint8_t* block, int64_t unit, int64_t units, uint8_t* to) {
  for (int64_t u = unit; u < unit + units; ++u, to += kUnit * kLineBytes)
    for_columns(layout, block, u, [&](int column, const Vec(&values)[4]) {
      for (int i = 0; i < 4; ++i) store(reinterpret_cast<float*>(to + (column + i) * kLineBytes), values[i]);
    });
}
#else
constexpr int64_t kUnits = 12;
constexpr size_t kCache = size_t{160} << 10;  // of an L2 cache of at least 256 KiB
constexpr decltype(GemmKernels::unpack) unpack_quantised = nullptr;
#endif

constexpr GemmKernels kKernels =
    kernels_of<Float>(GemmKernels::Operands::floats, kUnits, kCache, unpack_quantised, multiply_bf16);

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::GemmKernels, anyaccel::llm::kKernels)
