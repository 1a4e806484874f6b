// SPDX-License-Identifier: Apache-2.0
// Quantised weights as plain arrays, for files: the same values that packing makes.
#pragma once

#include <cstdint>

#include "llm/pack/matrix.h"

namespace anyaccel::llm {

struct QuantiseError {
  double squared_error = 0.0;
  double squared_sum = 0.0;  // of the source's values; not finite when one of them is not
};

// Quantises shape.rows rows of shape.cols values in shape's format (i8 or i4). Writes q[rows][cols] (int8, or 0..15),
// scales[rows][groups] and, for a shape with minimum, minima[rows][groups]; groups is 1 for one scale a row.
// `threads`: 0 for as many as this process may use CPUs. Throws std::invalid_argument, std::bad_alloc.
QuantiseError quantise_rows(const Shape& shape, const Source& source, uint8_t* q, float* scales, float* minima,
                            int threads = 0);

}  // namespace anyaccel::llm
