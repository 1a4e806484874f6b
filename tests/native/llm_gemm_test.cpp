// SPDX-License-Identifier: Apache-2.0
// Matrix products (gemm) of every format, size and instruction set against sums in double. Compiled with
// ANYACCEL_EMULATE, the kernels for instructions that this machine lacks run too (see simd/amx.h).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "llm/kernels/gemm.h"
#include "llm/kernels/gemm_select.h"
#include "llm_matrices.h"
#include "simd/convert.h"
#include "simd/pick.h"

namespace {

using namespace anyaccel;
using namespace anyaccel::llm;
using namespace anyaccel::simd;

constexpr Isa kIsas[] = {Isa::scalar, Isa::portable,    Isa::avx2,          Isa::avx_vnni,
                         Isa::avx512, Isa::avx512_vnni, Isa::avx512_bf16,   Isa::amx,
                         Isa::neon,   Isa::neon_dot,    Isa::neon_bf16_i8mm};

bool runs(Isa isa) {
  if (kQuick && isa != selected_isa()) return false;
#ifdef ANYACCEL_EMULATE
  isa = highest_of_every_kernel(isa);
#endif
  return can_run(isa);
}

// Whether instructions of this set are plain code here, which takes ten times as long.
bool emulated(Isa isa) {
#ifdef ANYACCEL_EMULATE
  return row_of(isa).variants == Variants::some_kernels;
#else
  static_cast<void>(isa);
  return false;
#endif
}

struct AlignedFree {
  void operator()(uint8_t* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<uint8_t[], AlignedFree>;
Memory aligned(size_t bytes) { return Memory(static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64))); }

float rounded(float value) { return from_bf16(to_bf16(value)); }

// A matrix and its values. They are converted once: the reference goes through them for every token of every check.
struct Case {
  Shape shape;
  Matrix matrix;
  std::vector<double> weights;  // [rows][cols], as stored
  std::vector<double> in_bf16;  // the same, rounded to bf16

  Case(const Shape& wanted, std::mt19937& random) : shape(wanted), matrix(wanted) {
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<size_t>(shape.rows * shape.cols));
    for (float& value : values) value = normal(random) * 0.1f + 0.01f;
    matrix = matrix_of(shape, values);
    for (int64_t r = 0; r < shape.rows; ++r) matrix.row(r, &values[static_cast<size_t>(r * shape.cols)]);
    weights.assign(values.begin(), values.end());
    for (const float value : values) in_bf16.push_back(rounded(value));
  }
};

// Activations rounded to 8 bits, with a scale for each 32 columns.
std::vector<double> as_bytes(const float* x, int64_t cols) {
  std::vector<double> result(static_cast<size_t>(cols));
  for (int64_t k = 0; k < cols; k += 32) {
    const int64_t end = std::min(cols, k + 32);
    float largest = 0;
    for (int64_t i = k; i < end; ++i) largest = std::max(largest, std::fabs(x[i]));
    for (int64_t i = k; i < end; ++i)
      result[static_cast<size_t>(i)] =
          std::nearbyint(x[i] * (127.0f / largest)) * static_cast<double>(largest / 127.0f);
  }
  return result;
}

// A row of activations as a kernel sees it: exactly, in bf16, or in bytes.
std::vector<double> as_operands(GemmKernels::Operands operands, const float* x, int64_t cols) {
  if (operands == GemmKernels::Operands::bytes) return as_bytes(x, cols);
  std::vector<double> result(x, x + cols);
  if (operands == GemmKernels::Operands::pairs)
    for (double& value : result) value = rounded(static_cast<float>(value));
  return result;
}

struct Sum {
  double value = 0, size = 0;  // the latter of absolute values, which bounds what rounding may do
};

// Four sums at a time, which a processor adds up beside each other.
Sum dot(const double* a, const double* b, int64_t count) {
  double sums[4] = {}, sizes[4] = {};
  int64_t k = 0;
  for (; k + 4 <= count; k += 4)
    for (int lane = 0; lane < 4; ++lane) {
      const double product = a[k + lane] * b[k + lane];
      sums[lane] += product;
      sizes[lane] += std::fabs(product);
    }
  for (; k < count; ++k) sums[0] += a[k] * b[k], sizes[0] += std::fabs(a[k] * b[k]);
  return {sums[0] + sums[1] + sums[2] + sums[3], sizes[0] + sizes[1] + sizes[2] + sizes[3]};
}

struct Variant {
  bool bias, add;
  float scale;
  bool rows;  // tokens in another order
};

void check_product(const Case& c, int tokens, Isa isa, int parts, const Variant& variant, std::mt19937& random) {
  const Shape& shape = c.shape;
  const GemmKernels& kernels = gemm_kernels(isa, shape);
  const GemvKernels& gemv = anyaccel::pick<GemvKernels>(std::min(isa, selected_isa()));
  std::normal_distribution<float> normal;
  const int64_t stride = shape.cols + 3, out_stride = shape.rows + 5;
  // Exactly as long as they are allowed to be read and written.
  std::vector<float> x(static_cast<size_t>(stride * (tokens - 1) + shape.cols));
  for (float& value : x) value = normal(random);
  std::vector<float> bias(static_cast<size_t>(shape.rows));
  for (float& value : bias) value = normal(random);
  std::vector<float> out(static_cast<size_t>(out_stride * (tokens - 1) + shape.rows)), before;
  for (float& value : out) value = normal(random);
  before = out;
  std::vector<int32_t> rows(static_cast<size_t>(tokens));
  for (int t = 0; t < tokens; ++t) rows[static_cast<size_t>(t)] = (t * 7 + 3) % tokens;

  const Memory input = aligned(gemm_bytes_on(kernels, shape, tokens));
  const int32_t* order = variant.rows ? rows.data() : nullptr;
  for (int part = 0; part < parts; ++part)
    gemm_prepare_on(kernels, shape, x.data(), stride, order, tokens, input.get(), part, parts);
  const Output output{out.data(), out_stride, variant.bias ? bias.data() : nullptr, variant.add, variant.scale};
  for (int part = parts - 1; part >= 0; --part)
    gemm_multiply_on(kernels, gemv, c.matrix, input.get(), tokens, output, part, parts);

  double worst = 0;
  for (int t = 0; t < tokens; ++t) {
    const float* row = &x[static_cast<size_t>((variant.rows ? rows[static_cast<size_t>(t)] : t) * stride)];
    const std::vector<double> operands = as_operands(kernels.operands, row, shape.cols);
    for (int64_t r = 0; r < out_stride; ++r) {
      const auto at = static_cast<size_t>(t * out_stride + r);
      if (at >= out.size()) break;
      if (r >= shape.rows) {
        CHECK(out[at] == before[at]);
        continue;
      }
      const std::vector<double>& weights = kernels.operands == GemmKernels::Operands::pairs ? c.in_bf16 : c.weights;
      auto [sum, size] = dot(operands.data(), &weights[static_cast<size_t>(r * shape.cols)], shape.cols);
      if (variant.bias) sum += bias[static_cast<size_t>(r)], size += std::fabs(bias[static_cast<size_t>(r)]);
      sum *= variant.scale;
      size *= std::fabs(variant.scale);
      if (variant.add) sum += before[at], size += std::fabs(before[at]);
      // A weight of zero is the difference of two products in formats without a sign.
      const double error = std::fabs(sum - out[at]) / (size + 0.1);
      worst = std::isnan(error) ? INFINITY : std::max(worst, error);
    }
  }
  // To its codes, of at most 12, some instruction sets add 128, which they subtract from the sums.
  const double limit = shape.format == Format::fp4 ? 2e-5 : 2e-6;
  if (!(worst < limit)) {
    std::fprintf(stderr, "%s format %d group %d: %lld x %lld, %d tokens, %d parts: error %g\n", isa_name(isa),
                 static_cast<int>(shape.format), shape.group, static_cast<long long>(shape.rows),
                 static_cast<long long>(shape.cols), tokens, parts, worst);
    std::abort();
  }
}

struct Kind {
  Format format;
  int group;
  bool minimum;
  ScaleKind scales = ScaleKind::halves;

  Shape shape(int64_t rows, int64_t cols) const {
    const int64_t whole = (cols + kSuperblock - 1) / kSuperblock * kSuperblock;
    return {format, rows, scales == ScaleKind::superblocks ? whole : cols, group, minimum, scales};
  }
};
constexpr ScaleKind kBlocks = ScaleKind::superblocks;
constexpr Kind kKinds[] = {{Format::f32, 0, false},
                           {Format::f16, 0, false},
                           {Format::bf16, 0, false},
                           {Format::i8, 0, false},
                           {Format::i8, 32, false},
                           {Format::i4, 32, false},
                           {Format::i8, 16, false},
                           {Format::i8, 16, true},
                           {Format::i8, 32, true},
                           {Format::i4, 32, true},
                           {Format::i4, 64, true},
                           {Format::i4, 128, false},
                           {Format::i6, 16, true},
                           {Format::i6, 16, false},
                           {Format::i5, 32, true},
                           {Format::i5, 32, false},
                           {Format::i3, 16, false},
                           {Format::i2, 16, true},
                           {Format::nl4, 32, false},
                           {Format::fp4, 32, false},
                           {Format::i6, 16, false, kBlocks},
                           {Format::i5, 32, true, kBlocks},
                           {Format::i4, 32, true, kBlocks},
                           {Format::i3, 16, false, kBlocks},
                           {Format::i2, 16, true, kBlocks},
                           {Format::nl4, 32, false, kBlocks},
                           {Format::fp4, 32, false, ScaleKind::powers}};
constexpr Variant kVariants[] = {{false, false, 1.0f, false},
                                 {true, false, 1.0f, true},
                                 {true, true, 0.5f, false},
                                 {false, true, 1.0f, true},
                                 {true, false, -2.0f, false}};

void every_kind_and_size() {
  constexpr int64_t kRows[] = {1, 17, kQuick ? 52 : 100}, kCols[] = {1, 33, 576};
  constexpr int kTokens[] = {17, kEmulated ? 21 : 63, kEmulated ? 35 : 200};
  std::mt19937 random(1);
  int count = 0;
  for (const Kind& kind : kKinds)
    for (int r = 0; r < 3; ++r)
      for (int k = 0; k < 3; ++k) {
        const Case c(kind.shape(kRows[r], kCols[k]), random);
        for (int t = 0; t < 3; ++t)
          for (const Isa isa : kIsas) {
            // A third of the sizes: every pair of rows and columns, rows and tokens, columns and tokens is among them.
            if (!runs(isa) || ((emulated(isa) || kEmulated) && (r + k + t) % 3 != 0)) continue;
            if (kQuick && r != 2) continue;
            check_product(c, kTokens[t], isa, 1 + count % 5, kVariants[(count / 5) % 5], random);
            ++count;
          }
      }
}

// Several passes over the columns, several chunks of rows and more tokens than one pass has.
void many_passes() {
  std::mt19937 random(2);
  for (const Kind& kind : kKinds) {
    const Case c(kind.shape(kQuick ? 20 : kEmulated ? 40 : 700, 1700), random);
    for (const Isa isa : kIsas)
      if (runs(isa)) check_product(c, kEmulated ? 17 : 40, isa, 2, kVariants[2], random);
  }
  const Case c({Format::bf16, kQuick ? 17 : 40, kQuick ? 33 : 100, 0, false}, random);
  for (const Isa isa : kIsas)
    if (runs(isa)) check_product(c, kEmulated ? 1100 : 2500, isa, 3, kVariants[1], random);
}

// A token's result is the same whatever the number of other tokens and of parts.
void alone_or_together() {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  constexpr int kMost = kEmulated ? 40 : 200, kStride = 1280;
  for (const Kind& kind : kKinds) {
    const Case c(kind.shape(kEmulated ? 20 : 100, kQuick ? 700 : 1100), random);
    const auto rows = static_cast<size_t>(c.shape.rows);
    std::vector<float> x(kMost * kStride);
    for (float& value : x) value = normal(random);
    for (const Isa isa : kIsas) {
      if (!runs(isa)) continue;
      const GemmKernels& kernels = gemm_kernels(isa, c.shape);
      const GemvKernels& gemv = anyaccel::pick<GemvKernels>(std::min(isa, selected_isa()));
      std::vector<float> first, out(kMost * rows);
      for (const int tokens : {kMost, 17, 31})
        for (const int parts : {1, 3}) {
          const Memory input = aligned(gemm_bytes_on(kernels, c.shape, tokens));
          gemm_prepare_on(kernels, c.shape, x.data(), kStride, nullptr, tokens, input.get(), 0, 1);
          for (int part = 0; part < parts; ++part)
            gemm_multiply_on(kernels, gemv, c.matrix, input.get(), tokens, {out.data(), c.shape.rows}, part, parts);
          if (first.empty()) first = out;
          CHECK(std::memcmp(first.data(), out.data(), static_cast<size_t>(tokens) * rows * 4) == 0);
        }
    }
  }
}

// Blocks of bfloat16 give the same bits where they are and unpacked.
void where_they_are_or_unpacked() {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  const Case c({Format::bf16, 100, 1100, 0, false}, random);
  std::vector<float> x(40 * 1100);
  for (float& value : x) value = normal(random);
  for (const Isa isa : kIsas) {
    if (!runs(isa)) continue;
    const GemmKernels& kernels = gemm_kernels(isa, c.shape);
    if (kernels.multiply_bf16 == nullptr) continue;
    GemmKernels unpacking = kernels;
    unpacking.multiply_bf16 = nullptr;
    const GemvKernels& gemv = anyaccel::pick<GemvKernels>(std::min(isa, selected_isa()));
    for (const int tokens : {16, 21, 40}) {
      std::vector<float> there(40 * 100), unpacked(40 * 100);
      const Memory input = aligned(gemm_bytes_on(kernels, c.shape, tokens));
      gemm_prepare_on(kernels, c.shape, x.data(), 1100, nullptr, tokens, input.get(), 0, 1);
      gemm_multiply_on(kernels, gemv, c.matrix, input.get(), tokens, {there.data(), 100}, 0, 1);
      gemm_multiply_on(unpacking, gemv, c.matrix, input.get(), tokens, {unpacked.data(), 100}, 0, 1);
      CHECK(there == unpacked);
    }
  }
}

// Pieces that threads take from each other: one that is alone computes all, and whoever does has the same bits.
void shared_pieces() {
  constexpr int kParts = 3, kTokens = 40;
  constexpr int64_t kRows = 1000, kCols = 256;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> x(kTokens * kCols);
  for (float& value : x) value = normal(random);
  for (const auto& [format, group] : {std::pair(Format::bf16, 0), std::pair(Format::i4, 32)}) {
    const Case c({format, kRows, kCols, group, false}, random);
    for (const Isa isa : kIsas) {
      if (!runs(isa)) continue;
      GemmKernels kernels = gemm_kernels(isa, c.shape);
      kernels.cache_bytes = 1;  // so that there are many pieces
      const GemvKernels& gemv = anyaccel::pick<GemvKernels>(std::min(isa, selected_isa()));
      const Memory input = aligned(gemm_bytes_on(kernels, c.shape, kTokens));
      gemm_prepare_on(kernels, c.shape, x.data(), kCols, nullptr, kTokens, input.get(), 0, 1);
      anyaccel::SharedItems items(kParts);
      uint64_t call = 0;
      const auto product = [&](const std::vector<int>& order, bool shared) {
        std::vector<float> out(kTokens * kRows, NAN);
        const Sharing sharing{shared ? &items : nullptr, ++call};
        const auto part = [&](int number) {
          gemm_multiply_on(kernels, gemv, c.matrix, input.get(), kTokens, {out.data(), kRows}, number, kParts, sharing);
        };
        if (!order.empty()) {
          for (const int number : order) part(number);
        } else {
          std::vector<std::thread> threads;
          for (int number = 0; number < kParts; ++number) threads.emplace_back(part, number);
          for (std::thread& thread : threads) thread.join();
        }
        return out;
      };
      const std::vector<float> expected = product({0, 1, 2}, false);
      CHECK(product({1}, true) == expected);
      CHECK(product({2, 0, 1}, true) == expected);
      for (int i = 0; i < 20; ++i) CHECK(product({}, true) == expected);
    }
  }
}

// What is not a number stays so, and only in its own token and row.
void not_finite() {
  std::mt19937 random(4);
  for (const Kind& kind : kKinds) {
    const Case c({kind.format, 40, 64, kind.group, kind.minimum}, random);
    for (const Isa isa : kIsas) {
      if (!runs(isa)) continue;
      const GemmKernels& kernels = gemm_kernels(isa, c.shape);
      std::vector<float> x(20 * 64, 1.0f), out(20 * 40);
      x[5 * 64 + 33] = NAN;
      x[6 * 64 + 1] = INFINITY;
      const Memory input = aligned(gemm_bytes_on(kernels, c.shape, 20));
      gemm_prepare_on(kernels, c.shape, x.data(), 64, nullptr, 20, input.get(), 0, 1);
      gemm_multiply_on(kernels, anyaccel::pick<GemvKernels>(std::min(isa, selected_isa())), c.matrix, input.get(), 20,
                       {out.data(), 40}, 0, 1);
      for (int t = 0; t < 20; ++t)
        for (int r = 0; r < 40; ++r) {
          const float value = out[static_cast<size_t>(t * 40 + r)];
          if (t == 5) CHECK(std::isnan(value));
          if (t == 6) CHECK(!std::isfinite(value));
          if (t != 5 && t != 6) CHECK(std::isfinite(value));
        }
    }
  }
}

}  // namespace

int main() {
  every_kind_and_size();
  many_passes();
  alone_or_together();
  where_they_are_or_unpacked();
  shared_pieces();
  not_finite();
  return 0;
}
