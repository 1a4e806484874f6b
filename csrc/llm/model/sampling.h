// SPDX-License-Identifier: Apache-2.0
// Choosing the next token from logits, as Hugging Face's logits processors and warpers do, in their order.
#pragma once

#include <cstdint>
#include <utility>
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
  // DRY, as llama.cpp has it: a token that would go on with a repetition of `length` tokens loses
  // multiplier * base^(length - allowed). No repetition reaches across a breaker: a token, and those that follow it.
  float dry_multiplier = 0.0f, dry_base = 1.75f;  // 0: off
  int dry_allowed_length = 2;
  int64_t dry_last_n = -1;  // tokens of `history` that count; -1: all, 0: off
  std::vector<std::vector<int64_t>> dry_breakers = {};
  // XTC, as llama.cpp has it: with this probability, of the tokens that are at least as likely as the threshold all but
  // the least likely one are left out.
  float xtc_probability = 0.0f, xtc_threshold = 0.1f;
  std::vector<std::pair<int64_t, float>> bias = {};  // token, what is added to its logit before anything else
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
  std::vector<float> kept;  // logits before sampling changed them
};

// The next token. `logits` are changed. `history`: prompt and generated tokens of this sequence, `prompt` of which are
// the prompt's. `suppressed`: tokens that must not come (end tokens before min_new_tokens). Tokens outside the
// vocabulary are passed over. `mask`: bit t % 32 of word t / 32 says whether token t may come; null: all may.
// Returns -1 when the logits hold a NaN or nothing finite.
int64_t sample(float* logits, int64_t vocabulary, const SamplingOptions& options, const int64_t* history,
               int64_t history_length, int64_t prompt, const int64_t* suppressed, int64_t suppressed_count,
               Random& random, SamplingScratch& scratch, const uint32_t* mask = nullptr);

// The log-probability of a token, and of the likeliest ones, best first.
struct TokenScore {
  int64_t token = -1;
  float logprob = 0;
  std::vector<std::pair<int64_t, float>> top;
};
// Scores a token by the softmax of the logits as they are. Returns false when they hold a NaN or nothing finite.
bool score(const float* logits, int64_t vocabulary, int64_t token, int top, SamplingScratch& scratch, TokenScore& out);

}  // namespace anyaccel::llm
