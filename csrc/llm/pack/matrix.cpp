// SPDX-License-Identifier: Apache-2.0
#include "llm/pack/matrix.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#include "common/huge_pages.h"
#include "llm/pack/grouped.h"

namespace anyaccel::llm {
namespace {

constexpr size_t kLine = 64;

size_t padded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Columns are padded to what kernels read at once: 32 of the float formats and of a group (an AMX tile of bfloat16
// has 32), 64 of int8 with a scale a row (an AMX tile has 64).
int64_t column_multiple(const Shape& shape) {
  if (shape.scales == ScaleKind::superblocks) return kSuperblock;
  if (shape.format == Format::i4) return shape.group;
  return shape.format == Format::i8 && shape.group == 0 ? 64 : 32;
}

}  // namespace

int64_t Shape::padded_cols() const {
  const int64_t multiple = column_multiple(*this);
  return (cols + multiple - 1) / multiple * multiple;
}

size_t Shape::block_bytes() const { return layout_of(*this).block_bytes; }

BlockLayout layout_of(const Shape& shape) {
  BlockLayout layout{};
  layout.format = shape.format;
  layout.minimum = shape.minimum;
  layout.scales = shape.scales;
  layout.group = shape.group;
  layout.cols = shape.cols;
  layout.padded_cols = shape.padded_cols();
  layout.unit_bytes = static_cast<size_t>(kUnitColumns * kBlockRows * row_of(shape.format).bits) / 8;
  layout.section_shift = 62;
  if (shape.scales == ScaleKind::superblocks) {
    layout.scale_stride = kBlockRows * (shape.minimum ? 2 : 1);
    const auto columns = static_cast<uint64_t>(shape.minimum ? kSuperblock : 2 * kSuperblock);
    layout.section_shift = std::countr_zero(columns);
    layout.section_scales = kFactorBytes + columns / static_cast<size_t>(shape.group) * layout.scale_stride;
    layout.section_bytes = layout.section_scales + columns / kUnitColumns * layout.unit_bytes;
  } else if (shape.group != 0) {
    const size_t a_scale = shape.scales == ScaleKind::powers ? 1 : sizeof(uint16_t);
    layout.scale_stride = kBlockRows * a_scale * (shape.minimum ? 2 : 1);
    const int64_t filling = static_cast<int64_t>(kLine / layout.scale_stride) * shape.group;
    const auto columns = static_cast<uint64_t>(std::max<int64_t>(filling, kUnitColumns));
    layout.section_shift = std::countr_zero(columns);
    layout.section_scales = columns / static_cast<size_t>(shape.group) * layout.scale_stride;
    layout.section_bytes = layout.section_scales + columns / kUnitColumns * layout.unit_bytes;
  } else if (is_quantised(shape.format)) {
    layout.section_scales = kBlockRows * sizeof(float);
  }
  // Where the last section ends, which may have fewer units.
  layout.block_bytes = layout.unit_at(layout.padded_cols - kUnitColumns) + layout.unit_bytes;
  return layout;
}

void check(const Shape& shape) {
  const auto fail = [](const std::string& what) { throw std::invalid_argument("weight matrix: " + what); };
  // Kernels take single columns out of words of 32 bits.
  if (std::endian::native != std::endian::little) fail("this machine is big-endian, which native models do not run on");
  if (static_cast<size_t>(shape.format) >= std::size(kFormats))
    fail("unknown format " + std::to_string(static_cast<int>(shape.format)));
  if (shape.rows < 1 || shape.cols < 1)
    fail(std::to_string(shape.rows) + " x " + std::to_string(shape.cols) + " values; both must be at least 1");
  const auto& groups = row_of(shape.format).groups;
  if (shape.group < 0 || std::find(groups.begin(), groups.end(), shape.group) == groups.end())
    fail("groups of " + std::to_string(shape.group) + " columns do not exist in this format");
  if (shape.minimum && shape.group == 0) fail("only values in groups can have a minimum");
  const Minima minima = row_of(shape.format).minima;
  if (minima != Minima::may && shape.minimum != (minima == Minima::always))
    fail(std::string("values of this format ") + (shape.minimum ? "never" : "always") + " have minima");
  const bool superblocks = shape.group != 0 && shape.group <= kUnitColumns && row_of(shape.format).bits < 8;
  if (shape.scales == ScaleKind::superblocks && !superblocks) fail("this format has no superblocks");
  if (shape.scales == ScaleKind::powers && shape.format != Format::fp4) fail("only fp4 has powers of two for scales");
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 16;
  if (shape.rows > kMost / 64 || shape.cols > kMost / 64 || shape.cols + 128 > kMost / (shape.rows + 16))
    fail(std::to_string(shape.rows) + " x " + std::to_string(shape.cols) + " values are too many");
}

Matrix::Matrix(const Shape& shape, std::shared_ptr<void> owner, uint8_t* data)
    : shape_(shape), owner_(std::move(owner)), data_(data) {
  check(shape);
  if (data == nullptr || reinterpret_cast<uintptr_t>(data) % kLine != 0)
    throw std::invalid_argument("weight matrix: its memory must be aligned to 64 bytes");
}

Matrix Matrix::view(int64_t first, int64_t rows) const {
  if (first % kBlockRows != 0 || first < 0 || rows < 1 || rows > shape_.rows - first)
    throw std::invalid_argument("weight matrix: no view of rows " + std::to_string(first) + " + " +
                                std::to_string(rows));
  Shape shape = shape_;
  shape.rows = rows;
  return {shape, owner_, data_ + shape_.block_bytes() * static_cast<size_t>(first / kBlockRows)};
}

Matrix::Matrix(const Shape& shape) : shape_(shape) {
  check(shape);
  owner_ = allocate_weights(shape.bytes());
  data_ = static_cast<uint8_t*>(owner_.get());
}

std::shared_ptr<void> allocate_weights(size_t bytes) {
  if (bytes > std::numeric_limits<size_t>::max() / 2) throw std::bad_alloc();
  if (bytes < kHugePage) {
    const size_t size = padded(std::max<size_t>(bytes, 1), kLine);
    void* memory = std::aligned_alloc(kLine, size);
    if (memory == nullptr) throw std::bad_alloc();
    std::memset(memory, 0, size);
    return {memory, std::free};
  }
  const size_t size = padded(bytes, kHugePage);
  void* memory = map_huge_pages(size);
  if (memory == nullptr) throw std::bad_alloc();
  return {memory, [size](void* start) { munmap(start, size); }};
}

}  // namespace anyaccel::llm
