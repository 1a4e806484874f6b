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
  float scale;
  int32_t sum;  // of q
  float scaled_sum() const { return scale * static_cast<float>(sum); }
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
  return {scale, quantised};
}

// Writes 16 scales, then 16 minima: value = scale * q + minimum, of q as they are multiplied here. Without minima the
// latter are numbers to add to q: value = scale * (q + number).
inline void write_scales(const BlockLayout& layout, const uint8_t* block, int64_t column, uint8_t* to) {
  const FormatRow& format = row_of(layout.format);
  const bool bytes = layout.format == Format::i8 || format.codes != nullptr;
  const int32_t added = bytes ? -kAdded : layout.minimum ? 0 : -(1 << (format.bits - 1));
  for (int r = 0; r < kRows; r += kLanes) {
    const RowScales of = row_scales(layout, block, column, r);
    store(reinterpret_cast<float*>(to) + r, of.scale);
    uint8_t* second = to + (kRows + r) * 4;
    if (layout.minimum)
      store(reinterpret_cast<float*>(second), fma(of.scale, broadcast(static_cast<float>(added)), of.minimum));
    else
      store(static_cast<void*>(second), broadcast(added));
  }
}

}  // namespace
}  // namespace anyaccel::llm
