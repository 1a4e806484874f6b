// SPDX-License-Identifier: Apache-2.0
// Weight matrices in the form that they are multiplied in.
//
// A matrix W[rows, cols] is stored in blocks of 16 rows, one block after another; inside a block the values that one
// vector load needs lie together, so that a product with few tokens reads blocks from end to end, and the matrix once:
//   f32, f16   [k][16 rows]
//   bf16       [k/2][16 rows][2]                      (the layout of a VDPBF16PS operand and of an AMX B tile)
//   i8         [k/4][16 rows][4], then 16 f32 scales   (of a VPDPBUSD operand and of an AMX B tile), one scale a row
//   those in groups    see grouped.h: scales (and minima) lie beside the values that they belong to
// Columns are padded with zeros to padded_cols(), rows to a multiple of 16.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace anyaccel::llm {

// nl4 and fp4 have codes of 4 bits: IQ4_NL's values, and twice those of MXFP4.
enum class Format : uint8_t { f32, f16, bf16, i8, i4, i6, i5, i3, i2, nl4, fp4 };
enum class Minima : uint8_t { may, never, always };
inline constexpr int8_t kNonlinearCodes[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                               1,    13,   25,  38,  53,  69,  89,  113};
inline constexpr int8_t kFloatCodes[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
// What there is of each format, in the order of Format. Its layout is grouped.h's.
struct FormatRow {
  const char* name;           // as MatrixShape in inference/spec/decoder.py has it
  int bits;                   // of a value
  std::array<int, 3> groups;  // columns that may share a scale, 0: a scale a row or none; -1: no more of them
  Minima minima = Minima::may;
  int low = 0;                    // bits in the first plane (bit_planes.h); 0: not in planes
  const int8_t* codes = nullptr;  // what 4 bits stand for
};
inline constexpr FormatRow kFormats[] = {{"f32", 32, {0, -1, -1}},
                                         {"f16", 16, {0, -1, -1}},
                                         {"bf16", 16, {0, -1, -1}},
                                         {"i8", 8, {0, 16, 32}},
                                         {"i4", 4, {32, 64, 128}, Minima::may, 4},
                                         {"i6", 6, {16, -1, -1}, Minima::may, 4},
                                         {"i5", 5, {32, -1, -1}, Minima::may, 4},
                                         {"i3", 3, {16, -1, -1}, Minima::never, 2},
                                         {"i2", 2, {16, -1, -1}, Minima::always, 2},
                                         {"nl4", 4, {32, -1, -1}, Minima::never, 4, kNonlinearCodes},
                                         {"fp4", 4, {32, -1, -1}, Minima::never, 4, kFloatCodes}};
constexpr const FormatRow& row_of(Format format) { return kFormats[static_cast<int>(format)]; }
constexpr bool is_quantised(Format format) { return row_of(format).bits <= 8; }

constexpr int64_t kBlockRows = 16;

// What scales of groups are: halves; whole numbers of 8 bits (so are minima) times a half of each superblock of 256
// columns, as in ggml's K types, for groups of 16 and 32 in fewer than 8 bits; powers of two, as in MXFP4, for codes.
enum class ScaleKind : uint8_t { halves, superblocks, powers };

struct Shape {
  Format format;
  int64_t rows;
  int64_t cols;
  int group = 0;  // columns that share a scale, one of the format's; 0: a scale a row, or no scales
  // value = scale * q + minimum, with q in 0 .. 2^bits - 1 for fewer than 8 bits; else scale * q for i8, scale * code
  // for codes, and scale * (q - 2^(bits - 1)) for the others. Not for i8 with a scale a row.
  bool minimum = false;
  ScaleKind scales = ScaleKind::halves;  // of groups

  int64_t padded_rows() const { return (rows + kBlockRows - 1) / kBlockRows * kBlockRows; }
  int64_t padded_cols() const;
  int64_t blocks() const { return padded_rows() / kBlockRows; }
  size_t block_bytes() const;  // a multiple of 64
  size_t bytes() const { return block_bytes() * static_cast<size_t>(blocks()); }
  bool operator==(const Shape&) const = default;
};
// Throws std::invalid_argument: an impossible group, no rows, a size that overflows.
void check(const Shape& shape);

constexpr int64_t kSuperblock = 256;  // columns

// What rows are read from. Quantised kinds are ggml's blocks of 32 columns, and its superblocks.
enum class SourceType : uint8_t {
  f32,
  f16,
  bf16,
  f64,
  q8_0,
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  iq4_nl,
  mxfp4,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  iq4_xs
};
size_t source_row_bytes(SourceType type, int64_t cols);

struct Source {
  const void* data;  // of the first row
  SourceType type;
  int64_t row_stride;  // bytes from one row to the next
  int64_t col_stride;  // bytes from one value to the next; 0: dense. Quantised kinds are dense
};

// A packed matrix in memory that somebody owns. Cheap to move; copies share the memory.
class Matrix {
 public:
  Matrix() = default;
  // `data`: 64-byte aligned, shape.bytes() long, kept alive by `owner`.
  Matrix(const Shape& shape, std::shared_ptr<void> owner, uint8_t* data);
  // Memory of its own, zeroed.
  explicit Matrix(const Shape& shape);

  const Shape& shape() const { return shape_; }
  const uint8_t* block(int64_t index) const { return data_ + shape_.block_bytes() * static_cast<size_t>(index); }
  bool empty() const { return data_ == nullptr; }
  // Some of its rows, from the first one of a block on.
  Matrix view(int64_t first, int64_t rows) const;

  // Packs `count` rows of `source`, converted or quantised, into rows first, first+1, ... A quantised source that the
  // matrix's format holds is kept bit by bit: blocks of 32 in i8 of 16 or 32, q4_0 and q4_1 also in i4 of 32; q4_1
  // needs a minimum. Others and superblocks are read into the one format that has their bits, groups and scales.
  // `order`: row i comes from row order[i] of the source; null: in order. Rows outside are an error.
  // Calls for different rows of one block may not run at the same time.
  // Throws std::invalid_argument.
  void set_rows(int64_t first, int64_t count, const Source& source, const int64_t* order = nullptr);
  // Same, for quantised checkpoints (GPTQ, AWQ, compressed-tensors, GGUF): values q[count][cols] without a sign, or
  // int8 (i8), scales[count][groups], and for a matrix with minimum minima[count][groups]. Other formats than i8 and i4
  // are made in this way only, or of q4_0 and q4_1 if they have 5 bits or more. Not for superblocks. Powers of two
  // below 2^-126 become zero.
  void set_quantised_rows(int64_t first, int64_t count, const uint8_t* q, const float* scales, const float* minima);
  // Row `row` as floats: cols of them. Reads only that row: for embeddings.
  void row(int64_t row, float* out) const;

 private:
  Shape shape_{};
  std::shared_ptr<void> owner_;
  uint8_t* data_ = nullptr;
};

// Memory for weights: zeroed, in huge pages where the system has them. Throws std::bad_alloc.
std::shared_ptr<void> allocate_weights(size_t bytes);

}  // namespace anyaccel::llm
