// SPDX-License-Identifier: Apache-2.0
// The causal convolution, linear attention and the selective scan in every instruction set, against double precision,
// and a token at a time against all at once: these have the same bits.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "llm/kernels/kernels_mixers.h"
#include "simd/pick.h"

namespace {

using namespace anyaccel;
using namespace anyaccel::llm;

std::mt19937 generator(7);

// Of exactly n floats, so that a sanitizer sees a read or write beyond.
std::vector<float> random(int64_t n, float scale = 1.0f) {
  std::vector<float> result(static_cast<size_t>(n));
  std::normal_distribution<float> normal(0.0f, scale);
  for (float& value : result) value = normal(generator);
  return result;
}

bool close(const std::vector<float>& got, const std::vector<double>& want) {
  double largest = 0, difference = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    largest = std::max(largest, std::abs(want[i]));
    difference = std::max(difference, std::abs(static_cast<double>(got[i]) - want[i]));
  }
  return difference <= 1e-5 * largest + 1e-7;  // of few values that are about 1, the sum may be nearly 0
}

void test_convolution(const MixerKernels& kernels, int kernel, int64_t channels, bool gates) {
  constexpr int64_t kTokens = 11;
  const std::vector<float> x = random(kTokens * channels), in = random(kTokens * channels),
                           out = random(kTokens * channels), taps = random(kernel * channels), bias = random(channels),
                           before = random((kernel - 1) * channels);
  Convolution conv{kernel, taps.data(), channels, bias.data(), !gates, nullptr, nullptr};
  if (gates) {
    conv.in_gate = in.data();
    conv.out_gate = out.data();
  }
  std::vector<double> want(x.size()), seen(before.begin(), before.end());
  for (size_t i = 0; i < x.size(); ++i)
    seen.push_back(gates ? static_cast<double>(x[i]) * static_cast<double>(in[i]) : static_cast<double>(x[i]));
  for (int64_t t = 0; t < kTokens; ++t)
    for (int64_t c = 0; c < channels; ++c) {
      const auto i = static_cast<size_t>(t * channels + c);
      double sum = static_cast<double>(bias[static_cast<size_t>(c)]);
      for (int64_t j = 0; j < kernel; ++j)
        sum += static_cast<double>(taps[static_cast<size_t>(j * channels + c)]) *
               seen[static_cast<size_t>((t + j) * channels + c)];
      want[i] = gates ? sum * static_cast<double>(out[i]) : sum / (1 + std::exp(-sum));
    }
  std::vector<float> all = x, state = before;
  kernels.convolve(conv, all.data(), channels, kTokens, channels, state.data(), channels);
  CHECK(close(all, want));
  CHECK(close(state, {seen.end() - static_cast<ptrdiff_t>(before.size()), seen.end()}));

  std::vector<float> each = x, own = before;
  for (int64_t t = 0; t < kTokens; ++t) {
    Convolution here = conv;
    if (gates) {
      here.in_gate += t * channels;
      here.out_gate += t * channels;
    }
    kernels.convolve(here, each.data() + t * channels, channels, 1, channels, own.data(), channels);
  }
  CHECK(each == all && own == state);
}

void test_linear_attention(const MixerKernels& kernels, int key_dim, int value_dim, bool delta, bool channels) {
  constexpr int kTokens = 9;
  const float size = 1.0f / std::sqrt(static_cast<float>(key_dim));
  const std::vector<float> q = random(kTokens * key_dim, size), k = random(kTokens * key_dim, size),
                           v = random(kTokens * value_dim), before = random(int64_t{key_dim} * value_dim);
  const std::vector<float> decay(kTokens, 0.9f), strength(kTokens, 0.6f);
  std::vector<float> decays = random(kTokens * key_dim);
  for (float& each : decays) each = channels ? 1.0f / (1.0f + std::exp(-each)) : 0.9f;
  LinearHead head{};
  head.key_dim = key_dim;
  head.value_dim = value_dim;
  head.delta = delta;
  head.key_stride = key_dim;
  head.value_stride = head.out_stride = value_dim;
  head.decay = decay.data();
  head.strength = strength.data();
  head.skip = delta ? 0.0f : 0.3f;

  std::vector<double> s(before.begin(), before.end()), want;
  for (int t = 0; t < kTokens; ++t)
    for (int j = 0; j < value_dim; ++j) {
      const auto at = [&](int i) -> double& { return s[static_cast<size_t>(i * value_dim + j)]; };
      const auto key = [&](int i) { return static_cast<double>(k[static_cast<size_t>(t * key_dim + i)]); };
      const auto value = static_cast<double>(v[static_cast<size_t>(t * value_dim + j)]);
      double known = 0, result = static_cast<double>(head.skip) * value;
      for (int i = 0; i < key_dim; ++i) {
        at(i) *= static_cast<double>(decays[static_cast<size_t>(t * key_dim + i)]);
        known += key(i) * at(i);
      }
      const double written = static_cast<double>(0.6f) * (value - (delta ? known : 0.0));
      for (int i = 0; i < key_dim; ++i) {
        at(i) += key(i) * written;
        result += static_cast<double>(q[static_cast<size_t>(t * key_dim + i)]) * at(i);
      }
      want.push_back(result);
    }
  const auto run = [&](int step, std::vector<float>& state) {
    std::vector<float> out(static_cast<size_t>(kTokens * value_dim));
    for (int t = 0; t < kTokens; t += step) {
      LinearHead part = head;
      part.tokens = step;
      part.q = q.data() + t * key_dim;
      part.k = k.data() + t * key_dim;
      part.decays = channels ? decays.data() + t * key_dim : nullptr;
      part.v = v.data() + t * value_dim;
      part.state = state.data();
      part.out = out.data() + t * value_dim;
      kernels.attend_linearly(part);
    }
    return out;
  };
  std::vector<float> state = before, own = before;
  const std::vector<float> all = run(kTokens, state), each = run(1, own);
  CHECK(close(all, want) && close(state, s));
  CHECK(each == all && own == state);
}

void test_decays(const MixerKernels& kernels, int64_t count) {
  const std::vector<float> x = random(count, 8.0f), bias = random(count);
  std::vector<float> out(x.size());
  kernels.decays(x.data(), bias.data(), 1.7f, count, out.data());
  std::vector<double> want;
  for (size_t i = 0; i < x.size(); ++i)
    want.push_back(std::exp(static_cast<double>(-1.7f) *
                            std::log1p(std::exp(static_cast<double>(x[i]) + static_cast<double>(bias[i])))));
  CHECK(close(out, want));
}

void test_scan(const MixerKernels& kernels, int state_dim, int64_t channels) {
  constexpr int64_t kTokens = 7;
  const std::vector<float> x = random(kTokens * channels), gates = random(kTokens * channels), skip = random(channels),
                           steps = random(kTokens * channels, 4.0f), before = random(state_dim * channels),
                           b = random(kTokens * state_dim), c = random(kTokens * state_dim);
  std::vector<float> rates = random(state_dim * channels);
  for (float& rate : rates) rate = -std::exp(rate);
  std::vector<double> s(before.begin(), before.end()), want(x.size());
  for (int64_t t = 0; t < kTokens; ++t)
    for (int64_t i = 0; i < channels; ++i) {
      const auto at = static_cast<size_t>(t * channels + i);
      const double step = std::log1p(std::exp(static_cast<double>(steps[at]))), in = static_cast<double>(x[at]);
      double result = static_cast<double>(skip[static_cast<size_t>(i)]) * in;
      for (int64_t n = 0; n < state_dim; ++n) {
        double& state = s[static_cast<size_t>(n * channels + i)];
        const auto key = static_cast<size_t>(t * state_dim + n);
        state = state * std::exp(step * static_cast<double>(rates[static_cast<size_t>(n * channels + i)])) +
                step * in * static_cast<double>(b[key]);
        result += static_cast<double>(c[key]) * state;
      }
      const auto gate = static_cast<double>(gates[at]);
      want[at] = result * gate / (1 + std::exp(-gate));
    }
  const auto run = [&](int64_t step, std::vector<float>& state) {
    std::vector<float> out = x;
    for (int64_t t = 0; t < kTokens; t += step) {
      const SelectiveScan scan{state_dim,
                               rates.data(),
                               channels,
                               skip.data(),
                               steps.data() + t * channels,
                               channels,
                               gates.data() + t * channels,
                               b.data() + t * state_dim,
                               c.data() + t * state_dim,
                               state_dim};
      kernels.scan(scan, out.data() + t * channels, channels, step, channels, state.data(), channels);
    }
    return out;
  };
  std::vector<float> state = before, own = before;
  const std::vector<float> all = run(kTokens, state), each = run(1, own);
  CHECK(close(all, want) && close(state, s));
  CHECK(each == all && own == state);
}

void test_recurrence(const MixerKernels& kernels, int64_t channels, bool opens) {
  constexpr int64_t kTokens = 7;
  const std::vector<float> x = random(kTokens * channels), rates = random(channels), bias = random(2 * channels),
                           gates = random(kTokens * 2 * channels, 4.0f), before = random(channels);
  std::vector<double> s(before.begin(), before.end()), want(x.size());
  const auto sigmoid_of = [](float value, float of) {
    return 1 / (1 + std::exp(-static_cast<double>(value) - static_cast<double>(of)));
  };
  for (int64_t t = 0; t < kTokens; ++t)
    for (int64_t i = 0; i < channels; ++i) {
      const auto at = static_cast<size_t>(t * channels + i), gate = static_cast<size_t>(2 * t * channels + i);
      const auto channel = static_cast<size_t>(i), other = static_cast<size_t>(channels + i);
      const double rate = 8 * std::log1p(std::exp(static_cast<double>(rates[channel])));
      const double decay = std::exp(-rate * sigmoid_of(gates[gate + static_cast<size_t>(channels)], bias[other]));
      const double in = sigmoid_of(gates[gate], bias[channel]) * static_cast<double>(x[at]);
      s[channel] = decay * s[channel] + (t == 0 && opens ? in : std::sqrt(1 - decay * decay) * in);
      want[at] = s[channel];
    }
  const auto run = [&](int64_t step, std::vector<float>& state) {
    std::vector<float> out = x;
    for (int64_t t = 0; t < kTokens; t += step) {
      const float* const own = gates.data() + 2 * t * channels;
      kernels.recur(
          {rates.data(), own, own + channels, 2 * channels, bias.data(), bias.data() + channels, opens && t == 0},
          out.data() + t * channels, channels, step, channels, state.data());
    }
    return out;
  };
  std::vector<float> state = before, own = before;
  const std::vector<float> all = run(kTokens, state), each = run(1, own);
  CHECK(close(all, want) && close(state, s));
  CHECK(each == all && own == state);
}

}  // namespace

int main() {
  for (const Isa isa : {Isa::scalar, Isa::portable, Isa::avx2, Isa::avx512, Isa::neon}) {
    if (!can_run(isa) || (kQuick && isa != highest_of_every_kernel(selected_isa()))) continue;
    const MixerKernels& kernels = anyaccel::pick<MixerKernels>(isa);
    for (const int kernel : {1, 2, 3, 4, 7, kMostTaps})
      for (const int64_t channels : {1, 8, 17, 64, 100})
        for (const bool gates : {false, true}) test_convolution(kernels, kernel, channels, gates);
    for (const auto& [key_dim, value_dim] : {std::pair{1, 1}, {7, 5}, {16, 16}, {33, 40}, {128, 128}, {64, 100}})
      for (const bool delta : {false, true})
        for (const bool channels : {false, true}) test_linear_attention(kernels, key_dim, value_dim, delta, channels);
    for (const int64_t count : {1, 17, 100}) test_decays(kernels, count);
    for (const int state_dim : {1, 7, 16})
      for (const int64_t channels : {1, 8, 17, 100}) test_scan(kernels, state_dim, channels);
    for (const int64_t channels : {1, 8, 17, 100})
      for (const bool opens : {false, true}) test_recurrence(kernels, channels, opens);
    std::printf("%s: passed\n", isa_name(isa));
  }
  return 0;
}
