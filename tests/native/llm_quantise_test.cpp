// SPDX-License-Identifier: Apache-2.0
// Quantised arrays stand for the values that a packed matrix of the same source has, and their error is what is said.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "llm/pack/quantise.h"

namespace {

using namespace anyaccel::llm;

void expect(bool ok, const char* what) {
  if (!ok) {
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
  }
}

void compare(const Shape& shape) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const auto cols = static_cast<size_t>(shape.cols), rows = static_cast<size_t>(shape.rows);
  std::vector<float> w(rows * cols);
  for (float& value : w) value = normal(random);
  const Source source{w.data(), SourceType::f32, shape.cols * 4, 4};
  const size_t groups =
      shape.group == 0 ? 1 : (cols + static_cast<size_t>(shape.group) - 1) / static_cast<size_t>(shape.group);
  std::vector<uint8_t> q(rows * cols), again(rows * cols);
  std::vector<float> scales(rows * groups), minima(rows * groups);
  const QuantiseError error = quantise_rows(shape, source, q.data(), scales.data(), minima.data(), 2);
  const QuantiseError alone = quantise_rows(shape, source, again.data(), scales.data(), minima.data(), 1);
  expect(q == again && error.squared_error == alone.squared_error, "the same on one thread");
  Matrix packed(shape);
  packed.set_rows(0, shape.rows, source);
  std::vector<float> row(cols);
  double squared_error = 0.0, squared_sum = 0.0;
  for (size_t r = 0; r < rows; ++r) {
    packed.row(static_cast<int64_t>(r), row.data());
    for (size_t k = 0; k < cols; ++k) {
      const size_t g = r * groups + (shape.group == 0 ? 0 : k / static_cast<size_t>(shape.group));
      const uint8_t bits = q[r * cols + k];
      float value = scales[g] * static_cast<float>(static_cast<int8_t>(bits));
      if (shape.format == Format::i4)
        value = shape.minimum ? scales[g] * static_cast<float>(bits) + minima[g]
                              : scales[g] * static_cast<float>(static_cast<int>(bits) - 8);
      expect(std::fabs(value - row[k]) <= 1e-6f * std::fabs(value) + 1e-7f, "values of the packed matrix");
      squared_error +=
          (static_cast<double>(w[r * cols + k]) - row[k]) * (static_cast<double>(w[r * cols + k]) - row[k]);
      squared_sum += static_cast<double>(w[r * cols + k]) * w[r * cols + k];
    }
  }
  expect(std::fabs(squared_error - error.squared_error) <= 1e-9 * squared_error, "squared error");
  expect(std::fabs(squared_sum - error.squared_sum) <= 1e-9 * squared_sum, "squared sum");
  expect(squared_error < 0.02 * squared_sum, "a small error");
}

void errors() {
  std::vector<float> w(64, 1.0f), scales(16), minima(16);
  std::vector<uint8_t> q(64);
  const Source source{w.data(), SourceType::f32, 64 * 4, 4};
  for (const Shape& shape : {Shape{Format::bf16, 1, 64}, Shape{Format::i4, 1, 64, 16}, Shape{Format::i4, 0, 64, 32}}) {
    bool thrown = false;
    try {
      quantise_rows(shape, source, q.data(), scales.data(), minima.data());
    } catch (const std::invalid_argument&) {
      thrown = true;
    }
    expect(thrown, "an impossible shape");
  }
  w[3] = std::numeric_limits<float>::quiet_NaN();
  const QuantiseError error = quantise_rows({Format::i4, 1, 64, 32}, source, q.data(), scales.data(), nullptr);
  expect(!std::isfinite(error.squared_sum), "NaN shows in the sum");
}

}  // namespace

int main() {
  compare({Format::i4, 70, 256, 32});
  compare({Format::i4, 33, 200, 64, true});
  compare({Format::i4, 16, 128, 128, true});
  compare({Format::i8, 50, 100});
  compare({Format::i8, 130, 96, 32});
  errors();
  std::puts("ok");
}
