// SPDX-License-Identifier: Apache-2.0
// Where the values, scales and minima of a block of 16 rows lie. Includes nothing but the formats: kernel files use it.
//
//   f32   [k][16] float            f16   [k][16] half            bf16  [k/2][16][2]
//   i8    16 float scales, then all values (group 0); or sections, with units [8][16][4] int8
//   others   sections, with units of planes (bit_planes.h): i4, nl4 and fp4 one of 4 bits, i6 of 4 and 2, i5 of 4 and
//            1, i3 of 2 and 1, i2 of 2
//
// A section is as many columns as have scales that fill whole cache lines, 32 at least: for each of its groups 16 half
// scales, with a minimum followed by 16 half minima, then its units of 32 columns. So a block is read from end to end,
// as one stream: with all scales behind all values it was two streams, with gaps, which the prefetchers of processors
// follow badly. A half is what quantised checkpoints have for scales.
//
// With superblocks a section is 256 columns with minima, and 512 without: a line with 16 halves that scales are times,
// and 16 of minima, or of the next superblock; then 16 bytes with a sign for the scales of each group, and 16 for its
// minima; then the units.
//
// With powers the scale of a row is a byte, the exponent of a float: 2^(byte - 127), or zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "llm/pack/matrix.h"

namespace anyaccel::llm {

constexpr int kUnitColumns = 32;
constexpr size_t kFactorBytes = 64;  // before a section's scales, with superblocks

// Plain data, made of a Shape once a call.
struct BlockLayout {
  Format format;
  bool minimum;
  ScaleKind scales;
  int group;  // columns that share a scale; 0: a scale a row
  int64_t cols, padded_cols;
  size_t unit_bytes;      // values of 32 columns
  int section_shift;      // a section has 2^section_shift columns; so many that there is one, without groups
  size_t section_scales;  // bytes of scales before a section's values
  size_t section_bytes;   // from one section to the next
  size_t scale_stride;    // from one group's scales to the next one's
  size_t block_bytes;

  int64_t in_section(int64_t column) const { return column & ((int64_t{1} << section_shift) - 1); }
  // From the start of a block: the unit that has a column, and the scales of the column's group.
  size_t unit_at(int64_t column) const {
    return section_at(column) + section_scales + static_cast<size_t>(in_section(column) / kUnitColumns) * unit_bytes;
  }
  size_t scales_at(int64_t column) const {
    const size_t first = scales == ScaleKind::superblocks ? kFactorBytes : 0;
    return group == 0 ? 0 : section_at(column) + first + static_cast<size_t>(in_section(column) / group) * scale_stride;
  }
  // With superblocks: the 16 halves of the superblock that a column is in. Those of minima follow.
  size_t factors_at(int64_t column) const {
    return section_at(column) + static_cast<size_t>(in_section(column) / kSuperblock) * kFactorBytes / 2;
  }

 private:
  size_t section_at(int64_t column) const { return static_cast<size_t>(column >> section_shift) * section_bytes; }
};
BlockLayout layout_of(const Shape& shape);

// Column k of row r: of i8, from the start of a unit (without groups: of the values).
inline size_t i8_at(int64_t k, int r) { return static_cast<size_t>((k / 4 * kBlockRows + r) * 4 + k % 4); }
// The half scale and half minimum of a group's row r.
inline uint8_t* scale_at(const BlockLayout& layout, uint8_t* block, int64_t group, int r) {
  return block + layout.scales_at(group * layout.group) + static_cast<size_t>(r) * 2;
}
inline uint8_t* minimum_at(const BlockLayout& layout, uint8_t* block, int64_t group, int r) {
  return scale_at(layout, block, group, r) + kBlockRows * 2;
}
template <class T>
inline void put(uint8_t* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

}  // namespace anyaccel::llm
