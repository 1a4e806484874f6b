// SPDX-License-Identifier: Apache-2.0
// Rows of any source into blocks of 16 rows: read as panels [columns][16 rows] of floats, then stored or quantised.
#include "llm/pack/pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "llm/pack/bit_planes.h"
#include "llm/pack/grouped.h"
#include "llm/pack/matrix.h"
#include "llm/pack/pack_source.h"
#include "llm/pack/superblocks.h"
#include "simd/convert.h"
#include "simd/pick.h"

namespace anyaccel::llm {

namespace {

using namespace simd;

// Where things are in a block of floats, or in a unit (without groups: the whole block) of quantised values.
size_t i4_at(int64_t k, int r) { return static_cast<size_t>((k / 8 * kLanes + r) * 4 + k % 4); }
bool i4_high(int64_t k) { return k % 8 >= 4; }
size_t pair_at(int64_t k, int r) { return static_cast<size_t>((k / 2 * kLanes + r) * 2 + k % 2) * 2; }

void put_i4(uint8_t* values, int64_t k, int r, int q) {
  uint8_t& byte = values[i4_at(k, r)];
  byte = static_cast<uint8_t>(i4_high(k) ? (byte & 0x0f) | q << 4 : (byte & 0xf0) | q);
}

// Calls fn(k0, count, valid, panel) for the columns from `first` on, `step` at a time. `valid` of the `count` columns
// exist; the others are zeros.
template <class Fn>
void for_panels(const Source& source, const Lanes& lanes, int64_t cols, int64_t padded_cols, int step, const Fn& fn,
                int64_t first = 0) {
  alignas(64) float panel[kMostColumns * kLanes];
  for (int64_t k0 = first; k0 < padded_cols; k0 += step) {
    const int count = static_cast<int>(std::min<int64_t>(step, padded_cols - k0));
    const int valid = static_cast<int>(std::clamp<int64_t>(cols - k0, 0, count));
    if (valid < count || !lanes.all) std::fill(panel, panel + count * kLanes, 0.0f);
    if (valid > 0) read_panel(source.type, lanes, source.col_stride, k0, valid, panel);
    fn(k0, count, valid, panel);
  }
}

// Calls fn(k, r) for the columns and rows of a panel that are packed. Most blocks are packed as a whole: without a
// question for each value the compiler makes vectors of the loop.
template <class Fn>
void for_values(const Lanes& lanes, int count, const Fn& fn) {
  if (lanes.all) {
    for (int k = 0; k < count; ++k)
      for (int r = 0; r < kLanes; ++r) fn(k, r);
    return;
  }
  for (int r = 0; r < kLanes; ++r)
    for (int k = 0; lanes.row[r] != nullptr && k < count; ++k) fn(k, r);
}

template <class Put>
void pack_floats(const BlockLayout& layout, const Source& source, const Lanes& lanes, int64_t cols, const Put& place) {
  for_panels(source, lanes, cols, layout.padded_cols, kMostColumns,
             [&](int64_t k0, int count, int, const float* panel) {
               for_values(lanes, count, [&](int k, int r) { place(k0 + k, r, panel[k * kLanes + r]); });
             });
}

const PackKernels& selected() {
  static const PackKernels& kernels = pick<PackKernels>(selected_isa());
  return kernels;
}

// Whether PackKernels can read the source's rows where they are: dense ones of 16 or 32 bits.
bool in_rows(const Source& source) {
  const bool kind = source.type == SourceType::f32 || source.type == SourceType::f16 || source.type == SourceType::bf16;
  return kind && source.col_stride == static_cast<int64_t>(source_row_bytes(source.type, 1));
}

// The columns that fill whole lines of 64 bytes of each row of a block, `kColumns` a line, which convert(row, from,
// line) makes; returns how many there are. A line is 16 words, and word i of each row lies beside those of the others.
template <int kColumns, class Convert>
int64_t pack_lines(const Source& source, const Lanes& lanes, int64_t cols, uint8_t* block, const Convert& convert) {
  constexpr int kWords = 16;
  constexpr int64_t kAhead = 512;  // bytes: sixteen rows are more streams than some prefetchers follow
  const int64_t whole = cols / kColumns * kColumns;
  alignas(64) uint8_t lines[kLanes][kWords * 4];
  for (int64_t k = 0; k < whole; k += kColumns) {
    for (int r = 0; r < kLanes; ++r) {
      const uint8_t* from = lanes.row[r] + k * source.col_stride;
      __builtin_prefetch(from + kAhead);
      convert(r, from, lines[r]);
    }
    for (int w = 0; w < kWords; ++w, block += kLanes * 4)
      for (int r = 0; r < kLanes; ++r) put(block + r * 4, read<uint32_t>(lines[r] + w * 4));
  }
  return whole;
}

void pack_bf16(const BlockLayout& layout, const Source& source, const Lanes& lanes, int64_t cols, uint8_t* block) {
  int64_t done = 0;
  if (lanes.all && in_rows(source))
    done = pack_lines<32>(source, lanes, cols, block, [&](int, const uint8_t* from, uint8_t* line) {
      selected().as_bf16(source.type, from, reinterpret_cast<uint16_t*>(line));
    });
  for_panels(
      source, lanes, cols, layout.padded_cols, kMostColumns,
      [&](int64_t k0, int count, int, const float* panel) {
        if (!lanes.all)
          return for_values(lanes, count,
                            [&](int k, int r) { put(block + pair_at(k0 + k, r), to_bf16(panel[k * kLanes + r])); });
        uint8_t* to = block + pair_at(k0, 0);
        for (int k = 0; k < count; k += 2, to += kLanes * 4)
          for (int r = 0; r < kLanes; ++r) {
            const uint32_t low = to_bf16(panel[k * kLanes + r]), high = to_bf16(panel[(k + 1) * kLanes + r]);
            put(to + r * 4, low | high << 16);
          }
      },
      done);
}

// Largest magnitude of each row; NaN if a value is not finite.
void magnitudes(const float* panel, int count, float* most) {
  for (int k = 0; k < count; ++k)
    for (int r = 0; r < kLanes; ++r) {
      const float magnitude = std::fabs(panel[k * kLanes + r]);
      const float larger = magnitude > most[r] ? magnitude : most[r];
      most[r] = larger + magnitude * 0.0f;
    }
}

float inverse(float scale) { return std::fabs(scale) > 1e-30f ? 1.0f / scale : 0.0f; }

// values: those of column k0 and row 0.
void put_i8(uint8_t* values, int count, const float* panel, const float* inv, const Lanes& lanes) {
  const auto rounded = [&](int k, int r) {
    const float value = panel[k * kLanes + r] * inv[r] + 12582912.0f - 12582912.0f;  // to the nearest, ties to even
    const float low = value > -127.0f ? value : -127.0f;
    return static_cast<uint32_t>(static_cast<int32_t>(low < 127.0f ? low : 127.0f)) & 0xffu;
  };
  if (!lanes.all) {
    for_values(lanes, count, [&](int k, int r) { values[i8_at(k, r)] = static_cast<uint8_t>(rounded(k, r)); });
    return;
  }
  for (int k = 0; k < count; k += 4, values += kLanes * 4)
    for (int r = 0; r < kLanes; ++r)
      put(values + r * 4, rounded(k, r) | rounded(k + 1, r) << 8 | rounded(k + 2, r) << 16 | rounded(k + 3, r) << 24);
}

// One group of columns from k0 on, of which `valid` exist. With a minimum, values are taken from the middle of the
// range.
void pack_i8_group(const BlockLayout& layout, const Lanes& lanes, int64_t k0, int valid, float* panel, uint8_t* block) {
  float most[kLanes] = {}, inv[kLanes], middle[kLanes] = {};
  if (layout.minimum && valid > 0) {
    float low[kLanes], high[kLanes];
    std::copy(panel, panel + kLanes, low);
    std::copy(panel, panel + kLanes, high);
    for (int k = 1; k < valid; ++k)
      for (int r = 0; r < kLanes; ++r) {
        low[r] = std::min(low[r], panel[k * kLanes + r]);
        high[r] = std::max(high[r], panel[k * kLanes + r]);
      }
    for (int r = 0; r < kLanes; ++r) {
      const uint16_t half = to_f16(low[r] + (high[r] - low[r]) * 0.5f);
      middle[r] = from_f16(half);
      if (lanes.row[r] != nullptr) put(minimum_at(layout, block, k0 / layout.group, r), half);
    }
    for (int k = 0; k < valid; ++k)
      for (int r = 0; r < kLanes; ++r) panel[k * kLanes + r] -= middle[r];
  }
  magnitudes(panel, valid, most);
  for (int r = 0; r < kLanes; ++r) {
    const uint16_t scale = to_f16(most[r] / 127.0f);
    inv[r] = inverse(from_f16(scale));
    if (lanes.row[r] != nullptr) put(scale_at(layout, block, k0 / layout.group, r), scale);
  }
  put_i8(block + layout.unit_at(k0) + i8_at(k0 % kUnitColumns, 0), layout.group, panel, inv, lanes);
}

void pack_i8(const BlockLayout& layout, const Source& source, const Lanes& lanes, int64_t cols, uint8_t* block) {
  if (layout.group == 0) {
    const bool rows = lanes.all && in_rows(source);
    float most[kLanes] = {}, inv[kLanes];
    if (rows)
      for (int r = 0; r < kLanes; ++r) most[r] = selected().largest(source.type, lanes.row[r], cols);
    else
      for_panels(source, lanes, cols, layout.padded_cols, kMostColumns,
                 [&](int64_t, int, int valid, const float* panel) { magnitudes(panel, valid, most); });
    for (int r = 0; r < kLanes; ++r) {
      const float scale = most[r] / 127.0f;
      inv[r] = inverse(scale);
      if (lanes.row[r] != nullptr) put(block + layout.scales_at(0) + static_cast<size_t>(r) * 4, scale);
    }
    uint8_t* values = block + layout.unit_at(0);
    int64_t done = 0;
    if (rows)
      done = pack_lines<64>(source, lanes, cols, values, [&](int r, const uint8_t* from, uint8_t* line) {
        selected().as_i8(source.type, from, inv[r], reinterpret_cast<int8_t*>(line));
      });
    for_panels(
        source, lanes, cols, layout.padded_cols, kMostColumns,
        [&](int64_t k0, int count, int, const float* panel) {
          put_i8(values + i8_at(k0, 0), count, panel, inv, lanes);
        },
        done);
    return;
  }
  for_panels(
      source, lanes, cols, layout.padded_cols, kSourceGroup, [&](int64_t k0, int count, int valid, float* panel) {
        for (int k = 0; k < count; k += layout.group)
          pack_i8_group(layout, lanes, k0 + k, std::clamp(valid - k, 0, layout.group), panel + k * kLanes, block);
      });
}

void pack_i4(const BlockLayout& layout, const Source& source, const Lanes& lanes, int64_t cols, uint8_t* block) {
  const PackKernels& kernels = selected();
  for_panels(source, lanes, cols, layout.padded_cols, layout.group,
             [&](int64_t k0, int count, int valid, const float* panel) {
               uint8_t* values = block + layout.unit_at(k0);
               alignas(64) uint32_t lines[kMostColumns / 8 * kLanes] = {};
               uint16_t scales[kLanes], minima[kLanes];
               kernels.quantise4(panel, valid, lines, scales, layout.minimum ? minima : nullptr);
               for (int r = 0; r < kLanes; ++r) {
                 if (lanes.row[r] == nullptr) continue;
                 put(scale_at(layout, block, k0 / layout.group, r), scales[r]);
                 if (layout.minimum) put(minimum_at(layout, block, k0 / layout.group, r), minima[r]);
                 for (int k = 0; k < valid && !lanes.all; ++k)
                   put_i4(values, k, r, lines[k / 8 * kLanes + r] >> (k % 4 * 8 + k % 8 / 4 * 4) & 15);
               }
               if (lanes.all) std::memcpy(values, lines, static_cast<size_t>(count / 8 * kLanes * 4));
             });
}

[[noreturn]] void fail(const std::string& what) { throw std::invalid_argument("weight matrix: " + what); }

bool holds(const BlockLayout& layout, SourceType type) {
  switch (type) {
    case SourceType::mxfp4:
      return layout.scales == ScaleKind::powers;
    case SourceType::iq4_nl:
      return layout.format == Format::nl4 && layout.scales == ScaleKind::halves;
    case SourceType::q5_0:
    case SourceType::q5_1:
      return layout.format == Format::i5 && layout.minimum == (type == SourceType::q5_1);
    default:
      break;
  }
  if (!is_quantised(type) || (type == SourceType::q4_1 && !layout.minimum)) return false;
  if (layout.format == Format::i8) return layout.group == 16 || layout.group == 32;
  const FormatRow& format = row_of(layout.format);
  return format.low == 4 && format.codes == nullptr && layout.group <= kSourceGroup && type != SourceType::q8_0;
}

void pack_block(const BlockLayout& layout, const Source& source, const Lanes& lanes, int64_t cols, uint8_t* block) {
  if (superblock_type(source.type) != nullptr || holds(layout, source.type))
    return selected().keep(layout, source.type, lanes.row, cols, block);
  switch (layout.format) {
    case Format::f32:
      return pack_floats(layout, source, lanes, cols, [&](int64_t k, int r, float value) {
        put(block + static_cast<size_t>(k * kLanes + r) * 4, value);
      });
    case Format::f16:
      return pack_floats(layout, source, lanes, cols, [&](int64_t k, int r, float value) {
        put(block + static_cast<size_t>(k * kLanes + r) * 2, to_f16(value));
      });
    case Format::bf16:
      return pack_bf16(layout, source, lanes, cols, block);
    case Format::i8:
      return pack_i8(layout, source, lanes, cols, block);
    case Format::i4:
      return pack_i4(layout, source, lanes, cols, block);
    default:
      fail("nothing is rounded to " + std::string(row_of(layout.format).name));
  }
}

void check_rows(const Shape& shape, int64_t first, int64_t count) {
  if (first < 0 || count < 0 || first > shape.rows || count > shape.rows - first)
    fail("rows " + std::to_string(first) + " to " + std::to_string(first) + " + " + std::to_string(count) +
         " do not exist among " + std::to_string(shape.rows));
}

// A scale that a checkpoint gives, as the half that it is kept as.
uint16_t half_of(float value) {
  const uint16_t half = to_f16(value);
  if (!std::isfinite(from_f16(half)) && std::isfinite(value))
    fail("a scale or minimum of " + std::to_string(value) + " is too large for 16 bits");
  return half;
}

// A power of two as the exponent of a float, whose subnormal numbers are zero here.
uint8_t exponent_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value >= 0 && value < std::numeric_limits<float>::min()) return 0;
  if ((bits & 0x807fffffu) != 0) fail("a scale of " + std::to_string(value) + " is no power of two");
  return static_cast<uint8_t>(bits >> 23);
}

}  // namespace

size_t source_row_bytes(SourceType type, int64_t cols) {
  switch (type) {
    case SourceType::f32:
      return static_cast<size_t>(cols) * 4;
    case SourceType::f64:
      return static_cast<size_t>(cols) * 8;
    case SourceType::f16:
    case SourceType::bf16:
      return static_cast<size_t>(cols) * 2;
    default:
      if (const SuperblockType* superblock = superblock_type(type)) {
        if (cols % kSuperblock != 0)
          fail("rows of " + std::to_string(cols) + " values cannot be in superblocks of 256");
        return static_cast<size_t>(cols / kSuperblock * superblock->bytes);
      }
      if (cols % kSourceGroup != 0)
        fail("rows of " + std::to_string(cols) + " values cannot be in quantised blocks of 32");
      return static_cast<size_t>(cols / kSourceGroup * block_bytes_of(type));
  }
}

void Matrix::set_rows(int64_t first, int64_t count, const Source& source, const int64_t* order) {
  if (empty()) fail("it has no memory");
  check_rows(shape_, first, count);
  if (source.data == nullptr && count > 0) fail("its source has no data");
  if (source.type > SourceType::iq4_xs) fail("unknown source type");
  const SuperblockType* superblock = superblock_type(source.type);
  const bool held = superblock != nullptr && superblock->format == shape_.format && superblock->group == shape_.group &&
                    superblock->minimum == shape_.minimum;
  const bool superblocks = shape_.scales == ScaleKind::superblocks;
  if (superblocks ? !held : superblock != nullptr) fail("its format does not hold these superblocks");
  const bool of_one_format = source.type >= SourceType::q5_0 && source.type <= SourceType::mxfp4;
  if ((of_one_format || shape_.scales == ScaleKind::powers) && !holds(layout_of(shape_), source.type))
    fail("its format does not hold these blocks");
  const size_t row_bytes = source_row_bytes(source.type, shape_.cols);  // checks the number of columns
  Source dense = source;
  const bool floats = !is_quantised(source.type) && superblock == nullptr;
  if (floats && dense.col_stride == 0) dense.col_stride = static_cast<int64_t>(row_bytes) / shape_.cols;
  if (!floats && source.col_stride != 0) fail("quantised rows cannot have a column stride");
  for (int64_t i = 0; order != nullptr && i < count; ++i)
    if (order[i] < 0) fail("row " + std::to_string(order[i]) + " of its source does not exist");
  const BlockLayout layout = layout_of(shape_);
  const auto* start = static_cast<const uint8_t*>(source.data);
  for (int64_t done = 0; done < count;) {
    const int64_t row = first + done;
    const int64_t in_block = std::min(count - done, kBlockRows - row % kBlockRows);
    Lanes lanes;
    lanes.all = in_block == kBlockRows;
    for (int64_t i = 0; i < in_block; ++i) {
      const int64_t from = order != nullptr ? order[done + i] : done + i;
      lanes.row[row % kBlockRows + i] = start + from * source.row_stride;
    }
    pack_block(layout, dense, lanes, shape_.cols, data_ + layout.block_bytes * static_cast<size_t>(row / kBlockRows));
    done += in_block;
  }
}

void Matrix::set_quantised_rows(int64_t first, int64_t count, const uint8_t* q, const float* scales,
                                const float* minima) {
  if (empty()) fail("it has no memory");
  if (!is_quantised(shape_.format)) fail("its format is not a quantised one");
  if (shape_.scales == ScaleKind::superblocks) fail("superblocks are read from superblocks only");
  check_rows(shape_, first, count);
  if (count > 0 && (q == nullptr || scales == nullptr)) fail("values or scales are missing");
  if (count > 0 && (minima != nullptr) != shape_.minimum)
    fail(shape_.minimum ? "minima are missing" : "this matrix has no minima");
  const BlockLayout layout = layout_of(shape_);
  const int64_t group = layout.group == 0 ? shape_.cols : layout.group;
  const int64_t groups = (shape_.cols + group - 1) / group;
  const FormatRow& format = row_of(shape_.format);
  const int most = (1 << format.bits) - 1;
  uint8_t bits = 0;
  for (int64_t i = 0; i < count * shape_.cols; ++i) bits |= q[i];  // `most` has all bits that a value may have
  if (bits > most) fail("a " + std::to_string(format.bits) + "-bit value is above " + std::to_string(most));
  for (int64_t i = 0; i < count; ++i) {
    const int r = static_cast<int>((first + i) % kBlockRows);
    uint8_t* block = data_ + layout.block_bytes * static_cast<size_t>((first + i) / kBlockRows);
    for (int64_t g = 0; g < groups; ++g) {
      const float scale = scales[i * groups + g];
      if (layout.group == 0) {
        put(block + layout.scales_at(0) + static_cast<size_t>(r) * 4, scale);
        continue;
      }
      if (layout.scales == ScaleKind::powers) {
        block[layout.scales_at(g * group) + static_cast<size_t>(r)] = exponent_of(scale);
        continue;
      }
      put(scale_at(layout, block, g, r), half_of(scale));
      if (layout.minimum) put(minimum_at(layout, block, g, r), half_of(minima[i * groups + g]));
    }
    for (int64_t k = 0; k < shape_.cols; k += kUnitColumns) {
      const uint8_t* from = q + i * shape_.cols + k;
      uint8_t last[kUnitColumns] = {};
      if (shape_.cols - k < kUnitColumns) {
        std::memcpy(last, from, static_cast<size_t>(shape_.cols - k));
        from = last;
      }
      uint8_t* unit = block + layout.unit_at(k);
      if (shape_.format == Format::i8)
        for (int column = 0; column < kUnitColumns; column += 4) std::memcpy(unit + i8_at(column, r), from + column, 4);
      else
        put_row(format, unit, r, from);
    }
  }
}

void Matrix::row(int64_t row, float* out) const {
  const BlockLayout layout = layout_of(shape_);
  const uint8_t* from = block(row / kBlockRows);
  const int r = static_cast<int>(row % kBlockRows);
  // The scale of a column's group, or its minimum.
  const auto scale_of = [&](int64_t k, bool minimum) {
    const auto half = [&](size_t at) { return from_f16(read<uint16_t>(from + at + static_cast<size_t>(r) * 2)); };
    if (layout.scales == ScaleKind::powers)
      return float_of(uint32_t{from[layout.scales_at(k) + static_cast<size_t>(r)]} << 23);
    if (layout.scales == ScaleKind::halves) return half(layout.scales_at(k) + (minimum ? kLanes * 2 : 0));
    const auto whole = static_cast<int8_t>(from[layout.scales_at(k) + static_cast<size_t>(r + (minimum ? kLanes : 0))]);
    return half(layout.factors_at(k) + (minimum ? kLanes * 2 : 0)) * static_cast<float>(whole);
  };
  const int64_t cols = shape_.cols;
  switch (shape_.format) {
    case Format::f32:
      for (int64_t k = 0; k < cols; ++k) out[k] = read<float>(from + (k * kLanes + r) * 4);
      return;
    case Format::f16:
      for (int64_t k = 0; k < cols; ++k) out[k] = from_f16(read<uint16_t>(from + (k * kLanes + r) * 2));
      return;
    case Format::bf16:
      for (int64_t k = 0; k < cols; ++k) out[k] = from_bf16(read<uint16_t>(from + pair_at(k, r)));
      return;
    case Format::i8: {
      const int64_t group = layout.group == 0 ? cols : layout.group;
      for (int64_t k0 = 0; k0 < cols; k0 += group) {
        const float scale = layout.group == 0 ? read<float>(from + layout.scales_at(0) + r * 4) : scale_of(k0, false);
        const float minimum = layout.minimum ? scale_of(k0, true) : 0.0f;
        const uint8_t* q = from + layout.unit_at(k0) + i8_at(k0 % kUnitColumns, r);
        for (int64_t k = 0; k < std::min(group, cols - k0); ++k)
          out[k0 + k] = scale * static_cast<float>(static_cast<int8_t>(q[i8_at(k, 0)])) + minimum;
      }
      return;
    }
    default: {
      const FormatRow& format = row_of(shape_.format);
      const int zero = layout.minimum ? 0 : 1 << (format.bits - 1);
      for (int64_t k = 0; k < cols; ++k) {
        const float scale = scale_of(k, false);
        const float minimum = layout.minimum ? scale_of(k, true) : 0.0f;
        const int q = get_bits(layout, from, k, r);
        out[k] = scale * static_cast<float>(format.codes != nullptr ? format.codes[q] : q - zero) + minimum;
      }
      return;
    }
  }
}

}  // namespace anyaccel::llm
