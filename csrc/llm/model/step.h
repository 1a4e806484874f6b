// SPDX-License-Identifier: Apache-2.0
// What the parts of a step hand to each other.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "llm/model/model.h"
#include "llm/model/request.h"

namespace anyaccel::llm {

// How tokens are put into runs; `exact` and `prompt` are those of StepTokens.
struct Model::Pass {
  int64_t most;  // tokens of a run
  bool exact = false, prompt = false;
};

// What is wanted of a token: its logits, the token that the executor picks by them, its hidden state, or those that a
// head reads.
struct Model::Wanted {
  enum class Kind : uint8_t { logits, pick, hidden, features };
  int64_t index;  // among all tokens of the pass
  Kind kind = Kind::logits;
  Request* request = nullptr;
  int64_t position = 0;  // in its sequence
};

// The tokens that a step has chosen. Requests get them only once nothing can fail any more.
struct StepResult {
  struct One {
    Request* request;
    std::vector<ChosenToken> chosen;  // the next token, and those after it that were chosen behind right drafts
    bool open = true;                 // another one may follow
  };
  const std::vector<Request*>& asked;  // the requests of the step, in the caller's order
  std::vector<One> ones;
};

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

 private:
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace anyaccel::llm
