// SPDX-License-Identifier: Apache-2.0
// Units of quantised blocks (llm/pack/grouped.h) as bytes, as gemm wants them.
#pragma once

#include <cstdint>

#include "llm/pack/bit_planes.h"
#include "simd/simd.h"

namespace anyaccel::llm {
namespace {

// Columns 4 kQuad to 4 kQuad + 7 of planes of kLow and kHigh bits.
template <int kLow, int kHigh, int kQuad, class Then>
inline void expand_quads(const uint8_t* unit, uint8_t* lines, const Then& then) {
  using namespace simd::ANYACCEL_ISA_VARIANT;
  constexpr int kVecBytes = 4 * kLanes;
  for (int b = 0; b < kPlaneLine; b += kVecBytes) {
    constexpr int kFields = 8 / kLow;
    Nibbles both = load_bits<kLow, kQuad % kFields * kLow>(unit + kQuad / kFields * kPlaneLine + b);
    if constexpr (kHigh > 0) {
      constexpr int kHighFields = 8 / kHigh;
      const uint8_t* high = unit + (kLow + kQuad / kHighFields) * kPlaneLine + b;
      both = join<kLow>(both, load_bits<kHigh, kQuad % kHighFields * kHigh>(high));
    }
    both = then(both);
    store(static_cast<void*>(lines + kQuad * kPlaneLine + b), both.low);
    store(static_cast<void*>(lines + (kQuad + 1) * kPlaneLine + b), both.high);
  }
}

template <int kLow, int kHigh, class Then>
inline void expand_planes(const uint8_t* unit, uint8_t* lines, const Then& then) {
  expand_quads<kLow, kHigh, 0>(unit, lines, then);
  expand_quads<kLow, kHigh, 2>(unit, lines, then);
  expand_quads<kLow, kHigh, 4>(unit, lines, then);
  expand_quads<kLow, kHigh, 6>(unit, lines, then);
}

// A unit of planes as 8 lines [16 rows][4 columns] of bytes, of what `then` makes of its values, 8 columns at a time.
template <class Then>
inline void expand_unit(const FormatRow& format, const uint8_t* unit, uint8_t* lines, const Then& then) {
  switch (10 * format.low + format.bits - format.low) {
    case 40:
      return expand_planes<4, 0>(unit, lines, then);
    case 41:
      return expand_planes<4, 1>(unit, lines, then);
    case 42:
      return expand_planes<4, 2>(unit, lines, then);
    case 21:
      return expand_planes<2, 1>(unit, lines, then);
    default:
      return expand_planes<2, 0>(unit, lines, then);
  }
}

}  // namespace
}  // namespace anyaccel::llm
