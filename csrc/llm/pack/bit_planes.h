// SPDX-License-Identifier: Apache-2.0
// Values of fewer than 8 bits in a unit of 32 columns and 16 rows (grouped.h): a plane with their low bits, then one
// with the others. A plane of b bits has b lines of 64 bytes; byte 4 r + i of line l has of row r the columns c with c
// % 4 = i and c / 4 = (8 / b) l, (8 / b) l + 1, ..., the first of them in its lowest bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "llm/pack/grouped.h"

namespace anyaccel::llm {
namespace {

constexpr int kPlaneLine = 64;

struct PlaneBits {
  size_t byte;  // from the plane's start
  int shift, mask;
};
[[maybe_unused]] inline PlaneBits plane_bits(int bits, int column, int row) {
  const int fields = 8 / bits, quad = column / 4;
  return {static_cast<size_t>(quad / fields * kPlaneLine + row * 4 + column % 4), quad % fields * bits,
          (1 << bits) - 1};
}

// Value k of row r of a block, 0 to 2^bits - 1.
[[maybe_unused]] inline int get_bits(const BlockLayout& layout, const uint8_t* block, int64_t k, int r) {
  const FormatRow& format = row_of(layout.format);
  const uint8_t* unit = block + layout.unit_at(k);
  const auto column = static_cast<int>(k % kUnitColumns);
  const PlaneBits low = plane_bits(format.low, column, r);
  int value = unit[low.byte] >> low.shift & low.mask;
  if (format.bits > format.low) {
    const PlaneBits high = plane_bits(format.bits - format.low, column, r);
    value |= (unit[format.low * kPlaneLine + static_cast<int>(high.byte)] >> high.shift & high.mask) << format.low;
  }
  return value;
}

// Bits from_bit, from_bit + 1, ... of the values of 32 columns into row r of a plane: four columns, which lie side by
// side, at a time.
template <int kBits>
inline void put_plane(uint8_t* plane, int r, const uint32_t* quads, int from_bit) {
  constexpr int kFields = 8 / kBits;
  constexpr uint32_t kMask = 0x01010101u * ((1u << kBits) - 1);
  for (int line = 0; line < kBits; ++line) {
    uint32_t word = 0;
    for (int f = 0; f < kFields; ++f) word |= (quads[line * kFields + f] >> from_bit & kMask) << (f * kBits);
    std::memcpy(plane + line * kPlaneLine + r * 4, &word, sizeof word);
  }
}

// The values of row r, of 32 columns, into a unit.
[[maybe_unused]] inline void put_row(const FormatRow& format, uint8_t* unit, int r, const uint8_t* values) {
  uint32_t quads[kUnitColumns / 4];
  std::memcpy(quads, values, sizeof quads);
  const auto put = [&](uint8_t* plane, int bits, int from_bit) {
    if (bits == 4) put_plane<4>(plane, r, quads, from_bit);
    if (bits == 2) put_plane<2>(plane, r, quads, from_bit);
    if (bits == 1) put_plane<1>(plane, r, quads, from_bit);
  };
  put(unit, format.low, 0);
  if (format.bits > format.low) put(unit + format.low * kPlaneLine, format.bits - format.low, format.low);
}

// A unit as 8 lines [16 rows][4 columns] of bytes, as those of i8: what codes stand for, or values with `plus` added.
[[maybe_unused]] inline void expand_unit(const FormatRow& format, const uint8_t* unit, int plus, uint8_t* lines) {
  const int high_bits = format.bits - format.low;
  for (int quad = 0; quad < kUnitColumns / 4; ++quad, lines += kPlaneLine) {
    const PlaneBits low = plane_bits(format.low, 4 * quad, 0);
    const uint8_t* from = unit + low.byte;
    if (format.codes != nullptr) {
      for (int b = 0; b < kPlaneLine; ++b)
        lines[b] = static_cast<uint8_t>(format.codes[from[b] >> low.shift & low.mask] + plus);
    } else if (high_bits == 0) {
      for (int b = 0; b < kPlaneLine; ++b) lines[b] = static_cast<uint8_t>((from[b] >> low.shift & low.mask) + plus);
    } else {
      const PlaneBits high = plane_bits(high_bits, 4 * quad, 0);
      const uint8_t* above = unit + format.low * kPlaneLine + high.byte;
      for (int b = 0; b < kPlaneLine; ++b)
        lines[b] = static_cast<uint8_t>(
            ((from[b] >> low.shift & low.mask) | (above[b] >> high.shift & high.mask) << format.low) + plus);
    }
  }
}

}  // namespace
}  // namespace anyaccel::llm
