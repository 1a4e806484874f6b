// SPDX-License-Identifier: Apache-2.0
// How fast products with few tokens (gemv) read their weights, beside the fastest of the loops of
// llm/kernels/bandwidth.h that only read as much memory.
//
//   gemv [--cached | --model] [format ...]     formats: f32 f16 bf16 i8 i8g16 i8g32 i4g32 i4g64 i4g128 i4g32m
//                                                   i6g16 i5g32m i3g16 i2g16m nl4g32 fp4g32
//
// Weights of more than 600 MB are gone through matrix by matrix, so that each comes from memory; --cached repeats
// matrices with SmolLM2-135M's shapes instead, which stay in the caches. Each matrix is timed by itself and the best
// times count: the machine may have other work. --model: all matrices of SmolLM2-135M and of a 1.2 B model one after
// another with a barrier after each, as in decoding one token, or one of each of several sequences: the tokens a second
// that matrices alone would allow.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "common/team.h"
#include "llm/kernels/bandwidth.h"
#include "llm/kernels/multiply.h"
#include "llm/pack/matrix.h"
#include "simd/isa.h"

namespace {

using namespace anyaccel::llm;
using anyaccel::Range;
using anyaccel::Team;

constexpr size_t kTotal = size_t{640} << 20;
constexpr size_t kMatrix = size_t{8} << 20;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Kind {
  const char* name;
  Format format;
  int group;
  bool minimum;
};
constexpr Kind kKinds[] = {
    {"f32", Format::f32, 0, false},    {"f16", Format::f16, 0, false},     {"bf16", Format::bf16, 0, false},
    {"i8", Format::i8, 0, false},      {"i8g32", Format::i8, 32, false},   {"i4g32", Format::i4, 32, false},
    {"i4g64", Format::i4, 64, false},  {"i4g128", Format::i4, 128, false}, {"i4g32m", Format::i4, 32, true},
    {"i8g16", Format::i8, 16, false},  {"i6g16", Format::i6, 16, false},   {"i5g32m", Format::i5, 32, true},
    {"i3g16", Format::i3, 16, false},  {"i2g16m", Format::i2, 16, true},   {"nl4g32", Format::nl4, 32, false},
    {"fp4g32", Format::fp4, 32, false}};

std::vector<float> random_floats(size_t count) {
  std::mt19937 random(1);
  std::vector<float> result(count);
  for (float& value : result) value = static_cast<float>(random() % 2001) * 1e-3f - 1.0f;
  return result;
}

// Copies of one matrix, `count` of them.
std::vector<Matrix> matrices(const Shape& shape, size_t count) {
  const std::vector<float> values = random_floats(static_cast<size_t>(shape.rows * shape.cols));
  const std::shared_ptr<void> memory = allocate_weights(shape.bytes() * count);
  std::vector<Matrix> result;
  for (size_t i = 0; i < count; ++i)
    result.emplace_back(shape, memory, static_cast<uint8_t*>(memory.get()) + shape.bytes() * i);
  if (!is_quantised(shape.format) || shape.format == Format::i8 || shape.format == Format::i4) {
    result[0].set_rows(0, shape.rows, {values.data(), SourceType::f32, shape.cols * 4, 0});
  } else {
    std::vector<uint8_t> q;
    for (float value : values)
      q.push_back(static_cast<uint8_t>(value * 50 + 50) & ((1 << row_of(shape.format).bits) - 1));
    const std::vector<float> scales(values.size() / static_cast<size_t>(shape.group), 0.1f);
    result[0].set_quantised_rows(0, shape.rows, q.data(), scales.data(), shape.minimum ? scales.data() : nullptr);
  }
  for (size_t i = 1; i < count; ++i)
    std::memcpy(static_cast<uint8_t*>(memory.get()) + shape.bytes() * i, memory.get(), shape.bytes());
  return result;
}

// Best bytes a second of fn(matrix, thread), which all threads call for one matrix at a time.
double best_rate(Team& team, const std::vector<Matrix>& weights, int passes,
                 const std::function<void(const Matrix&, int)>& fn) {
  std::vector<double> rates;
  for (int pass = 0; pass < passes; ++pass)
    for (const Matrix& w : weights) {
      const double start = now();
      team.run([&](int thread) { fn(w, thread); });
      rates.push_back(static_cast<double>(w.shape().bytes()) / (now() - start));
    }
  // Not the very best one, which may be luck.
  std::sort(rates.begin(), rates.end(), std::greater<>());
  return rates[std::min<size_t>(rates.size() / 50, 3)];
}

void run(const Kind& kind, int64_t rows, int64_t cols, bool cached) {
  Shape shape{kind.format, 16, cols, kind.group, kind.minimum};
  shape.rows = rows != 0 ? rows : static_cast<int64_t>(kMatrix / shape.block_bytes()) * 16;
  const std::vector<Matrix> weights = matrices(shape, cached ? 1 : kTotal / shape.bytes());
  const std::vector<float> x = random_floats(static_cast<size_t>(cols * kGemvTokens));
  std::vector<float> out(static_cast<size_t>(shape.rows * kGemvTokens));
  for (int threads : {1, 2}) {
    Team team(threads);
    const int passes = cached ? std::max<int>(20, static_cast<int>((size_t{200} << 20) / shape.bytes())) : 3;
    const double plain = read_bandwidth(std::max(cached ? shape.bytes() : kTotal, size_t{1} << 16), threads, passes);
    std::printf("%-7s %5ldx%-5ld %d thread%s read %5.1f GB/s;", kind.name, static_cast<long>(shape.rows),
                static_cast<long>(cols), threads, threads == 1 ? " " : "s", plain * 1e-9);
    for (int tokens : {1, 4, 8, 16}) {
      std::vector<Input> inputs(static_cast<size_t>(threads));
      for (Input& input : inputs) input.reserve(shape, tokens);
      // As in decoding: every thread prepares an input of its own.
      const double rate =
          best_rate(team, weights, tokens == 1 || cached ? passes : 2, [&](const Matrix& w, int thread) {
            Input& input = inputs[static_cast<size_t>(thread)];
            input.prepare(shape, x.data(), cols, nullptr, tokens, 0, 1);
            multiply(w, input, {out.data(), shape.rows}, thread, threads);
          });
      std::printf("  m=%d %5.1f (%3.0f %%)", tokens, rate * 1e-9, 100 * rate / plain);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

// Decoding as far as weights go.
void run_model(const Kind& kind, const char* name, int layers, const std::vector<std::pair<int64_t, int64_t>>& layer,
               std::pair<int64_t, int64_t> head) {
  std::vector<Shape> shapes;
  for (int i = 0; i < layers; ++i)
    for (const auto& [rows, cols] : layer) shapes.push_back({kind.format, rows, cols, kind.group, kind.minimum});
  shapes.push_back({kind.format, head.first, head.second, kind.group, kind.minimum});
  size_t bytes = 0, offset = 0;
  int64_t most_cols = 0, most_rows = 0;
  for (const Shape& shape : shapes) {
    bytes += shape.bytes();
    most_cols = std::max(most_cols, shape.cols);
    most_rows = std::max(most_rows, shape.rows);
  }
  const std::shared_ptr<void> memory = allocate_weights(bytes);
  auto* start = static_cast<uint8_t*>(memory.get());
  std::vector<Matrix> weights;
  for (const Shape& shape : shapes) {
    weights.emplace_back(shape, memory, start + offset);
    offset += shape.bytes();
  }
  std::memset(start, 0, bytes);  // the values do not matter, pages of their own do
  const std::vector<float> x = random_floats(static_cast<size_t>(most_cols * kGemvTokens));
  std::vector<float> out(static_cast<size_t>(most_rows * kGemvTokens));
  for (int threads : {1, 2}) {
    Team team(threads);
    const auto best_of = [&](const auto& fn) {
      double best = 1e9;
      for (int i = 0; i < (bytes > (size_t{1} << 29) ? 4 : 10); ++i) {
        const double begin = now();
        team.run(fn);
        best = std::min(best, now() - begin);
      }
      return best;
    };
    const double plain = read_bandwidth(kTotal, threads, 3);
    std::printf("%-7s %-8s %6.1f MB %d thread%s read %5.1f GB/s;", kind.name, name, static_cast<double>(bytes) * 1e-6,
                threads, threads == 1 ? " " : "s", plain * 1e-9);
    for (int tokens : {1, 2, 4, 8}) {
      std::vector<Input> inputs(static_cast<size_t>(threads));
      for (Input& input : inputs)
        for (const Shape& shape : shapes) input.reserve(shape, tokens);
      const double seconds = best_of([&](int thread) {
        Input& input = inputs[static_cast<size_t>(thread)];
        for (const Matrix& w : weights) {
          input.prepare(w.shape(), x.data(), w.shape().cols, nullptr, tokens, 0, 1);
          multiply(w, input, {out.data(), most_rows}, thread, threads);
          if (threads > 1) team.barrier(thread);
        }
      });
      const double rate = static_cast<double>(bytes) / seconds;
      std::printf("  m=%d %5.1f GB/s (%3.0f %%)", tokens, rate * 1e-9, 100 * rate / plain);
      if (tokens == 1) std::printf(" %5.1f token/s", 1 / seconds);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  bool cached = false, model = false;
  std::vector<std::string> names;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--cached") == 0)
      cached = true;
    else if (std::strcmp(argv[i], "--model") == 0)
      model = true;
    else
      names.push_back(argv[i]);
  }
  std::printf("kernels: %s; GB/s of weights, and as part of what loops that only read reach\n",
              anyaccel::isa_name(anyaccel::selected_isa()));
  for (const Kind& kind : kKinds) {
    if (!names.empty() && std::find(names.begin(), names.end(), kind.name) == names.end()) continue;
    if (model) {
      run_model(kind, "SmolLM2", 30, {{960, 576}, {576, 576}, {3072, 576}, {576, 1536}}, {49152, 576});
      run_model(kind, "1.2 B", 16, {{3072, 2048}, {2048, 2048}, {16384, 2048}, {2048, 8192}}, {128256, 2048});
    } else if (cached) {
      // SmolLM2-135M: fused query, key and value; output; fused gate and up; down; head.
      for (const auto& [rows, cols] : {std::pair{960, 576}, {576, 576}, {3072, 576}, {576, 1536}, {49152, 576}})
        run(kind, rows, cols, true);
    } else {
      run(kind, 0, 2048, false);
    }
  }
  return 0;
}
