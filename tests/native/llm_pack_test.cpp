// SPDX-License-Identifier: Apache-2.0
// Packing of weight matrices: every format and source, and the kernels of every instruction set.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "llm/pack/grouped.h"
#include "llm/pack/matrix.h"
#include "llm/pack/pack.h"
#include "llm_shapes.h"
#include "simd/convert.h"
#include "simd/pick.h"

namespace {

using namespace anyaccel::simd;

// --- sources

std::vector<uint8_t> as_source(const std::vector<float>& values, SourceType type) {
  std::vector<uint8_t> bytes;
  const auto add = [&](auto value) {
    const auto* from = reinterpret_cast<const uint8_t*>(&value);
    bytes.insert(bytes.end(), from, from + sizeof value);
  };
  for (float value : values) {
    if (type == SourceType::f32) add(value);
    if (type == SourceType::f64) add(static_cast<double>(value));
    if (type == SourceType::f16) add(to_f16(value));
    if (type == SourceType::bf16) add(to_bf16(value));
  }
  return bytes;
}

// What a source of that type can hold of a value.
float rounded(float value, SourceType type) {
  if (type == SourceType::f16) return from_f16(to_f16(value));
  if (type == SourceType::bf16) return from_bf16(to_bf16(value));
  return value;
}

// Random blocks as ggml writes them, and their values.
struct Ggml {
  std::vector<uint8_t> bytes;
  std::vector<float> values;
};
Ggml ggml(SourceType type, int64_t rows, int64_t cols, unsigned seed) {
  std::mt19937 random(seed);
  Ggml result;
  for (int64_t block = 0; block < rows * cols / 32; ++block) {
    const uint16_t scale = to_f16((static_cast<float>(random() % 1000) - 500.0f) / 4000.0f);
    const uint16_t minimum = to_f16((static_cast<float>(random() % 1000) - 500.0f) / 1000.0f);
    const auto half = [&](uint16_t value) {
      result.bytes.push_back(static_cast<uint8_t>(value));
      result.bytes.push_back(static_cast<uint8_t>(value >> 8));
    };
    half(scale);
    if (type == SourceType::q4_1) half(minimum);
    float values[32];
    if (type == SourceType::q8_0) {
      for (float& value : values) {
        const auto q = static_cast<int8_t>(random() % 256);
        result.bytes.push_back(static_cast<uint8_t>(q));
        value = from_f16(scale) * static_cast<float>(q);
      }
    } else {
      for (int i = 0; i < 16; ++i) {
        const auto byte = static_cast<uint8_t>(random() % 256);
        result.bytes.push_back(byte);
        const auto value = [&](int q) {
          return type == SourceType::q4_0 ? from_f16(scale) * static_cast<float>(q - 8)
                                          : from_f16(scale) * static_cast<float>(q) + from_f16(minimum);
        };
        values[i] = value(byte & 15);
        values[i + 16] = value(byte >> 4);
      }
    }
    result.values.insert(result.values.end(), values, values + 32);
  }
  return result;
}

// --- packing

// How far a packed value may be from what it was, given the values of its group (or row).
double packing_error(const Shape& shape, const float* group, int64_t count, float value) {
  float low = group[0], high = group[0], most = 0;
  for (int64_t i = 0; i < count; ++i) {
    low = std::min(low, group[i]);
    high = std::max(high, group[i]);
    most = std::max(most, std::fabs(group[i]));
  }
  switch (shape.format) {
    case Format::f32:
      return 0;
    case Format::f16:
      return std::fabs(value) * 0x1p-11 + 0x1p-25;
    case Format::bf16:
      return std::fabs(value) * 0x1p-8;
    case Format::i8:
      return most / 127 * 0.51 + 127 * 0x1p-25;
    case Format::i4:
      // The search may clip the largest values to be nearer to the others.
      return (shape.minimum ? (high - low) / 15 : most / 8) * 1.5 + most * 0x1p-10 + 1e-6;
    default:
      return 0;  // nothing is rounded to it
  }
  return 0;
}

void check_packing(const Matrix& matrix, const std::vector<float>& expected) {
  const Shape& shape = matrix.shape();
  const std::vector<float> got = rows_of(matrix);
  const int64_t group = shape.group != 0 ? shape.group : shape.cols;
  double errors = 0, squares = 0;
  for (int64_t r = 0; r < shape.rows; ++r)
    for (int64_t k = 0; k < shape.cols; ++k) {
      const int64_t start = k / group * group, at = r * shape.cols + k;
      const float value = expected[static_cast<size_t>(at)];
      const double error = std::fabs(static_cast<double>(got[static_cast<size_t>(at)]) - value);
      const double allowed =
          packing_error(shape, expected.data() + r * shape.cols + start, std::min(group, shape.cols - start), value);
      if (!(error <= allowed)) {
        std::fprintf(stderr, "%s row %ld column %ld: %g packed as %g\n", name_of(shape).c_str(), static_cast<long>(r),
                     static_cast<long>(k), value, got[static_cast<size_t>(at)]);
        std::abort();
      }
      errors += error * error;
      squares += static_cast<double>(value) * value;
    }
  // Normally distributed weights: about 0.6 % for int8, 9 % for groups of 4-bit values.
  if (shape.format == Format::i4) CHECK(errors <= 0.11 * 0.11 * squares + 1e-9);
  if (shape.format == Format::i8) CHECK(errors <= 0.015 * 0.015 * squares + 1e-9);
}

void test_sources() {
  for (int64_t rows : {1, 15, 17})
    for (int64_t cols : {1, 31, 100, 576})
      for (const Shape& shape : shapes_of(rows, cols)) {
        if (!rounds(shape.format)) continue;
        const std::vector<float> values = random_floats(static_cast<size_t>(rows * cols), 1, 0.05f);
        for (SourceType type : {SourceType::f32, SourceType::f64, SourceType::f16, SourceType::bf16}) {
          std::vector<float> expected;
          for (float value : values) expected.push_back(rounded(value, type));
          const std::vector<uint8_t> bytes = as_source(values, type);
          const int64_t item = static_cast<int64_t>(bytes.size()) / (rows * cols);
          Matrix matrix(shape);
          matrix.set_rows(0, rows, {bytes.data(), type, item * cols, 0});
          check_packing(matrix, expected);
          // Transposed, row by row from the last one, and through an order: the same bits each time.
          std::vector<uint8_t> transposed(bytes.size());
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t k = 0; k < cols; ++k)
              std::memcpy(&transposed[static_cast<size_t>((k * rows + r) * item)],
                          &bytes[static_cast<size_t>((r * cols + k) * item)], static_cast<size_t>(item));
          Matrix other(shape);
          other.set_rows(0, rows, {transposed.data(), type, item, item * rows});
          CHECK(std::memcmp(matrix.block(0), other.block(0), shape.bytes()) == 0);
          Matrix single(shape);
          for (int64_t r = rows - 1; r >= 0; --r)
            single.set_rows(r, 1, {bytes.data() + r * item * cols, type, item * cols, 0});
          CHECK(rows_of(single) == rows_of(matrix));
          std::vector<int64_t> order;
          for (int64_t r = 0; r < rows; ++r) order.push_back(rows - 1 - r);
          Matrix reversed(shape);
          reversed.set_rows(0, rows, {bytes.data(), type, item * cols, 0}, order.data());
          const std::vector<float> forward = rows_of(matrix), backward = rows_of(reversed);
          for (int64_t r = 0; r < rows; ++r)
            CHECK(std::equal(forward.begin() + r * cols, forward.begin() + (r + 1) * cols,
                             backward.begin() + (rows - 1 - r) * cols));
        }
      }
}

void test_quantised_sources() {
  for (int64_t rows : {1, 15, 33})
    for (int64_t cols : {32, 96, 576})
      for (SourceType type : {SourceType::q8_0, SourceType::q4_0, SourceType::q4_1}) {
        const Ggml source = ggml(type, rows, cols, 3);
        CHECK(source_row_bytes(type, cols) * static_cast<size_t>(rows) == source.bytes.size());
        const Source from{source.bytes.data(), type, static_cast<int64_t>(source_row_bytes(type, cols)), 0};
        const Shape own = type == SourceType::q8_0 ? Shape{Format::i8, rows, cols, 32}
                                                   : Shape{Format::i4, rows, cols, 32, type == SourceType::q4_1};
        Matrix kept(own);
        kept.set_rows(0, rows, from);
        CHECK(rows_of(kept) == source.values);
        for (int group : {16, 32})  // a part of a matrix whose other parts have more bits
          for (bool minimum : {false, true}) {
            if (type == SourceType::q4_1 && !minimum) continue;
            Matrix wider({Format::i8, rows, cols, group, minimum});
            wider.set_rows(0, rows, from);
            CHECK(rows_of(wider) == source.values);
            if (type == SourceType::q8_0) continue;
            Matrix fewer({group == 16 ? Format::i6 : Format::i5, rows, cols, group, minimum});
            fewer.set_rows(0, rows, from);
            CHECK(rows_of(fewer) == source.values);
          }
        if (type == SourceType::q4_0) {
          Matrix with_minimum({Format::i4, rows, cols, 32, true});
          with_minimum.set_rows(0, rows, from);
          CHECK(rows_of(with_minimum) == source.values);
        }
        Matrix floats({Format::f32, rows, cols});
        floats.set_rows(0, rows, from);
        CHECK(rows_of(floats) == source.values);
        Matrix row_scales({Format::i8, rows, cols, 0});
        row_scales.set_rows(0, rows, from);
        check_packing(row_scales, source.values);
        for (int group : {64, 128}) {
          Matrix coarser({Format::i4, rows, cols, group, true});
          coarser.set_rows(0, rows, from);
          const std::vector<float> got = rows_of(coarser);
          for (size_t i = 0; i < got.size(); ++i) CHECK(std::fabs(got[i] - source.values[i]) < 3.0f);
        }
      }
}

void test_quantised_rows() {
  std::mt19937 random(5);
  for (int64_t rows : {1, 17})
    for (int64_t cols : {31, 100, 256})
      for (const Shape& shape : shapes_of(rows, cols)) {
        if (!quantised(shape.format)) continue;
        const int64_t group = shape.group != 0 ? shape.group : cols, groups = (cols + group - 1) / group;
        std::vector<uint8_t> q(static_cast<size_t>(rows * cols));
        for (uint8_t& value : q) value = static_cast<uint8_t>(random() % (1u << row_of(shape.format).bits));
        std::vector<float> scales = random_floats(static_cast<size_t>(rows * groups), 6, 0.1f);
        std::vector<float> minima = random_floats(static_cast<size_t>(rows * groups), 7, 0.1f);
        Matrix matrix(shape);
        const float* given = shape.minimum ? minima.data() : nullptr;
        matrix.set_quantised_rows(0, rows, q.data(), scales.data(), given);
        const std::vector<float> got = rows_of(matrix);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t k = 0; k < cols; ++k) {
            const auto at = static_cast<size_t>(r * cols + k), g = static_cast<size_t>(r * groups + k / group);
            const float scale = shape.group != 0 ? from_f16(to_f16(scales[g])) : scales[g];
            const float minimum = shape.minimum ? from_f16(to_f16(minima[g])) : 0.0f;
            const FormatRow& format = row_of(shape.format);
            const int value = shape.format == Format::i8 ? static_cast<int8_t>(q[at])
                              : format.codes != nullptr  ? format.codes[q[at]]
                                                         : q[at] - (shape.minimum ? 0 : 1 << (format.bits - 1));
            CHECK(got[at] == scale * static_cast<float>(value) + minimum);
          }
      }
}

template <class Fn>
void throws(const Fn& fn) {
  try {
    fn();
  } catch (const std::invalid_argument& error) {
    CHECK(std::strlen(error.what()) > 10);
    return;
  }
  std::fprintf(stderr, "no std::invalid_argument\n");
  std::abort();
}

void test_bad_arguments() {
  throws([] { check({Format::f32, 0, 5}); });
  throws([] { check({Format::f32, 5, -1}); });
  throws([] { check({Format::i4, 5, 5, 0}); });
  throws([] { check({Format::i4, 5, 5, 48}); });
  throws([] { check({Format::i8, 5, 5, 64}); });
  throws([] { check({Format::bf16, 5, 5, 32}); });
  throws([] { check({Format::i8, 5, 5, 0, true}); });
  throws([] { check({Format::bf16, 5, 5, 0, true}); });
  throws([] { check({Format::i2, 5, 5, 16, false}); });
  throws([] { check({Format::nl4, 5, 5, 32, true}); });
  throws([] { check({static_cast<Format>(9), 5, 5}); });
  throws([] { check({Format::f32, int64_t{1} << 40, int64_t{1} << 40}); });
  throws([] { Matrix({Format::f32, 1, 1}, nullptr, nullptr); });
  throws([] { source_row_bytes(SourceType::q4_0, 33); });
  Matrix matrix({Format::i4, 20, 64, 32});
  std::vector<float> values(20 * 64);
  const Source source{values.data(), SourceType::f32, 256, 0};
  throws([&] { matrix.set_rows(-1, 1, source); });
  throws([&] { matrix.set_rows(0, 21, source); });
  throws([&] { matrix.set_rows(19, 2, source); });
  throws([&] { matrix.set_rows(2, std::numeric_limits<int64_t>::max(), source); });
  throws([&] { matrix.set_rows(0, -1, source); });
  throws([&] { matrix.set_rows(0, 1, {nullptr, SourceType::f32, 256, 0}); });
  throws([&] { matrix.set_rows(0, 1, {values.data(), static_cast<SourceType>(77), 256, 0}); });
  throws([&] { matrix.set_rows(0, 1, {values.data(), SourceType::q4_0, 36, 4}); });
  const int64_t negative[] = {-1};
  throws([&] { matrix.set_rows(0, 1, source, negative); });
  throws([&] { Matrix().set_rows(0, 1, source); });
  std::vector<uint8_t> q(64, 3);
  std::vector<float> scales(2, 1.0f);
  throws([&] { matrix.set_quantised_rows(0, 1, q.data(), scales.data(), scales.data()); });
  throws([&] { matrix.set_quantised_rows(0, 1, q.data(), nullptr, nullptr); });
  throws([&] { matrix.set_quantised_rows(20, 1, q.data(), scales.data(), nullptr); });
  scales[1] = 1e6f;
  throws([&] { matrix.set_quantised_rows(0, 1, q.data(), scales.data(), nullptr); });
  scales[1] = 1.0f;
  q[5] = 16;
  throws([&] { matrix.set_quantised_rows(0, 1, q.data(), scales.data(), nullptr); });
  Matrix floats({Format::f32, 1, 64});
  throws([&] { floats.set_quantised_rows(0, 1, q.data(), scales.data(), nullptr); });
}

// What quantise4 does, written plainly: a row's scale and minimum, and its values.
struct PlainRow {
  uint16_t scale, minimum;
  std::vector<uint32_t> q;
};
PlainRow plain_row(const std::vector<float>& x, bool with_minimum) {
  const auto inverse = [](float v) { return std::fabs(v) > 1e-30f ? 1.0f / v : 0.0f; };
  const auto whole = [](float v, float least, float most) {
    v = (v + 12582912.0f) - 12582912.0f;
    v = v > least ? v : least;
    return v < most ? v : most;
  };
  float low = x[0], high = x[0], sum = 0, largest = 0, bad = 0;
  for (float v : x) {
    low = v < low ? v : low;
    high = v > high ? v : high;
    sum += v;
    largest = std::fabs(largest) < std::fabs(v) ? v : largest;
    bad += v * 0.0f;
  }
  const float range = high - low, middle = 0.5f * low + 0.5f * high, n = static_cast<float>(x.size());
  float scale = with_minimum ? range * (1.0f / 15.0f) : 0.0f, minimum = with_minimum ? low : 0.0f, best = 0;
  for (int c = -11; c <= 11; ++c) {
    const float inv = with_minimum ? (15.0f + 0.2f * static_cast<float>(c)) * inverse(range)
                                   : -(8.0f + 0.1f * static_cast<float>(c)) * inverse(largest);
    const float offset = 7.5f - middle * inv;
    float l = 0, ll = 0, xl = 0;
    for (float v : x) {
      const float q = with_minimum ? whole(v * inv + offset, 0, 15) : whole(v * inv, -8, 7);
      l += q;
      ll += q * q;
      xl += v * q;
    }
    const float variance = with_minimum ? n * ll - l * l : ll;
    const float covariance = with_minimum ? n * xl - l * sum : xl;
    const float candidate = covariance / (variance > 0 ? variance : 1.0f);
    if (!(covariance * candidate > best)) continue;
    best = covariance * candidate;
    scale = candidate;
    if (with_minimum) minimum = (sum - candidate * l) / n;
  }
  PlainRow row{to_f16(scale + bad), with_minimum ? to_f16(minimum) : uint16_t{0}, {}};
  const float inv = inverse(from_f16(row.scale)), offset = with_minimum ? -from_f16(row.minimum) * inv : 8.0f;
  for (float v : x) row.q.push_back(static_cast<uint32_t>(whole(v * inv + offset, 0, 15)));
  return row;
}

// Groups of all kinds of rows; without damaged ones and those that are far from zero the kernels leave limits out.
std::vector<float> pack_rows(int count, float sigma, bool all_kinds) {
  std::vector<float> x = random_floats(static_cast<size_t>(count) * 16, 11, sigma);
  for (int k = 0; k < count; ++k) {
    float* row = &x[static_cast<size_t>(k) * 16];
    row[1] = 0;
    row[2] = 0.25f;
    if (k == 0) row[7] *= 100.0f;
    row[6] = std::fabs(row[6]);
    if (!all_kinds) continue;
    row[3] = k == count - 1 ? kNaN : 0.25f;
    row[4] = k == 0 ? -kInfinity : 0.25f;
    row[5] += 1e4f * sigma;
    row[8] += 3e6f * sigma;
  }
  return x;
}

// All instruction sets pack alike: packed models are kept in files.
void test_pack_kernels() {
  for (int count : {1, 31, 32, 64, 100, 128})
    for (bool minimum : {false, true})
      for (float sigma : {0.02f, 1e-5f, 30.0f})
        for (bool all_kinds : {false, true}) {
          const std::vector<float> x = pack_rows(count, sigma, all_kinds);
          std::vector<uint32_t> expected(static_cast<size_t>(count + 7) / 8 * 16), halves(32);
          for (size_t r = 0; r < 16; ++r) {
            std::vector<float> values;
            for (int k = 0; k < count; ++k) values.push_back(x[static_cast<size_t>(k) * 16 + r]);
            const PlainRow row = plain_row(values, minimum);
            halves[r] = row.scale;
            halves[r + 16] = row.minimum;
            for (size_t k = 0; k < values.size(); ++k)
              expected[k / 8 * 16 + r] |= row.q[k] << (k % 4 * 8 + k % 8 / 4 * 4);
          }
          CHECK(std::isnan(from_f16(static_cast<uint16_t>(halves[3]))) == all_kinds);
          CHECK(std::isnan(from_f16(static_cast<uint16_t>(halves[4]))) == all_kinds);
          for (const Isa isa : kIsas) {
            if (!supported(isa)) continue;
            std::vector<uint32_t> lines(expected.size());
            std::vector<uint16_t> got(32);
            anyaccel::pick<PackKernels>(isa).quantise4(x.data(), count, lines.data(), got.data(),
                                                       minimum ? got.data() + 16 : nullptr);
            CHECK(lines == expected);
            CHECK(std::equal(got.begin(), got.end(), halves.begin()));
          }
        }
}

}  // namespace

int main() {
  test_bad_arguments();
  test_sources();
  test_quantised_sources();
  test_quantised_rows();
  test_pack_kernels();
  std::printf("ok\n");
  return 0;
}
