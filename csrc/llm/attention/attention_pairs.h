// SPDX-License-Identifier: Apache-2.0
// Keys, values, queries and weights as pairs of bfloat16, which one instruction multiplies, for the kernel files.
#pragma once

#include "llm/attention/attention_rows.h"
#include "simd/simd.h"

namespace anyaccel::llm {
namespace {

using namespace simd::ANYACCEL_ISA_VARIANT;

struct Pairs {
  static constexpr size_t kColumnBytes = 4, kPairBytes = 64;
  static IVec columns(const uint8_t* p) { return load_ints(p); }
  static IVec first(const uint8_t* p) { return _mm512_and_si512(load_ints(p), broadcast(int32_t{0xffff})); }
  static void store_row(uint16_t* p, Vec v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_pairs(v)); }
  static IVec row(const float* p) { return quad_at(p); }
  static Vec dot(Vec sums, IVec row, IVec columns) { return dot_bf16(sums, row, columns); }
};
template <>
constexpr bool kPaired<Pairs> = true;

}  // namespace
}  // namespace anyaccel::llm
