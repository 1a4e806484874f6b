// SPDX-License-Identifier: Apache-2.0
// Columns of bfloat16 weights for loops whose registers are all taken, by sums, weights and an activation. For vectors
// of 8 lanes, of which there are 16.
#pragma once

#include <cstdint>

#include "simd/simd.h"

namespace anyaccel::llm {
namespace {

// Column 0 or 1 of the two whose pairs are at `p`, as even_bf16() and odd_bf16() read them. The second one does not
// wait in a register for the first one to be multiplied: it is read again, and so is its mask.
template <int kColumn>
inline simd::ANYACCEL_ISA_VARIANT::Vec column_of_pairs(const uint8_t* p) {
  if constexpr (kColumn == 0) {
    return simd::ANYACCEL_ISA_VARIANT::even_bf16(p);
  } else {
    alignas(32) static constexpr uint32_t kMask[8] = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                      0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
    simd::ANYACCEL_ISA_VARIANT::Vec odd;
    __asm__("vmovaps %1, %0\n\tvandps %2, %0, %0"
            : "=&x"(odd)
            : "m"(kMask), "m"(*reinterpret_cast<const uint8_t (*)[32]>(p)));
    return odd;
  }
}

}  // namespace
}  // namespace anyaccel::llm
