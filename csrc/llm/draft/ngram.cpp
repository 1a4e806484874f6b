// SPDX-License-Identifier: Apache-2.0
#include "llm/draft/ngram.h"

#include <algorithm>

namespace anyaccel::llm {
namespace {

constexpr int64_t kLongest = 32;  // tokens that are compared at most
// Two tokens that came together before often go on in another way; of three, drafts pay in most texts.
constexpr int64_t kShortest = 3, kShortestAfterSuccess = 2;
constexpr int64_t kMostWidth = 16, kMostWait = 64;
constexpr int64_t kMisses = 2;  // in a row, behind which there is none for a while

// How many tokens before and with `at` are those before and with the end.
int64_t common_end(const std::vector<int64_t>& tokens, int64_t at) {
  const int64_t last = static_cast<int64_t>(tokens.size()) - 1;
  int64_t length = 0;
  while (length <= at && length < kLongest &&
         tokens[static_cast<size_t>(at - length)] == tokens[static_cast<size_t>(last - length)])
    ++length;
  return length;
}

}  // namespace

std::vector<int64_t> NgramDrafts::propose(const std::vector<int64_t>& tokens, int64_t most) {
  if (skipped_ > 0) {
    --skipped_;
    return {};
  }
  const auto count = static_cast<int64_t>(tokens.size());
  int64_t best = (misses_ > 0 || !tried_ ? kShortest : kShortestAfterSuccess) - 1, found = -1;
  for (int64_t at = count - 2; at >= best && best < kLongest; --at) {
    const int64_t length = common_end(tokens, at);
    if (length <= best) continue;
    best = length;
    found = at;
  }
  std::vector<int64_t> draft;
  if (found < 0) return draft;
  // What has been the same for long goes on so more often, whatever the draft before was.
  const int64_t width = std::min(most, std::max(width_, best + best / 2));
  // Where the occurrence reaches into the end, the text repeats itself, and so does the draft.
  const int64_t distance = count - 1 - found;
  for (int64_t i = 0; i < width; ++i)
    draft.push_back(i < distance ? tokens[static_cast<size_t>(found + 1 + i)]
                                 : draft[static_cast<size_t>(i - distance)]);
  return draft;
}

void NgramDrafts::report(int64_t drafted, int64_t accepted) {
  tried_ = true;
  if (accepted == drafted)
    width_ = std::min(kMostWidth, std::max(width_, 2 * drafted));
  else
    width_ = std::max<int64_t>(1, accepted);
  misses_ = accepted > 0 ? 0 : misses_ + 1;
  skipped_ = 0;
  for (int64_t miss = kMisses; miss <= misses_ && skipped_ < kMostWait; ++miss)
    skipped_ = std::max<int64_t>(1, 2 * skipped_);
}

}  // namespace anyaccel::llm
