// SPDX-License-Identifier: Apache-2.0
// Products with few tokens (gemv) of packed weight matrices: every format and instruction set against sums in double.
// Instruction sets that this machine lacks are tested when the kernels are compiled with -DANYACCEL_EMULATE.
#include <algorithm>
#include <bit>
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

#include "check.h"
#include "llm/kernels/gemm.h"
#include "llm/kernels/gemv.h"
#include "llm/kernels/multiply.h"
#include "llm/pack/grouped.h"
#include "llm/pack/matrix.h"
#include "llm_shapes.h"
#include "simd/convert.h"
#include "simd/pick.h"

namespace {

using namespace anyaccel::llm;
using namespace anyaccel::simd;
using anyaccel::Isa;
using anyaccel::isa_name;

// --- products

struct Case {
  Matrix matrix;
  std::vector<float> weights;  // as packed
};
Case make_case(const Shape& shape, unsigned seed) {
  const std::vector<float> values = random_floats(static_cast<size_t>(shape.rows * shape.cols), seed, 0.05f);
  Case result{matrix_of(shape, values), {}};
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
  const GemvFunctions kernels = gemv_for(isa, shape.format);
  const Aligned input(gemv_bytes(shape, tokens));
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

// What products of the tokens and rows are, and the sums of absolute values, which bound what rounding may do.
struct Sums {
  std::vector<double> sum, size;  // [token][row]
};
Sums sums_of(const Case& what, const std::vector<float>& x, int64_t stride, int tokens) {
  const Shape& shape = what.matrix.shape();
  Sums result;
  for (int t = 0; t < tokens; ++t) {
    const std::vector<double> activations = seen(shape, x.data() + t * stride);
    for (int64_t r = 0; r < shape.rows; ++r) {
      double sum = 0, size = 0;
      for (int64_t k = 0; k < shape.cols; ++k) {
        const double part = what.weights[static_cast<size_t>(r * shape.cols + k)] * activations[static_cast<size_t>(k)];
        sum += part;
        size += std::fabs(part);
      }
      result.sum.push_back(sum);
      result.size.push_back(size);
    }
  }
  return result;
}

void check_close(const Shape& shape, const Sums& sums, const int32_t* rows, int tokens, const Output& options,
                 int64_t out_stride, const std::vector<float>& before, const std::vector<float>& got) {
  for (int t = 0; t < tokens; ++t) {
    const int64_t from = rows != nullptr ? rows[t] : t;
    for (int64_t r = 0; r < shape.rows; ++r) {
      const double bias = options.bias != nullptr ? options.bias[r] : 0.0;
      const double sum = sums.sum[static_cast<size_t>(from * shape.rows + r)] + bias,
                   size = sums.size[static_cast<size_t>(from * shape.rows + r)] + std::fabs(bias);
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

void test_product(Isa isa, const Case& what, const std::vector<float>& x, int64_t stride, const Sums& sums) {
  const Shape& shape = what.matrix.shape();
  const int64_t rows = shape.rows, out_stride = rows + 5;
  const std::vector<float> bias = random_floats(static_cast<size_t>(rows), 23);
  std::vector<int32_t> order;
  for (int t = 0; t < kGemvTokens; ++t) order.push_back((t * 7 + 3) % kGemvTokens);
  std::vector<float> alone;  // each token's result without the others
  for (int t = 0; t < kGemvTokens; ++t) {
    const int32_t row = t;
    const std::vector<float> one = product(isa, what.matrix, x, stride, &row, 1, {}, rows, 1, {});
    alone.insert(alone.end(), one.begin(), one.end());
  }
  for (int tokens = 1; tokens <= kGemvTokens; ++tokens) {
    if (shape.cols != 100 && tokens % 4 > 1) continue;  // all numbers of tokens with one size are enough
    if (kQuick && shape.cols != 100 && tokens % 15 != 1) continue;
    const std::vector<float> got = product(isa, what.matrix, x, stride, nullptr, tokens, {}, out_stride, 1, {});
    check_close(shape, sums, nullptr, tokens, {}, out_stride, {}, got);
    for (int t = 0; t < tokens; ++t) {
      CHECK(std::equal(got.begin() + t * out_stride, got.begin() + t * out_stride + rows, alone.begin() + t * rows));
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
    check_close(shape, sums, order.data(), tokens, options, out_stride, before, more);
  }
}

void test_products() {
  for (Isa isa : kIsas)
    if (!supported(isa)) std::printf("not tested on this machine: %s\n", isa_name(isa));
  constexpr int64_t kRows[] = {1, 15, 17, 112};  // 7 blocks: 4, 2 and 1 of them are multiplied at once
  constexpr int64_t kCols[] = {1, 31, 100, 576};
  for (int r = 0; r < 4; ++r)
    for (int k = 0; k < 4; ++k) {
      if (kEmulated && (r + k) % 2 != 0) continue;  // each number of rows and of columns, though not with each other
      if (kQuick && (r < 2 || k < 2)) continue;
      std::vector<Shape> shapes = shapes_of(kRows[r], kCols[k]);
      if (k % 2 != 0)  // one superblock, and three
        for (const Shape& shape : other_scales(kRows[r], kCols[k])) shapes.push_back(shape);
      for (const Shape& shape : shapes) {
        const Case what = make_case(shape, 21);
        const int64_t stride = shape.cols + 3;
        std::vector<float> x = random_floats(static_cast<size_t>(kGemvTokens * stride), 22, 2.0f);
        for (int64_t i = 0; i < shape.cols; i += 50) x[static_cast<size_t>(i)] *= 100;  // outliers
        std::fill(x.begin() + stride, x.begin() + stride + shape.cols, 0.0f);           // a token of zeros
        const Sums sums = sums_of(what, x, stride, kGemvTokens);
        for (Isa isa : kIsas)
          if (supported(isa)) test_product(isa, what, x, stride, sums);
        if (shape.format != Format::bf16 || !supported(Isa::avx512_bf16)) continue;
        std::vector<float> rounded = x;
        for (float& value : rounded) value = from_bf16(to_bf16(value));
        test_product(Isa::avx512_bf16, what, x, stride, sums_of(what, rounded, stride, kGemvTokens));
      }
    }
}

// Activations are rounded to the same 8 bits by all, halves to even ones: one by one, and 16 groups at a time. Answers
// of two instruction sets still differ where two tokens are nearly as likely, since sums of floats are rounded
// otherwise.
void test_rounding() {
  const Shape shape{Format::i4, 16, 17 * kActivationGroup + 5, 32, false};
  std::vector<float> x = random_floats(static_cast<size_t>(shape.padded_cols()), 25);
  std::fill(x.begin() + shape.cols, x.end(), 0.0f);
  for (size_t k = 0; k < 3 * kActivationGroup; ++k) {
    const float half = static_cast<float>(k) - 47.5f;  // times 1 it is rounded, and times a power of two
    x[k] = k % kActivationGroup == 0 ? 127.0f : half;
    x[k + 8 * kActivationGroup] = x[k] * -0x1p-20f;
  }
  for (Isa isa : kIsas) {
    if (!supported(isa)) continue;
    const Aligned input(gemv_bytes(shape, 1));
    const int64_t groups = shape.padded_cols() / kActivationGroup;
    anyaccel::pick<GemvKernels>(isa).prepare({layout_of(shape), x.data(), 0, nullptr, 1, input.data, 0, groups});
    const auto* q = reinterpret_cast<const int8_t*>(input.data);
    const auto* params = reinterpret_cast<const GroupParams*>(q + shape.padded_cols());
    for (int64_t g = 0; g < groups; ++g, q += kActivationGroup) {
      const float* from = x.data() + g * kActivationGroup;
      float most = 0;
      for (int i = 0; i < kActivationGroup; ++i) most = std::max(most, std::fabs(from[i]));
      int32_t sum = 0;
      for (int i = 0; i < kActivationGroup; ++i) {
        CHECK(static_cast<float>(q[i]) == std::nearbyint(from[i] * (127.0f / most)));
        sum += q[i];
      }
      CHECK(params[g].scale == most / 127.0f && params[g].scaled_sum == most / 127.0f * static_cast<float>(sum));
      CHECK(params[g].sum_8 == -8 * sum && params[g].sum_128 == -128 * sum);
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
          const int bits = row_of(shape.format).bits;
          q[i] = bits < 8 ? static_cast<uint8_t>(high ? (1 << bits) - 1 : 0) : static_cast<uint8_t>(high ? -128 : 127);
        }
        Case what{Matrix(shape), {}};
        what.matrix.set_quantised_rows(0, 16, q.data(), scales.data(), shape.minimum ? minima.data() : nullptr);
        what.weights = rows_of(what.matrix);
        std::vector<float> x(256, (kind & 2) != 0 ? -1.0f : 1.0f);
        check_close(shape, sums_of(what, x, 256, 1), nullptr, 1, {}, 16, {},
                    product(isa, what.matrix, x, 256, nullptr, 1, {}, 16, 1, {}));
        x.assign(256, (kind & 2) != 0 ? -3e38f : 1e-25f);
        const std::vector<float> got = product(isa, what.matrix, x, 256, nullptr, 1, {}, 16, 1, {});
        for (float value : got) CHECK((kind & 2) != 0 || (std::isfinite(value) && std::fabs(value) < 1e-19f));
      }
    }
  }
}

// What is not finite stays visible in the result, and only there.
void test_not_finite() {
  std::vector<Isa> isas(std::begin(kIsas), std::end(kIsas));
  isas.push_back(Isa::avx512_bf16);
  for (Isa isa : isas) {
    if (!supported(isa)) continue;
    for (const Shape& shape : shapes_of(17, 100)) {
      if (isa == Isa::avx512_bf16 && shape.format != Format::bf16) continue;
      for (float bad : {kNaN, kInfinity, -kInfinity}) {
        std::vector<float> x = random_floats(3 * 100, 31);
        x[100 + 40] = bad;
        const Case what = make_case(shape, 32);
        std::vector<float> got = product(isa, what.matrix, x, 100, nullptr, 3, {}, 17, 1, {});
        for (size_t i = 0; i < got.size(); ++i) CHECK(std::isfinite(got[i]) == (i / 17 != 1));
        std::vector<float> weights = random_floats(17 * 100, 33);
        weights[5 * 100 + 99] = bad;
        Matrix matrix(shape);
        matrix = matrix_of(shape, weights);
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
    const GemvKernels& kernels = anyaccel::pick<GemvKernels>(isa);
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
      if (kQuick && tokens != 3) continue;
      const Case what = make_case(shape, 51);
      std::vector<float> x = random_floats(16 * 300, 52);
      if (shape.format == Format::bf16)  // which some instruction sets round activations to
        for (float& value : x) value = from_bf16(to_bf16(value));
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
      check_close(shape, sums_of(what, x, 300, tokens), nullptr, tokens, {}, 100, {}, got);
    }
  CHECK(allocate_weights(0) != nullptr);
  const std::shared_ptr<void> large = allocate_weights((size_t{5} << 20) + 3);
  CHECK(reinterpret_cast<uintptr_t>(large.get()) % (size_t{2} << 20) == 0);
  for (size_t i = 0; i < (size_t{5} << 20) + 3; i += 4096) CHECK(static_cast<uint8_t*>(large.get())[i] == 0);
}

// More tokens than one product holds, in turns while a part of the weights is in a cache: as 16 at a time.
void test_turns() {
  constexpr int kTokens = 41, kRows = 700, kCols = 1100;
  for (const Shape& shape : shapes_of(kRows, kCols)) {
    if (gemm_from(shape) <= kTokens || kQuick || kEmulated) continue;
    const Case what = make_case(shape, 61);
    const std::vector<float> x = random_floats(kTokens * kCols, 62);
    std::vector<int32_t> rows(kTokens);
    for (int t = 0; t < kTokens; ++t) rows[static_cast<size_t>(t)] = (t * 7 + 3) % kTokens;
    Input input;
    input.reserve(shape, kTokens);
    for (int part = 0; part < 3; ++part) input.prepare(shape, x.data(), kCols, rows.data(), kTokens, part, 3);
    CHECK(!input.gemm());
    std::vector<float> got(kTokens * kRows), expected(got.size());
    for (int part = 0; part < 3; ++part) multiply(what.matrix, input, {got.data(), kRows}, part, 3);
    for (int first = 0; first < kTokens; first += kGemvTokens) {
      const int count = std::min(kGemvTokens, kTokens - first);
      input.prepare(shape, x.data(), kCols, rows.data() + first, count, 0, 1);
      multiply(what.matrix, input, {expected.data() + first * kRows, kRows}, 0, 1);
    }
    CHECK(got == expected);
  }
}

}  // namespace

int main() {
  if (std::endian::native != std::endian::little) {
    try {
      Matrix{Shape{Format::f32, 16, 16}};
      CHECK(false);
    } catch (const std::invalid_argument& error) {
      CHECK(std::strstr(error.what(), "big-endian") != nullptr);
    }
    return 0;
  }
  test_products();
  test_rounding();
  test_extremes();
  test_not_finite();
  test_unpack();
  test_threads();
  test_turns();
  std::printf("ok\n");
  return 0;
}
