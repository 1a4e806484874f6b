// SPDX-License-Identifier: Apache-2.0
// What the tests of weight matrices share: instruction sets, exact memory, random values, a shape of every kind.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "llm/pack/matrix.h"
#include "llm_matrices.h"
#include "simd/isa.h"

namespace {

using namespace anyaccel::llm;
using anyaccel::Isa;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

constexpr Isa kIsas[] = {Isa::scalar, Isa::portable,    Isa::avx2, Isa::avx_vnni,
                         Isa::avx512, Isa::avx512_vnni, Isa::neon, Isa::neon_dot};
// Whether what is compiled for it runs here; emulated, it takes no more than the instruction set that it builds on.
inline bool supported(Isa isa) {
  if (kQuick)
    for (const Isa other : kIsas)
      if (other > isa && anyaccel::can_run(other)) return false;
#ifdef ANYACCEL_EMULATE
  isa = anyaccel::highest_of_every_kernel(isa);
#endif
  return anyaccel::can_run(isa);
}

// Exactly as much memory as is used, aligned: reads beyond are seen by the sanitizer.
struct Aligned {
  explicit Aligned(size_t size) : data(static_cast<uint8_t*>(std::aligned_alloc(64, std::max<size_t>(size, 64)))) {}
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  ~Aligned() { std::free(data); }
  uint8_t* data;
};

inline std::vector<float> random_floats(size_t count, unsigned seed, float sigma = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<float> result(count);
  for (float& value : result) value = normal(random);
  return result;
}

inline bool quantised(Format format) { return is_quantised(format); }

inline std::string name_of(const Shape& shape) {
  return std::string(kFormats[static_cast<size_t>(shape.format)].name) + " group " + std::to_string(shape.group) +
         (shape.minimum ? " minimum" : "") + " " + std::to_string(shape.rows) + "x" + std::to_string(shape.cols);
}

// Every format for a size.
inline std::vector<Shape> shapes_of(int64_t rows, int64_t cols) {
  std::vector<Shape> shapes;
  for (size_t format = 0; format < std::size(kFormats); ++format)
    for (int group : kFormats[format].groups)
      for (bool minimum : {false, true})
        if ((group > 0 || (group == 0 && !minimum)) &&
            (kFormats[format].minima == Minima::may || minimum == (kFormats[format].minima == Minima::always)))
          shapes.push_back({static_cast<Format>(format), rows, cols, group, minimum});
  return shapes;
}

// Those with scales of another kind, of at least so many columns.
inline std::vector<Shape> other_scales(int64_t rows, int64_t cols) {
  const int64_t whole = (cols + kSuperblock - 1) / kSuperblock * kSuperblock;
  constexpr ScaleKind kBlocks = ScaleKind::superblocks;
  return {{Format::i2, rows, whole, 16, true, kBlocks},           {Format::i3, rows, whole, 16, false, kBlocks},
          {Format::i4, rows, whole, 32, true, kBlocks},           {Format::i5, rows, whole, 32, true, kBlocks},
          {Format::i6, rows, whole, 16, false, kBlocks},          {Format::nl4, rows, whole, 32, false, kBlocks},
          {Format::fp4, rows, cols, 32, false, ScaleKind::powers}};
}

inline std::vector<float> rows_of(const Matrix& matrix) {
  const Shape& shape = matrix.shape();
  std::vector<float> result(static_cast<size_t>(shape.rows * shape.cols));
  for (int64_t r = 0; r < shape.rows; ++r) matrix.row(r, result.data() + r * shape.cols);
  return result;
}

}  // namespace
