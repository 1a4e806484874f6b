// SPDX-License-Identifier: Apache-2.0
// The row operations of the decoder in every instruction set, against double precision.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "llm/kernels/kernels_ops.h"
#include "llm/kernels/ops.h"
#include "simd/pick.h"

namespace {

using namespace anyaccel;
using namespace anyaccel::llm;

constexpr int64_t kSizes[] = {1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 80, 100, 128, 576, 1000, 2049};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::nanf("");
std::mt19937 generator(7);

// Of exactly n floats, so that a read or write beyond is seen.
using Row = std::unique_ptr<float[]>;
Row row(int64_t n, float scale = 1.0f, float offset = 0.0f) {
  Row result(new float[static_cast<size_t>(n)]);
  std::normal_distribution<float> normal(offset, scale);
  for (int64_t i = 0; i < n; ++i) result[static_cast<size_t>(i)] = normal(generator);
  return result;
}
Row copy(const Row& from, int64_t n) {
  Row result(new float[static_cast<size_t>(n)]);
  std::copy_n(from.get(), n, result.get());
  return result;
}
float* at(const Row& x, int64_t i) { return x.get() + i; }

bool close(double got, double want, double relative, double absolute) {
  if (std::isnan(want)) return std::isnan(got);
  if (std::isinf(want)) return got == want;
  return std::abs(got - want) <= relative * std::abs(want) + absolute;
}

std::vector<double> norm_oracle(const Norm& norm, const float* x, int64_t n) {
  double mean = 0, squares = 0;
  if (norm.kind == NormKind::layer)
    for (int64_t i = 0; i < n; ++i) mean += static_cast<double>(x[i]) / static_cast<double>(n);
  for (int64_t i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const double factor = 1.0 / std::sqrt(squares / static_cast<double>(n) + norm.eps);
  std::vector<double> out;
  for (int64_t i = 0; i < n; ++i)
    out.push_back((x[i] - mean) * factor * (norm.weight == nullptr ? 1.0 : norm.weight[i]) +
                  (norm.bias == nullptr ? 0.0 : norm.bias[i]));
  return out;
}

void test_norms(const OpKernels& ops) {
  for (const NormKind kind : {NormKind::rms, NormKind::layer}) {
    for (const int64_t n : kSizes) {
      for (int options = 0; options < 4; ++options) {
        const Row x = row(n, 3, kind == NormKind::layer ? 2.0f : 0.5f), y = row(n), weight = row(n), bias = row(n);
        const Norm norm{kind, 1e-5f, options & 1 ? weight.get() : nullptr, options & 2 ? bias.get() : nullptr};
        const Row out = row(n);
        ops.norm(norm, x.get(), n, out.get());
        const auto want = norm_oracle(norm, x.get(), n);
        const double noise = n == 1 ? 1e-3 : 3e-6;  // of one value, all that LayerNorm leaves is noise
        for (int64_t i = 0; i < n; ++i) CHECK(close(*at(out, i), want[static_cast<size_t>(i)], 2e-6, noise));
        const Row place = copy(x, n);
        ops.norm(norm, place.get(), n, place.get());
        for (int64_t i = 0; i < n; ++i) CHECK(*at(place, i) == *at(out, i));

        const Row residual = copy(x, n);
        ops.add_norm(residual.get(), y.get(), 0.5f, norm, n, out.get());
        for (int64_t i = 0; i < n; ++i) CHECK(close(*at(residual, i), *at(x, i) + 0.5 * *at(y, i), 1e-6, 1e-6));
        const auto sum = norm_oracle(norm, residual.get(), n);
        for (int64_t i = 0; i < n; ++i) CHECK(close(*at(out, i), sum[static_cast<size_t>(i)], 2e-6, noise));
      }
    }
  }
}

void test_dispatched() {
  const int64_t n = 24;
  const Row x = row(3 * n), weight = row(3 * n);
  const Norm rms{NormKind::rms, 1e-6f, weight.get(), nullptr};
  for (const bool own : {false, true}) {
    const Row heads = copy(x, 3 * n);
    norm_heads(rms, heads.get(), 3, n, own);
    for (int h = 0; h < 3; ++h) {
      const Norm one{NormKind::rms, 1e-6f, weight.get() + (own ? h * n : 0), nullptr};
      const auto want = norm_oracle(one, at(x, h * n), n);
      for (int64_t i = 0; i < n; ++i) CHECK(close(*at(heads, h * n + i), want[static_cast<size_t>(i)], 2e-6, 3e-6));
    }
  }
  const Row out = row(n), same = copy(x, n), y = row(n);
  norm(Norm{}, x.get(), n, out.get());
  add_norm(same.get(), y.get(), 1.0f, Norm{}, n, same.get());
  for (int64_t i = 0; i < n; ++i) {
    CHECK(*at(out, i) == *at(x, i));
    CHECK(close(*at(same, i), *at(x, i) + *at(y, i), 1e-6, 0));
  }
  CHECK(sigmoid(0) == 0.5f && sigmoid(-200) == 0.0f && sigmoid(200) == 1.0f);
}

void test_rope(const OpKernels& ops) {
  for (const int half : {1, 3, 4, 8, 16, 20, 32, 37, 64}) {
    for (const bool interleaved : {false, true}) {
      const int64_t stride = 2 * half + 5;
      const Row x = row(3 * stride), angle = row(half), cosine = row(half), sine = row(half);
      for (int i = 0; i < half; ++i) {
        *at(cosine, i) = std::cos(*at(angle, i));
        *at(sine, i) = std::sin(*at(angle, i));
      }
      const Row got = copy(x, 3 * stride);
      ops.rope(got.get(), 3, stride, cosine.get(), sine.get(), half, interleaved);
      for (int h = 0; h < 3; ++h) {
        for (int i = 0; i < half; ++i) {
          const int64_t a = h * stride + (interleaved ? 2 * i : i),
                        b = h * stride + (interleaved ? 2 * i + 1 : i + half);
          const double c = *at(cosine, i), s = *at(sine, i);
          CHECK(close(*at(got, a), *at(x, a) * c - *at(x, b) * s, 0, 1e-6));
          CHECK(close(*at(got, b), *at(x, b) * c + *at(x, a) * s, 0, 1e-6));
        }
        for (int64_t i = 2 * half; i < stride; ++i) CHECK(*at(got, h * stride + i) == *at(x, h * stride + i));
      }
    }
  }
}

double activation_oracle(Activation kind, double x) {
  const auto logistic = [](double v) { return 1 / (1 + std::exp(-v)); };
  switch (kind) {
    case Activation::silu:
      return x * logistic(x);
    case Activation::gelu:
      return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
    case Activation::gelu_tanh:
      return x * logistic(2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
    case Activation::gelu_quick:
      return x * logistic(1.702 * x);
    case Activation::relu:
      return std::max(0.0, x);
    case Activation::relu2:
      return std::max(0.0, x) * std::max(0.0, x);
    case Activation::swiglu_oai:
      return std::min(x, 7.0) * logistic(1.702 * std::min(x, 7.0));
    case Activation::xielu:
      break;  // has a test of its own
  }
  return 0;
}

void test_activations(const OpKernels& ops) {
  for (const Activation kind : {Activation::silu, Activation::gelu, Activation::gelu_tanh, Activation::gelu_quick,
                                Activation::relu, Activation::relu2, Activation::swiglu_oai}) {
    // Relative errors where the result is not negligible; the tails' arguments are rounded before exp.
    const int64_t n = 40001;
    const Row x = row(n), out = row(n);
    for (int64_t i = 0; i < n; ++i) *at(x, i) = static_cast<float>(i - 20000) * 1e-3f * (i % 7 == 0 ? 5.0f : 1.0f);
    *at(x, 0) = -1e30f;
    *at(x, 1) = 1e15f;
    *at(x, 2) = kNan;
    ops.activate(kind, x.get(), nullptr, n, out.get());
    for (int64_t i = 0; i < n; ++i) {
      const double v = *at(x, i), want = i == 2 ? kNan : activation_oracle(kind, v);
      CHECK(close(*at(out, i), want, v > -4 ? 1.2e-6 : 2e-5, 1e-10));
    }
    for (const int64_t m : kSizes) {
      const Row gate = row(m, 3), up = row(m, 5);
      const Row fused = copy(up, m);
      ops.activate(kind, gate.get(), fused.get(), m, fused.get());
      for (int64_t i = 0; i < m; ++i) {
        double factor = *at(up, i);
        if (kind == Activation::swiglu_oai) factor = 1 + std::clamp(factor, -7.0, 7.0);
        CHECK(close(*at(fused, i), activation_oracle(kind, *at(gate, i)) * factor, 2e-6, 1e-6));
      }
    }
  }
}

void test_learned_activation(const OpKernels& ops) {
  const double positive = 0.7, negative = 1.3, beta = 0.5, eps = -1e-6;
  for (const int64_t n : kSizes) {
    const Row x = row(n, 6);
    for (int64_t i = 0; i < n; i += 3) *at(x, i) *= 0.01f;
    const Row got = copy(x, n);
    ops.xielu(0.7f, 1.3f, 0.5f, -1e-6f, got.get(), n);
    for (int64_t i = 0; i < n; ++i) {
      const double v = *at(x, i);
      const double want = beta * v + (v > 0 ? positive * v * v : negative * (std::expm1(std::min(v, eps)) - v));
      CHECK(close(*at(got, i), want, 2e-6, 1e-7));
    }
  }
}

void test_row_statistics(const OpKernels& ops) {
  for (const int64_t n : kSizes) {
    const Row x = row(n, 3), y = row(n);
    double sum = 0, product = 0, spread = 0;
    for (int64_t i = 0; i < n; ++i) {
      *at(x, i) += 2;
      sum += *at(x, i);
      product += static_cast<double>(*at(x, i)) * *at(y, i);
    }
    CHECK(close(ops.dot(x.get(), y.get(), n), product, 1e-5, 1e-5 * static_cast<double>(n)));
    if (n == 0) continue;
    float mean, squares;
    ops.moments(x.get(), n, &mean, &squares);
    for (int64_t i = 0; i < n; ++i) spread += std::pow(*at(x, i) - sum / static_cast<double>(n), 2);
    CHECK(close(mean, sum / static_cast<double>(n), 1e-5, 1e-6) && close(squares, spread, 1e-5, 1e-5));
    const Row got = copy(x, n);
    ops.cut(got.get(), 2.25f, n);
    for (int64_t i = 0; i < n; ++i) CHECK(*at(got, i) == std::max(0.0f, *at(x, i) - 2.25f));
  }
}

void test_elementwise(const OpKernels& ops) {
  for (const int64_t n : kSizes) {
    const Row x = row(n, 40), y = row(n);
    Row got = copy(x, n);
    ops.scale(got.get(), 0.3f, n);
    for (int64_t i = 0; i < n; ++i) CHECK(close(*at(got, i), *at(x, i) * 0.3f, 1e-6, 0));
    got = copy(x, n);
    ops.add(got.get(), y.get(), -2.0f, n);
    for (int64_t i = 0; i < n; ++i) CHECK(close(*at(got, i), *at(x, i) - 2.0 * *at(y, i), 1e-6, 1e-6));
    got = copy(x, n);
    ops.clamp(got.get(), 8, n);
    for (int64_t i = 0; i < n; ++i) CHECK(*at(got, i) == std::clamp(*at(x, i), -8.0f, 8.0f));
    for (const float scale : {0.001f, 0.5f, 5.0f, 400.0f}) {
      const Row wide = row(n, scale * 30);
      got = copy(wide, n);
      ops.softcap(got.get(), 30, n);
      for (int64_t i = 0; i < n; ++i) CHECK(close(*at(got, i), 30 * std::tanh(*at(wide, i) / 30.0), 1e-6, 1e-12));
    }
    got = copy(x, n);
    ops.softmax(got.get(), n);
    double total = 0;
    const double top = *std::max_element(x.get(), x.get() + n);
    for (int64_t i = 0; i < n; ++i) total += std::exp(*at(x, i) - top);
    for (int64_t i = 0; i < n; ++i) CHECK(close(*at(got, i), std::exp(*at(x, i) - top) / total, 4e-6, 1e-37));
  }
  Row x = row(40);
  *at(x, 3) = -kInfinity;
  ops.softmax(x.get(), 40);
  CHECK(*at(x, 3) == 0.0f && *at(x, 4) > 0);
  *at(x, 39) = kNan;
  ops.softmax(x.get(), 40);
  for (int64_t i = 0; i < 40; ++i) CHECK(std::isnan(*at(x, i)));
  ops.softmax(x.get(), 0);
}

void test_argmax(const OpKernels& ops) {
  for (const int64_t n : {1, 3, 16, 17, 100, 1023, 1024, 1025, 5000, 49152, 200003}) {
    for (int round = 0; round < 20; ++round) {
      const Row x = row(n);
      const int64_t want = std::max_element(x.get(), x.get() + n) - x.get();
      CHECK(ops.argmax(x.get(), n) == want);
      const int64_t equal = static_cast<int64_t>(generator() % static_cast<uint64_t>(n));
      *at(x, equal) = *at(x, want);
      CHECK(ops.argmax(x.get(), n) == std::min(want, equal));
      *at(x, equal) = round % 2 != 0 ? kNan : kInfinity;
      CHECK(ops.argmax(x.get(), n) == -1);
      *at(x, equal) = -kInfinity;
      CHECK(ops.argmax(x.get(), n) == (n == 1 ? -1 : std::max_element(x.get(), x.get() + n) - x.get()));
      if (round > 3 && n > 10000) break;
    }
  }
  CHECK(ops.argmax(nullptr, 0) == -1);
  const Row none = row(50);
  std::fill_n(none.get(), 50, -kInfinity);
  CHECK(ops.argmax(none.get(), 50) == -1);
}

}  // namespace

int main() {
  for (const Isa isa : {Isa::scalar, Isa::portable, Isa::avx2, Isa::avx512, Isa::neon}) {
    if (!can_run(isa) || (kQuick && isa != highest_of_every_kernel(selected_isa()))) continue;
    const OpKernels& ops = anyaccel::pick<OpKernels>(isa);
    test_norms(ops);
    test_rope(ops);
    test_activations(ops);
    test_learned_activation(ops);
    test_row_statistics(ops);
    test_elementwise(ops);
    test_argmax(ops);
    std::printf("%s: passed\n", isa_name(isa));
  }
  test_dispatched();
  return 0;
}
