// SPDX-License-Identifier: Apache-2.0
// ISA: avx512_bf16
// Attention to keys and values in bfloat16 at twice the rate of floats.
#include "llm/attention/attention_pairs.h"
#include "llm/attention/kernels_attention.h"
#include "simd/pick.h"

namespace anyaccel::llm {
namespace {

constexpr PairAttentionKernels kKernels{attend_rows<Pairs>};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::PairAttentionKernels, anyaccel::llm::kKernels)
