// SPDX-License-Identifier: Apache-2.0
// Matrices of every format, for the native tests.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "llm/pack/matrix.h"

namespace {

using namespace anyaccel::llm;

// Whether floats are rounded to it; others are only what a checkpoint has already.
inline bool rounds(Format format) { return !is_quantised(format) || format == Format::i8 || format == Format::i4; }

// A matrix with superblocks, of bits that depend on `values`.
inline Matrix superblocks_of(const Shape& shape, const std::vector<float>& values) {
  struct Kind {
    Format format;
    SourceType type;
    std::vector<size_t> halves;  // where a block has them
  };
  const Kind kinds[] = {{Format::i2, SourceType::q2_k, {80, 82}}, {Format::i3, SourceType::q3_k, {108}},
                        {Format::i4, SourceType::q4_k, {0, 2}},   {Format::i5, SourceType::q5_k, {0, 2}},
                        {Format::i6, SourceType::q6_k, {208}},    {Format::nl4, SourceType::iq4_xs, {0}}};
  const Kind* kind = kinds;
  while (kind->format != shape.format) ++kind;
  const size_t row_bytes = source_row_bytes(kind->type, shape.cols);
  const size_t blocks = static_cast<size_t>(shape.cols / kSuperblock), block_bytes = row_bytes / blocks;
  std::vector<uint8_t> rows(row_bytes * static_cast<size_t>(shape.rows));
  for (size_t i = 0; i < rows.size(); ++i)
    rows[i] = static_cast<uint8_t>(std::bit_cast<uint32_t>(values[i % values.size()]) * 2654435761u >> (i % 7 + 9));
  for (size_t at = 0; at < rows.size(); at += block_bytes)
    for (const size_t half : kind->halves)
      rows[at + half + 1] = static_cast<uint8_t>(0x1c | (rows[at + half + 1] & 0x81));
  Matrix matrix(shape);
  matrix.set_rows(0, shape.rows, {rows.data(), kind->type, static_cast<int64_t>(row_bytes), 0});
  return matrix;
}

// A matrix of `values`, or of whatever values its format has if nothing is rounded to that.
inline Matrix matrix_of(const Shape& shape, const std::vector<float>& values) {
  if (shape.scales == ScaleKind::superblocks) return superblocks_of(shape, values);
  Matrix matrix(shape);
  if (rounds(shape.format)) {
    matrix.set_rows(0, shape.rows, {values.data(), SourceType::f32, shape.cols * 4, 0});
    return matrix;
  }
  const int64_t groups = (shape.cols + shape.group - 1) / shape.group;
  std::vector<uint8_t> q(values.size());
  std::vector<float> scales(static_cast<size_t>(shape.rows * groups), 0.0f), minima(scales.size(), 0.0f);
  const int bits = row_of(shape.format).bits;
  for (int64_t r = 0; r < shape.rows; ++r)
    for (int64_t k = 0; k < shape.cols; ++k) {
      const auto at = static_cast<size_t>(r * shape.cols + k), g = static_cast<size_t>(r * groups + k / shape.group);
      const bool finite = std::isfinite(values[at]);
      const auto number = static_cast<uint32_t>(finite ? static_cast<int32_t>(values[at] * 1e4f) : 0);
      q[at] = static_cast<uint8_t>(number * 40503u >> 7 & ((1u << bits) - 1));
      // Nor is a value near the middle, from which the kernels of bytes subtract.
      const int middle = 1 << (bits - 1);
      if (!shape.minimum && bits >= 5 && bits < 8 && std::abs(q[at] - middle) < 4)
        q[at] = static_cast<uint8_t>(q[at] ^ 8);
      // Nor the code whose value is 1, of which kernels that add 128 to make it a byte without a sign keep few bits.
      if (row_of(shape.format).codes == kNonlinearCodes && q[at] == 8) q[at] = 9;
      if (std::fabs(scales[g]) <= std::fabs(values[at]) || !finite) scales[g] = values[at];
    }
  const float part = row_of(shape.format).codes == kNonlinearCodes ? 0x1p-7f : 0x1p-3f;
  for (size_t g = 0; g < scales.size(); ++g) {
    scales[g] *= part;
    if (shape.scales == ScaleKind::powers)  // none is larger than its values' size, and none is lost
      scales[g] =
          scales[g] == 0 || !std::isfinite(scales[g]) ? 0 : std::exp2(std::floor(std::log2(std::fabs(scales[g]))));
    minima[g] = scales[g] * -2.5f;  // no value is what cancellation leaves
  }
  matrix.set_quantised_rows(0, shape.rows, q.data(), scales.data(), shape.minimum ? minima.data() : nullptr);
  return matrix;
}

}  // namespace
