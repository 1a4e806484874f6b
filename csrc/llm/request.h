// SPDX-License-Identifier: Apache-2.0
// One answer under way.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "llm/sampling.h"

namespace anyaccel::llm {

class Model;

struct RequestOptions {
  // What comes of the prompt: an answer; nothing, as only its scores are wanted; the hidden states after the last norm,
  // their mean over the prompt's tokens or that of its last token, divided by the 2-norm.
  enum class Goal : uint8_t { answer, scores, mean, last };

  Goal goal = Goal::answer;
  SamplingOptions sampling;
  uint64_t seed = 0;
  int64_t max_new_tokens = 0;  // 0: as many as the context takes
  int64_t min_new_tokens = 0;
  std::vector<int64_t> end_tokens;
  bool ignore_end = false;
  // How many likeliest tokens are told beside each one of the answer, and of the prompt, with log-probabilities of the
  // logits as the model gives them; -1: none, and not those of the tokens themselves.
  int logprobs = -1, prompt_logprobs = -1;
};

class Request {
 public:
  // `prefix`: its cache is shared as far as both have the same tokens. Throws UsageError.
  Request(std::shared_ptr<Model> model, std::vector<int64_t> prompt, RequestOptions options,
          std::shared_ptr<Request> prefix, bool keep_logits);
  ~Request();
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  enum class Finish { no, end, length, stopped };

  const std::shared_ptr<Model>& model() const { return model_; }
  // Chosen since the prompt or the last extend().
  std::vector<int64_t> tokens() const;
  // The number of tokens before those.
  int64_t prompt_length() const;
  Finish finished() const;
  // No more steps; its cache is freed.
  void finish();
  // Goes on with more prompt; `max_new_tokens` counts anew, 0 keeps its value. Throws UsageError.
  void extend(const std::vector<int64_t>& tokens, int64_t max_new_tokens);
  // [vocab], of the last step. Throws UsageError when they were not kept.
  void copy_logits(float* out) const;

  // --- for callers that share caches themselves
  // Begins with the first `tokens` tokens of another request's cache, which are the same as its own; before the first
  // step. Throws UsageError.
  void share(const Request& other, int64_t tokens);
  // Forgets what is in the cache from token `tokens` on; a request that goes on computes it again.
  void shrink(int64_t tokens);
  // Tokens in the cache.
  int64_t cached() const;
  // Which tokens may come in the next step, see sample(); of vocab bits. Throws UsageError.
  void set_mask(std::vector<uint32_t> mask);
  // Of the answer's tokens since the last call.
  std::vector<TokenScore> take_scores();
  // Of the prompt's tokens from the second on.
  std::vector<TokenScore> prompt_scores() const;
  // [hidden], once the prompt has been processed. Throws UsageError before, and without such a goal.
  std::vector<float> embedding() const;

 private:
  friend class Model;

  // Called with the model's lock held.
  int64_t pending() const { return static_cast<int64_t>(tokens_.size()) - cached_; }
  bool answering() const { return options_.goal == RequestOptions::Goal::answer; }
  // Adds hidden states of the tokens at position, position + 1, ...; those that were there before are passed over.
  void pool(const float* hidden, int64_t width, int64_t position, int64_t count);
  void share_prefix();

  const std::shared_ptr<Model> model_;
  RequestOptions options_;
  std::shared_ptr<Request> prefix_;  // until the first step
  const bool keep_logits_;
  int sequence_ = -1;
  int64_t cached_ = 0;           // tokens whose keys and values are in the cache
  std::vector<int64_t> tokens_;  // all
  int64_t prompt_;               // how many of them came before the answer
  Finish finished_ = Finish::no;
  Random random_;
  std::vector<float> logits_;
  int64_t context_ = 0;  // the length that what is in the cache was computed for
  int64_t passing_ = 0;  // tokens that pass in the step under way
  std::vector<uint32_t> mask_;
  std::vector<TokenScore> scores_, prompt_scores_;
  std::vector<double> pooled_;  // sum of hidden states
  int64_t pooled_tokens_ = 0;
};

}  // namespace anyaccel::llm
