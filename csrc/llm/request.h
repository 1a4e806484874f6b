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
  SamplingOptions sampling;
  uint64_t seed = 0;
  int64_t max_new_tokens = 0;  // 0: as many as the context takes
  int64_t min_new_tokens = 0;
  std::vector<int64_t> end_tokens;
  bool ignore_end = false;
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

 private:
  friend class Model;

  // Called with the model's lock held.
  int64_t pending() const { return static_cast<int64_t>(tokens_.size()) - cached_; }
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
};

}  // namespace anyaccel::llm
