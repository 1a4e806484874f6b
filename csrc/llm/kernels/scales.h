// SPDX-License-Identifier: Apache-2.0
// The scales and minima of quantised blocks (llm/pack/grouped.h), for kernel files.
#pragma once

#include "llm/pack/grouped.h"
#include "simd/simd.h"

namespace anyaccel::llm {
namespace {

// Of kLanes rows from `row` on, for the group of a column: value = scale * q + minimum, with zero for formats without
// minima.
struct RowScales {
  simd::ANYACCEL_ISA_VARIANT::Vec scale, minimum;
};
inline RowScales row_scales(const BlockLayout& layout, const uint8_t* block, int64_t column, int row) {
  using namespace simd::ANYACCEL_ISA_VARIANT;
  constexpr int kAll = static_cast<int>(kBlockRows);
  const uint8_t* scales = block + layout.scales_at(column);
  const Vec none = broadcast(0.0f);
  if (layout.group == 0) return {load(reinterpret_cast<const float*>(scales) + row), none};
  if (layout.scales == ScaleKind::powers) return {load_power(scales + row), none};
  if (layout.scales == ScaleKind::superblocks) {
    const uint8_t* factors = block + layout.factors_at(column) + 2 * row;
    return {mul(load_i8(scales + row), load_f16(factors)),
            layout.minimum ? mul(load_i8(scales + kAll + row), load_f16(factors + 2 * kAll)) : none};
  }
  return {load_f16(scales + 2 * row), layout.minimum ? load_f16(scales + 2 * (kAll + row)) : none};
}

}  // namespace
}  // namespace anyaccel::llm
