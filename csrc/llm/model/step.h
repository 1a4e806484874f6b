// SPDX-License-Identifier: Apache-2.0
// What the parts of a step hand to each other.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "llm/model/model.h"
#include "llm/model/request.h"

namespace anyaccel::llm {

// New tokens of one sequence.
struct Model::Work {
  int sequence;
  const int64_t* tokens;
  int64_t count;
  // The sequence's length that rotary positions are of; 0: that after the call, or after each token that passes apart.
  int64_t context = 0;
  // Each token passes as if it were the last one: drafts, whose results must have the same bits as without, and the
  // part of an answer that is computed again.
  bool apart = false;
  int64_t start = 0;  // the sequence's length before
};

// How tokens are put into runs; `exact` and `prompt` are those of StepTokens.
struct Model::Pass {
  int64_t most;  // tokens of a run
  bool exact = false, prompt = false;
};

// A token of a request whose logits or hidden state are wanted.
struct Model::Wanted {
  int64_t index;  // among all tokens of the pass
  Request* request;
  int64_t position;  // in its sequence
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
