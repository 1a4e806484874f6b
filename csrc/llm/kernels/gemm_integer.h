// SPDX-License-Identifier: Apache-2.0
// What the kernel files of gemm share that multiply bytes: activations rounded to 8 bits, scales of weights.
#pragma once

#include <cstdint>
#include <cstring>

#include "llm/kernels/gemm_kernels.h"
#include "llm/kernels/scales.h"
#include "simd/pick.h"
#include "simd/simd.h"

namespace anyaccel::llm {
namespace {

using namespace simd::ANYACCEL_ISA_VARIANT;

constexpr int kRows = 16;  // of a block
// To int8 weights, for instructions that take unsigned ones.
constexpr int kAdded = kShift8 ? 128 : 0;

struct QuantisedUnit {
  float scale, sum;  // the latter is scale * the sum of q
};
// The unit of activations at `from`, of which `left` columns exist, as 8 bits; zeros for the rest of it.
inline QuantisedUnit quantise_unit(const float* from, int64_t left, int8_t* q) {
  float padded[kUnit] = {};
  if (left < kUnit) {
    for (int64_t i = 0; i < left; ++i) padded[i] = from[i];
    from = padded;
  }
  // Compared as integers, the bits of a NaN or an infinity are the largest, so the scale becomes NaN.
  const uint32_t bits = magnitude_bits(from);
  const float largest = simd::float_of(bits);
  const bool finite = bits < 0x7f800000u;
  // Below that size the inverse of the scale is not finite, and zero is near enough.
  const bool some = finite && largest > 1e-30f;
  const float scale = finite ? (some ? largest / 127.0f : 0.0f) : __builtin_nanf("");
  int32_t quantised = 0;
  if (some)
    quantised = quantise32(from, 127.0f / largest, q);
  else
    std::memset(q, 0, kUnit);
  return {scale, scale * static_cast<float>(quantised)};
}

// value = scale * q + minimum, of q as they are multiplied here.
inline void write_scales(const BlockLayout& layout, const uint8_t* block, int64_t column, uint8_t* to) {
  const FormatRow& format = row_of(layout.format);
  const bool bytes = layout.format == Format::i8 || format.codes != nullptr;
  const Vec zero = broadcast(bytes            ? static_cast<float>(-kAdded)
                             : layout.minimum ? 0.0f
                                              : -static_cast<float>(1 << (format.bits - 1)));
  auto* out = reinterpret_cast<float*>(to);
  for (int r = 0; r < kRows; r += kLanes) {
    const RowScales of = row_scales(layout, block, column, r);
    store(out + r, of.scale);
    store(out + kRows + r, fma(of.scale, zero, of.minimum));
  }
}

}  // namespace
}  // namespace anyaccel::llm
