// SPDX-License-Identifier: Apache-2.0
// One layer as SmolLM2-135M has them, for counts of instructions: ours and ggml's program do the same work.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace layer {

constexpr int kHidden = 576, kHeads = 9, kKvHeads = 3, kHeadDim = 64, kMlp = 1536;
constexpr float kEps = 1e-5f;

// program FORMAT TOKENS CONTEXT TIMES: the layer is applied to TOKENS tokens after CONTEXT others, TIMES times.
struct Arguments {
  std::string format;  // bf16, int8 or int4
  int tokens, context, times;
};
inline Arguments arguments(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: %s bf16|int8|int4 TOKENS CONTEXT TIMES\n", argv[0]);
    std::exit(2);
  }
  return {argv[1], std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4])};
}

// The same numbers in both programs, between -size and size.
inline std::vector<float> numbers(size_t count, uint32_t seed, float size) {
  std::vector<float> result(count);
  uint32_t state = seed * 2654435761u + 1;
  for (float& value : result) {
    state = state * 1664525u + 1013904223u;
    value = (static_cast<float>(state >> 8) / 8388608.0f - 1.0f) * size;
  }
  return result;
}

// Of the result of the last token, for a comparison of the two.
inline void print(const float* result) {
  double sum = 0;
  for (int i = 0; i < kHidden; ++i) sum += result[i] * static_cast<double>(result[i]);
  std::printf("%.6g %.6g %.6g\n", std::sqrt(sum), static_cast<double>(result[0]), static_cast<double>(result[1]));
}

}  // namespace layer
