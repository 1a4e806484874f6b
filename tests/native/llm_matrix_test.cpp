// SPDX-License-Identifier: Apache-2.0
// Packed weight matrices and small products: every format, source and instruction set against sums in double.
// Instruction sets that this machine lacks are tested when the kernels are compiled with -DANYACCEL_EMULATE.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/isa.h"
#include "llm/convert.h"
#include "llm/grouped.h"
#include "llm/matrix.h"
#include "llm/pack.h"
#include "llm/small.h"

namespace anyaccel::llm {
const PackKernels& pack_kernels_scalar();
#ifdef ANYACCEL_X86
const PackKernels& pack_kernels_avx2();
const PackKernels& pack_kernels_avx512();
#endif
}  // namespace anyaccel::llm

namespace {

using namespace anyaccel::llm;
using anyaccel::Isa;
using anyaccel::isa_name;

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

bool supported(Isa isa) {
  if (isa <= anyaccel::selected_isa()) return true;
#ifdef ANYACCEL_EMULATE
  return anyaccel::selected_isa() >= Isa::avx512;
#else
  return false;
#endif
}
constexpr Isa kIsas[] = {Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512_vnni};

// Exactly as much memory as is used, aligned: reads beyond are seen by the sanitizer.
struct Aligned {
  explicit Aligned(size_t size) : data(static_cast<uint8_t*>(std::aligned_alloc(64, std::max<size_t>(size, 64)))) {}
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  ~Aligned() { std::free(data); }
  uint8_t* data;
};

std::vector<float> random_floats(size_t count, unsigned seed, float sigma = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<float> result(count);
  for (float& value : result) value = normal(random);
  return result;
}

bool quantised(Format format) { return format == Format::i8 || format == Format::i4; }

std::string name_of(const Shape& shape) {
  const char* names[] = {"f32", "f16", "bf16", "i8", "i4"};
  return std::string(names[static_cast<int>(shape.format)]) + " group " + std::to_string(shape.group) +
         (shape.minimum ? " minimum" : "") + " " + std::to_string(shape.rows) + "x" + std::to_string(shape.cols);
}

// Every format for a size.
std::vector<Shape> shapes_of(int64_t rows, int64_t cols) {
  std::vector<Shape> shapes = {{Format::f32, rows, cols},
                               {Format::f16, rows, cols},
                               {Format::bf16, rows, cols},
                               {Format::i8, rows, cols, 0},
                               {Format::i8, rows, cols, 32}};
  for (int group : {32, 64, 128})
    for (bool minimum : {false, true}) shapes.push_back({Format::i4, rows, cols, group, minimum});
  return shapes;
}

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

std::vector<float> rows_of(const Matrix& matrix) {
  const Shape& shape = matrix.shape();
  std::vector<float> result(static_cast<size_t>(shape.rows * shape.cols));
  for (int64_t r = 0; r < shape.rows; ++r) matrix.row(r, result.data() + r * shape.cols);
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
        for (uint8_t& value : q) value = static_cast<uint8_t>(random() % (shape.format == Format::i4 ? 16 : 256));
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
            const int value = shape.format == Format::i8 ? static_cast<int8_t>(q[at]) : q[at] - (shape.minimum ? 0 : 8);
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
  throws([] { check({Format::i8, 5, 5, 32, true}); });
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

// All instruction sets pack alike: packed models are kept in files.
void test_pack_kernels() {
#ifdef ANYACCEL_X86
  for (int count : {1, 31, 32, 64, 100, 128})
    for (bool minimum : {false, true})
      for (float sigma : {0.02f, 1e-5f, 30.0f}) {
        std::vector<float> x = random_floats(static_cast<size_t>(count) * 16, 11, sigma);
        for (int k = 0; k < count; ++k) {
          x[static_cast<size_t>(k) * 16 + 1] = 0;
          x[static_cast<size_t>(k) * 16 + 2] = 0.25f;
          x[static_cast<size_t>(k) * 16 + 3] = k == count - 1 ? kNaN : 0.25f;
          x[static_cast<size_t>(k) * 16 + 4] = k == 0 ? -kInfinity : 0.25f;
        }
        const auto pack = [&](const PackKernels& kernels) {
          std::vector<uint8_t> q(x.size());
          std::vector<uint16_t> halves(32);
          kernels.quantise4(x.data(), count, q.data(), halves.data(), minimum ? halves.data() + 16 : nullptr);
          CHECK(std::isnan(from_f16(halves[3])) && std::isnan(from_f16(halves[4])));
          CHECK(*std::max_element(q.begin(), q.end()) < 16);
          for (uint16_t half : halves)
            q.push_back(static_cast<uint8_t>(half)), q.push_back(static_cast<uint8_t>(half >> 8));
          return q;
        };
        const std::vector<uint8_t> expected = pack(pack_kernels_scalar());
        if (supported(Isa::avx2)) CHECK(pack(pack_kernels_avx2()) == expected);
        if (supported(Isa::avx512)) CHECK(pack(pack_kernels_avx512()) == expected);
      }
#endif
}

// --- products

struct Case {
  Matrix matrix;
  std::vector<float> weights;  // as packed
};
Case make_case(const Shape& shape, unsigned seed) {
  const std::vector<float> values = random_floats(static_cast<size_t>(shape.rows * shape.cols), seed, 0.05f);
  Case result{Matrix(shape), {}};
  result.matrix.set_rows(0, shape.rows, {values.data(), SourceType::f32, shape.cols * 4, 0});
  result.weights = rows_of(result.matrix);
  return result;
}

// Activations as products with quantised weights see them.
std::vector<double> seen(const Shape& shape, const float* x) {
  std::vector<double> result(x, x + shape.cols);
  if (!quantised(shape.format)) return result;
  for (int64_t start = 0; start < shape.cols; start += kActivationGroup) {
    const int64_t end = std::min<int64_t>(start + kActivationGroup, shape.cols);
    float most = 0;
    for (int64_t k = start; k < end; ++k) most = std::max(most, std::fabs(x[k]));
    if (!(most > 1e-30f)) continue;
    const float factor = 127.0f / most, scale = most / 127.0f;
    for (int64_t k = start; k < end; ++k)
      result[static_cast<size_t>(k)] = std::nearbyint(x[k] * factor) * static_cast<double>(scale);
  }
  return result;
}

std::vector<float> product(Isa isa, const Matrix& matrix, const std::vector<float>& x, int64_t stride,
                           const int32_t* rows, int tokens, const Output& options, int64_t out_stride, int parts,
                           const std::vector<float>& before) {
  const Shape& shape = matrix.shape();
  const SmallKernels& kernels = small_kernels(isa);
  const Aligned input(small_bytes(shape, tokens));
  const int64_t groups = shape.padded_cols() / kActivationGroup;
  for (int part = 0; part < parts; ++part)
    kernels.prepare({layout_of(shape), x.data(), stride, rows, tokens, input.data, groups * part / parts,
                     groups * (part + 1) / parts});
  std::vector<float> out = before;
  out.resize(static_cast<size_t>((tokens - 1) * out_stride + shape.rows), -77.0f);
  Output output = options;
  output.data = out.data();
  output.stride = out_stride;
  for (int part = 0; part < parts; ++part) {
    const Blocks blocks = blocks_of(shape, part, parts);
    kernels.multiply(
        {layout_of(shape), matrix.block(0), shape.rows, input.data, tokens, output, blocks.begin, blocks.end});
  }
  return out;
}

void check_close(const Case& what, const std::vector<float>& x, int64_t stride, const int32_t* rows, int tokens,
                 const Output& options, int64_t out_stride, const std::vector<float>& before,
                 const std::vector<float>& got) {
  const Shape& shape = what.matrix.shape();
  for (int t = 0; t < tokens; ++t) {
    const float* from = x.data() + (rows != nullptr ? rows[t] : t) * stride;
    const std::vector<double> activations = seen(shape, from);
    for (int64_t r = 0; r < shape.rows; ++r) {
      double sum = options.bias != nullptr ? options.bias[r] : 0.0, size = std::fabs(sum);
      for (int64_t k = 0; k < shape.cols; ++k) {
        const double weight = what.weights[static_cast<size_t>(r * shape.cols + k)];
        sum += weight * activations[static_cast<size_t>(k)];
        size += std::fabs(weight * activations[static_cast<size_t>(k)]);
      }
      const auto at = static_cast<size_t>(t * out_stride + r);
      const double old = options.add ? before[at] : 0.0;
      const double expected = old + sum * options.scale;
      // A rounding boundary that the double sum puts on the other side moves an activation by one step.
      const double error = std::fabs(got[at] - expected),
                   allowed = (size * std::fabs(options.scale) + std::fabs(old)) * 4e-6 + 1e-12;
      if (!(error <= allowed)) {
        std::fprintf(stderr, "%s token %d of %d row %ld: %.9g, not %.9g\n", name_of(shape).c_str(), t, tokens,
                     static_cast<long>(r), static_cast<double>(got[at]), expected);
        std::abort();
      }
    }
  }
}

void test_products() {
  for (Isa isa : kIsas) {
    if (!supported(isa)) {
      std::printf("not tested on this machine: %s\n", isa_name(isa));
      continue;
    }
    for (int64_t rows : {1, 15, 17, 48})
      for (int64_t cols : {1, 31, 100, 576})
        for (const Shape& shape : shapes_of(rows, cols)) {
          const Case what = make_case(shape, 21);
          const int64_t stride = cols + 3, out_stride = rows + 5;
          std::vector<float> x = random_floats(static_cast<size_t>(kSmallTokens * stride), 22, 2.0f);
          for (int64_t k = 0; k < cols; k += 50) x[static_cast<size_t>(k)] *= 100;  // outliers
          std::fill(x.begin() + stride, x.begin() + stride + cols, 0.0f);           // a token of zeros
          const std::vector<float> bias = random_floats(static_cast<size_t>(rows), 23);
          std::vector<int32_t> order;
          for (int t = 0; t < kSmallTokens; ++t) order.push_back((t * 7 + 3) % kSmallTokens);
          std::vector<float> alone;  // each token's result without the others
          for (int t = 0; t < kSmallTokens; ++t) {
            const int32_t row = t;
            const std::vector<float> one = product(isa, what.matrix, x, stride, &row, 1, {}, rows, 1, {});
            alone.insert(alone.end(), one.begin(), one.end());
          }
          for (int tokens = 1; tokens <= kSmallTokens; ++tokens) {
            if (cols != 100 && tokens % 4 > 1) continue;  // all numbers of tokens with one size are enough
            const std::vector<float> got = product(isa, what.matrix, x, stride, nullptr, tokens, {}, out_stride, 1, {});
            check_close(what, x, stride, nullptr, tokens, {}, out_stride, {}, got);
            for (int t = 0; t < tokens; ++t) {
              CHECK(std::equal(got.begin() + t * out_stride, got.begin() + t * out_stride + rows,
                               alone.begin() + t * rows));
              for (int64_t r = rows; r < out_stride && t + 1 < tokens; ++r)
                CHECK(got[static_cast<size_t>(t * out_stride + r)] == -77.0f);  // nothing between tokens is written
            }
            CHECK(product(isa, what.matrix, x, stride, nullptr, tokens, {}, out_stride, 3, {}) == got);
            Output options{};
            options.bias = bias.data();
            options.add = tokens % 2 == 0;
            options.scale = 0.25f;
            const std::vector<float> before = random_floats(static_cast<size_t>((tokens - 1) * out_stride + rows), 24);
            const std::vector<float> more =
                product(isa, what.matrix, x, stride, order.data(), tokens, options, out_stride, 2, before);
            check_close(what, x, stride, order.data(), tokens, options, out_stride, before, more);
          }
        }
  }
}

// The largest values that there are, where sums in few bits could overflow or saturate.
void test_extremes() {
  for (Isa isa : kIsas) {
    if (!supported(isa)) continue;
    for (const Shape& shape : shapes_of(16, 256)) {
      if (!quantised(shape.format)) continue;
      const int64_t groups = shape.group != 0 ? 256 / shape.group : 1;
      const std::vector<float> scales(static_cast<size_t>(16 * groups), 1.0f), minima(scales.size(), -7.0f);
      for (int kind = 0; kind < 4; ++kind) {
        std::vector<uint8_t> q(16 * 256);
        for (size_t i = 0; i < q.size(); ++i) {
          const bool high = (kind & 1) != 0 || i % 3 == 0;
          q[i] = shape.format == Format::i4 ? (high ? 15 : 0) : static_cast<uint8_t>(high ? -128 : 127);
        }
        Case what{Matrix(shape), {}};
        what.matrix.set_quantised_rows(0, 16, q.data(), scales.data(), shape.minimum ? minima.data() : nullptr);
        what.weights = rows_of(what.matrix);
        std::vector<float> x(256, (kind & 2) != 0 ? -1.0f : 1.0f);
        check_close(what, x, 256, nullptr, 1, {}, 16, {}, product(isa, what.matrix, x, 256, nullptr, 1, {}, 16, 1, {}));
        x.assign(256, (kind & 2) != 0 ? -3e38f : 1e-25f);
        const std::vector<float> got = product(isa, what.matrix, x, 256, nullptr, 1, {}, 16, 1, {});
        for (float value : got) CHECK((kind & 2) != 0 || (std::isfinite(value) && std::fabs(value) < 1e-19f));
      }
    }
  }
}

// What is not finite stays visible in the result, and only there.
void test_not_finite() {
  for (Isa isa : kIsas) {
    if (!supported(isa)) continue;
    for (const Shape& shape : shapes_of(17, 100)) {
      for (float bad : {kNaN, kInfinity, -kInfinity}) {
        std::vector<float> x = random_floats(3 * 100, 31);
        x[100 + 40] = bad;
        const Case what = make_case(shape, 32);
        std::vector<float> got = product(isa, what.matrix, x, 100, nullptr, 3, {}, 17, 1, {});
        for (size_t i = 0; i < got.size(); ++i) CHECK(std::isfinite(got[i]) == (i / 17 != 1));
        std::vector<float> weights = random_floats(17 * 100, 33);
        weights[5 * 100 + 99] = bad;
        Matrix matrix(shape);
        matrix.set_rows(0, 17, {weights.data(), SourceType::f32, 400, 0});
        x[100 + 40] = 1.0f;
        got = product(isa, matrix, x, 100, nullptr, 3, {}, 17, 1, {});
        for (size_t i = 0; i < got.size(); ++i) CHECK(std::isfinite(got[i]) == (i % 17 != 5));
      }
    }
  }
}

void test_unpack() {
  for (Isa isa : kIsas) {
    if (!supported(isa)) continue;
    const SmallKernels& kernels = small_kernels(isa);
    for (int64_t cols : {1, 31, 100, 576})
      for (const Shape& shape : shapes_of(17, cols)) {
        const Case what = make_case(shape, 41);
        const int64_t padded = shape.padded_cols();
        for (int64_t k0 = 0; k0 < padded; k0 += 96)
          for (int64_t block = 0; block < 2; ++block) {
            const int64_t k1 = std::min(padded, k0 + 96);
            const auto count = static_cast<size_t>(k1 - k0);
            const Aligned floats(count * 64), pairs(count * 32);
            auto* panel = reinterpret_cast<float*>(floats.data);
            auto* panel16 = reinterpret_cast<uint16_t*>(pairs.data);
            kernels.unpack(layout_of(shape), what.matrix.block(block), k0, k1, panel);
            kernels.unpack_bf16(layout_of(shape), what.matrix.block(block), k0, k1, panel16);
            for (int64_t k = k0; k < k1; ++k)
              for (int64_t r = 0; r < 16; ++r) {
                const int64_t row = block * 16 + r;
                const float got = panel[(k - k0) * 16 + r];
                const float expected = k < cols && row < 17 ? what.weights[static_cast<size_t>(row * cols + k)] : 0.0f;
                if (row < 17) CHECK(std::fabs(got - expected) <= std::fabs(expected) * 1e-6f + 1e-9f);
                CHECK(panel16[((k - k0) / 2 * 16 + r) * 2 + k % 2] == to_bf16(got));
              }
          }
      }
  }
}

// The interface that the model uses: threads that share the work.
void test_threads() {
  for (const Shape& shape : shapes_of(100, 300))
    for (int tokens : {1, 3, 16}) {
      const Case what = make_case(shape, 51);
      const std::vector<float> x = random_floats(16 * 300, 52);
      Input alone;
      alone.reserve(shape, 16);
      alone.prepare(shape, x.data(), 300, nullptr, tokens, 0, 1);
      CHECK(alone.tokens() == tokens);
      std::vector<float> expected(static_cast<size_t>(tokens * 100)), got(expected.size());
      multiply(what.matrix, alone, {expected.data(), 100}, 0, 1);
      Input shared;
      shared.reserve(shape, 16);
      const auto on_threads = [](const std::function<void(int)>& fn) {
        std::vector<std::thread> threads;
        for (int part = 0; part < 3; ++part) threads.emplace_back(fn, part);
        for (std::thread& thread : threads) thread.join();
      };
      on_threads([&](int part) { shared.prepare(shape, x.data(), 300, nullptr, tokens, part, 3); });
      on_threads([&](int part) { multiply(what.matrix, shared, {got.data(), 100}, part, 3); });
      CHECK(got == expected);
      check_close(what, x, 300, nullptr, tokens, {}, 100, {}, got);
    }
  CHECK(allocate_weights(0) != nullptr);
  const std::shared_ptr<void> large = allocate_weights((size_t{5} << 20) + 3);
  CHECK(reinterpret_cast<uintptr_t>(large.get()) % (size_t{2} << 20) == 0);
  for (size_t i = 0; i < (size_t{5} << 20) + 3; i += 4096) CHECK(static_cast<uint8_t*>(large.get())[i] == 0);
}

}  // namespace

int main() {
  test_bad_arguments();
  test_sources();
  test_quantised_sources();
  test_quantised_rows();
  test_pack_kernels();
  test_products();
  test_extremes();
  test_not_finite();
  test_unpack();
  test_threads();
  std::printf("ok\n");
  return 0;
}
