// SPDX-License-Identifier: Apache-2.0
#include "llm/draft_pace.h"

#include <algorithm>

namespace anyaccel::llm {
namespace {

constexpr double kForget = 0.9;     // of an answer's drafts, with each pass
constexpr double kShare = 0.015;    // of the time that drafts may cost
constexpr int kFreeSteps = 2;       // steps whose time they may cost besides
constexpr double kRemember = 0.99;  // of the account, with each step
constexpr int64_t kMostPlain = 64;  // steps after which a pass without drafts is measured anew
constexpr int64_t kLeastWait = 4, kMostWait = 128;
constexpr int64_t kTry = 2;     // drafts of a try
constexpr double kMore = 0.04;  // of a pass: what a token more is taken to cost as long as nobody knows
constexpr double kSure = 1.25;  // times as fast as without drafts
constexpr int kFirst = 3;       // times of which the shortest counts: the first ones may be of cold caches

}  // namespace

void DraftChance::report(int64_t drafted, int64_t accepted) {
  right_ = kForget * right_ + static_cast<double>(accepted);
  tried_ = kForget * tried_ + static_cast<double>(accepted + (accepted < drafted ? 1 : 0));
}

void DraftPace::Times::add(int64_t tokens, double seconds) {
  if (tokens < 1 || tokens > kGemvTokens) return;
  double& known = seconds_[static_cast<size_t>(tokens)];
  int64_t& count = counts_[static_cast<size_t>(tokens)];
  if (count == 0)
    known = seconds;
  else if (count < kFirst)
    known = std::min(known, seconds);
  else  // what took very long was something else
    known += 0.15 * (std::min(seconds, 2 * known) - known);
  ++count;
}

double DraftPace::Times::of(int64_t tokens) const {
  int64_t below = std::min<int64_t>(tokens, kGemvTokens), above = tokens;
  while (below > 0 && count(below) == 0) --below;
  while (above <= kGemvTokens && count(above) == 0) ++above;
  const auto at = [this](int64_t n) { return seconds_[static_cast<size_t>(n)]; };
  if (below == tokens) return at(below);
  if (below == 0) return above <= kGemvTokens ? at(above) : 0;
  const auto distance = static_cast<double>(tokens - below);
  if (above <= kGemvTokens) return at(below) + (at(above) - at(below)) * distance / static_cast<double>(above - below);
  int64_t before = below - 1;
  while (before > 0 && count(before) == 0) --before;
  double slope = kMore * at(below);
  if (before > 0) slope = std::max(slope / 2, (at(below) - at(before)) / static_cast<double>(below - before));
  return at(below) + slope * distance;
}

int64_t DraftPace::width(int64_t requests, double chance, int64_t most) {
  const int64_t chosen = since_plain_ < kMostPlain ? best_width(requests, chance, most) : 0;
  since_plain_ = chosen > 0 ? since_plain_ + 1 : 0;
  return chosen;
}

int64_t DraftPace::best_width(int64_t requests, double chance, int64_t most) {
  most = std::min(most, kGemvTokens / requests - 1);
  if (most <= 0 || passes_.count(requests) < 2) return 0;
  const double plain = passes_.of(requests);
  const bool lossy = lost_ > kShare * spent_ + kFreeSteps * plain;
  trying_ = false;
  int64_t best = 0;
  double rate = 1 / plain, expected = 1, all = 1;
  for (int64_t width = 1; width <= most; ++width) {
    all *= chance;
    expected += all;
    const double seconds = passes_.of(requests * (width + 1)) + static_cast<double>(width) * drafts_.of(requests);
    if (expected / seconds <= rate) continue;
    rate = expected / seconds;
    best = width;
  }
  // Other work on the machine makes single steps late: what surely pays goes on all the same.
  if (lossy && rate * plain < kSure) return 0;
  if (best > 0) {
    wait_ = kLeastWait;
    return best;
  }
  if (++waited_ < wait_) return 0;
  waited_ = 0;
  trying_ = true;
  wait_ = std::min(2 * wait_, kMostWait);
  return std::min(kTry, most);
}

void DraftPace::report(int64_t drafted, int64_t accepted) {
  const double tried = static_cast<double>(accepted + (accepted < drafted ? 1 : 0));
  prior_ += 0.1 * (static_cast<double>(accepted) / tried - prior_);
}

void DraftPace::passed(int64_t tokens, double seconds) { passes_.add(tokens, seconds); }

void DraftPace::drafted(int64_t requests, double seconds) { drafts_.add(requests, seconds); }

void DraftPace::stepped(const Step& step) {
  if (step.requests > kGemvTokens || passes_.count(step.requests) == 0) return;
  const double plain = passes_.of(step.requests);
  spent_ = kRemember * spent_ + plain;
  lost_ *= kRemember;
  if (step.tokens <= step.requests && !step.ahead) return;
  // What took much longer than it does was something else.
  double expected = step.tokens > 0 ? passes_.of(step.tokens) : plain;
  expected += static_cast<double>(step.width) * drafts_.of(step.requests);
  const double seconds = std::min(step.seconds, 2 * expected) + (trying_ ? step.reading : 0);
  // What they have saved is no reason to lose it again.
  lost_ = std::max(lost_ + seconds - plain, -kFreeSteps * plain);
}

}  // namespace anyaccel::llm
