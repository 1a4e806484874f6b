// SPDX-License-Identifier: Apache-2.0
// Where the values, scales and minima of a block of 16 rows lie. Includes nothing but the formats: kernel files use it.
//
//   f32   [k][16] float            f16   [k][16] half            bf16  [k/2][16][2]
//   i8    [k/4][16][4] int8; then 16 float scales (group 0), or for each group of 16 or 32 columns 16 half scales, with
//         a minimum followed by 16 half minima
//   others   [k/32] units of planes (bit_planes.h): i4, nl4 and fp4 one of 4 bits, i6 of 4 and 2, i5 of 4 and 1, i3 of
//   2
//         and 1, i2 of 2; then for each group 16 half scales, with a minimum followed by 16 half minima
// Values come first and are followed by their scales, so that values are read in whole aligned cache lines. A half is
// what quantised checkpoints have for scales; each part is padded to a multiple of 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "llm/matrix.h"

namespace anyaccel::llm {

// Plain data, made of a Shape once a call.
struct BlockLayout {
  Format format;
  bool minimum;
  int group;  // columns that share a scale; 0: a scale a row
  int64_t cols, padded_cols;
  size_t scales_offset;  // from the start of a block; quantised formats only
  size_t scale_stride;   // bytes from one group's scales to the next one's
  size_t block_bytes;
};
BlockLayout layout_of(const Shape& shape);

}  // namespace anyaccel::llm
