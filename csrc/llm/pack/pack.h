// SPDX-License-Identifier: Apache-2.0
// What the time goes to when weights are packed. Compiled once per instruction set; all give the same bits, since
// packed models are kept in files.
#pragma once

#include <cstdint>

#include "llm/pack/grouped.h"
#include "llm/pack/matrix.h"

namespace anyaccel::llm {

struct PackKernels {
  // One group of columns of 16 rows to 4 bits.
  // x[count][16]: `count` columns (1 to 128) of 16 rows. Writes q in 0..15 as lines[columns of 8][16] words, as a block
  // has them (grouped.h), with zeros for columns that do not exist; and for each row the scale and minimum that value =
  // scale * q + minimum is meant with, rounded to halves (bits). For symmetric values (value = scale * (q - 8))
  // `minima` is null. The scale is the one with the least squared error that a search over candidates finds. A row with
  // a value that is not finite gets the scale NaN.
  void (*quantise4)(const float* x, int count, uint32_t* lines, uint16_t* scales, uint16_t* minima);
  // Of one row of dense f32, f16 or bf16 values: the largest magnitude of `count`, NaN when one is not finite;
  float (*largest)(SourceType type, const uint8_t* x, int64_t count);
  // 32 of them as bfloat16; and 64 as the nearest integers to x * inverse, limited to -127 .. 127.
  void (*as_bf16)(SourceType type, const uint8_t* x, uint16_t* to);
  void (*as_i8)(SourceType type, const uint8_t* x, float inverse, int8_t* to);
  // ggml's blocks and superblocks of up to 16 rows into a block of a format that holds their values, kept bit by bit:
  // superblocks have one, and Matrix::set_rows() says which others there are. Rows that are null keep what is there.
  void (*keep)(const BlockLayout& layout, SourceType type, const uint8_t* const (&rows)[kBlockRows], int64_t cols,
               uint8_t* block);
};

}  // namespace anyaccel::llm
