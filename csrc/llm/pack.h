// SPDX-License-Identifier: Apache-2.0
// Quantisation of weights to 4 bits: one group of columns of 16 rows at a time. Compiled once per instruction set; all
// give the same bits, since packed models are kept in files.
#pragma once

#include <cstdint>

namespace anyaccel::llm {

struct PackKernels {
  // x[count][16]: `count` columns (1 to 128) of 16 rows. Writes q[count][16] in 0..15, and for each row the scale and
  // minimum that value = scale * q + minimum is meant with, rounded to halves (bits). For symmetric values
  // (value = scale * (q - 8)) `minima` is null.
  // The scale is the one with the least squared error that a search over candidates finds.
  // A row with a value that is not finite gets the scale NaN.
  void (*quantise4)(const float* x, int count, uint8_t* q, uint16_t* scales, uint16_t* minima);
};

}  // namespace anyaccel::llm
