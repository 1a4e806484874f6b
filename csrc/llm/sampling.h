// SPDX-License-Identifier: Apache-2.0
// Choosing the next token from logits, as Hugging Face's logits processors and warpers do, in their order.
#pragma once

#include <cstdint>
#include <vector>

namespace anyaccel::llm {

struct SamplingOptions {
  bool do_sample = false;
  float temperature = 1.0f;                                 // > 0; used with do_sample
  int top_k = 0;                                            // 0: off
  float top_p = 1.0f;                                       // 1: off
  float min_p = 0.0f;                                       // 0: off
  float typical_p = 1.0f;                                   // 1: off
  float repetition_penalty = 1.0f;                          // of tokens in `history`
  float presence_penalty = 0.0f, frequency_penalty = 0.0f;  // OpenAI's, over generated tokens only
  int no_repeat_ngram = 0;
};

// xoshiro256** (Blackman and Vigna, 2018), seeded by splitmix64: the same seed gives the same tokens everywhere.
class Random {
 public:
  explicit Random(uint64_t seed = 0);
  double uniform();  // in [0, 1)
 private:
  uint64_t state_[4];
};

// Temporary memory, kept from step to step.
struct SamplingScratch {
  std::vector<float> values;
  std::vector<int32_t> indices;
  std::vector<double> weights;
};

// The next token. `logits` are changed. `history`: prompt and generated tokens of this sequence, `prompt` of which are
// the prompt's. `suppressed`: tokens that must not come (end tokens before min_new_tokens). Tokens outside the
// vocabulary are passed over.
// Returns -1 when the logits hold a NaN or nothing finite.
int64_t sample(float* logits, int64_t vocabulary, const SamplingOptions& options, const int64_t* history,
               int64_t history_length, int64_t prompt, const int64_t* suppressed, int64_t suppressed_count,
               Random& random, SamplingScratch& scratch);

}  // namespace anyaccel::llm
