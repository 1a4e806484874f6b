// SPDX-License-Identifier: Apache-2.0
#include "llm/pack/quantise.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "common/chunks.h"
#include "llm/pack/grouped.h"
#include "simd/convert.h"

namespace anyaccel::llm {
namespace {

using namespace simd;

constexpr int64_t kChunkRows = 4 * kBlockRows;

struct Arrays {
  uint8_t* q;
  float* scales;
  float* minima;
};

float half_at(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return from_f16(bits);
}

// Row r of a packed block as plain arrays; the layout is described in grouped.h.
void unpack_row(const BlockLayout& layout, const uint8_t* block, int r, int64_t cols, const Arrays& to) {
  for (int64_t k = 0; k < cols; ++k) {
    const uint8_t* unit = block + layout.unit_at(k);
    const int64_t column = k % kUnitColumns;
    if (layout.format == Format::i8) {
      to.q[k] = unit[(column / 4 * kBlockRows + r) * 4 + k % 4];
    } else {
      const uint8_t byte = unit[(column / 8 * kBlockRows + r) * 4 + k % 4];
      to.q[k] = k % 8 >= 4 ? byte >> 4 : byte & 15;
    }
  }
  if (layout.group == 0) {
    std::memcpy(to.scales, block + layout.scales_at(0) + r * 4, sizeof(float));
    return;
  }
  for (int64_t g = 0; g * layout.group < cols; ++g) {
    const uint8_t* scales = block + layout.scales_at(g * layout.group);
    to.scales[g] = half_at(scales + r * 2);
    if (layout.minimum) to.minima[g] = half_at(scales + (kBlockRows + r) * 2);
  }
}

QuantiseError quantise_chunk(const Shape& shape, const Source& source, const Arrays& to, int64_t groups) {
  Matrix packed(shape), exact(Shape{Format::f32, shape.rows, shape.cols});
  packed.set_rows(0, shape.rows, source);
  exact.set_rows(0, shape.rows, source);
  const BlockLayout layout = layout_of(shape);
  std::vector<float> wanted(static_cast<size_t>(shape.cols)), got(static_cast<size_t>(shape.cols));
  QuantiseError error;
  for (int64_t row = 0; row < shape.rows; ++row) {
    unpack_row(
        layout, packed.block(row / kBlockRows), static_cast<int>(row % kBlockRows), shape.cols,
        {to.q + row * shape.cols, to.scales + row * groups, to.minima == nullptr ? nullptr : to.minima + row * groups});
    exact.row(row, wanted.data());
    packed.row(row, got.data());
    for (int64_t k = 0; k < shape.cols; ++k) {
      const double value = wanted[static_cast<size_t>(k)], difference = value - got[static_cast<size_t>(k)];
      error.squared_error += difference * difference;
      error.squared_sum += value * value;
    }
  }
  return error;
}

}  // namespace

QuantiseError quantise_rows(const Shape& shape, const Source& source, uint8_t* q, float* scales, float* minima,
                            int threads) {
  check(shape);
  if (shape.format != Format::i8 && shape.format != Format::i4)
    throw std::invalid_argument("quantise: the format is not a quantised one");
  if (source.data == nullptr || q == nullptr || scales == nullptr || (shape.minimum && minima == nullptr))
    throw std::invalid_argument("quantise: an array is missing");
  const int64_t groups = shape.group == 0 ? 1 : (shape.cols + shape.group - 1) / shape.group;
  const int64_t chunks = (shape.rows + kChunkRows - 1) / kChunkRows;
  std::vector<QuantiseError> errors(static_cast<size_t>(chunks));  // added in order: the same for any threads
  for_each_chunk(errors.size(), threads, [&](size_t chunk) {
    const int64_t first = static_cast<int64_t>(chunk) * kChunkRows;
    Shape part = shape;
    part.rows = std::min(kChunkRows, shape.rows - first);
    Source rows = source;
    rows.data = static_cast<const uint8_t*>(source.data) + first * source.row_stride;
    errors[chunk] = quantise_chunk(
        part, rows,
        {q + first * shape.cols, scales + first * groups, shape.minimum ? minima + first * groups : nullptr}, groups);
  });
  QuantiseError total;
  for (const QuantiseError& error : errors) {
    total.squared_error += error.squared_error;
    total.squared_sum += error.squared_sum;
  }
  return total;
}

}  // namespace anyaccel::llm
