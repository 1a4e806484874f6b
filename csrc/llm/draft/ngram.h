// SPDX-License-Identifier: Apache-2.0
// Guesses of the tokens that come next, which one pass of the decoder then verifies.
#pragma once

#include <cstdint>
#include <vector>

namespace anyaccel::llm {

// Drafts by lookup in the prompt and the answer so far (Yang et al., "Inference with Reference", 2023; Saxena, "Prompt
// Lookup Decoding", 2023). It depends on the tokens alone, so that all ranks of a model make the same drafts.
class NgramDrafts {
 public:
  // At most `most` tokens that may follow `tokens`: those that followed the longest earlier occurrence of what they end
  // with, or the latest one among equals. Fewer while few of the drafts before were right, and often none then.
  std::vector<int64_t> propose(const std::vector<int64_t>& tokens, int64_t most);
  // How many of the tokens that propose() gave turned out right; `drafted` is above 0.
  void report(int64_t drafted, int64_t accepted);

 private:
  int64_t width_ = 4;    // tokens of the next draft, at most; more where a long text came before
  int64_t misses_ = 0;   // drafts in a row of which no token was right
  int64_t skipped_ = 0;  // steps without a draft that are left
  bool tried_ = false;
};

}  // namespace anyaccel::llm
