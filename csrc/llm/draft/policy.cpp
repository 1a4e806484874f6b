// SPDX-License-Identifier: Apache-2.0
#include "llm/draft/policy.h"

#include <algorithm>
#include <cmath>

namespace anyaccel::llm {
namespace {

constexpr double kForget = 0.96;                                      // of an acceptance rate, with each report
constexpr std::array<double, 4> kFirstRates = {0.5, 0.6, 0.65, 0.7};  // by context, before there are drafts

constexpr double kShare = 0.02;         // of the time of decoding that drafts may cost
constexpr double kUsualAnswer = 128;    // tokens: an answer may spend its share of so many in advance
constexpr double kCredit = 2;           // passes in advance for drafts that are accepted
constexpr double kMostUnspent = 0.5;    // passes that are kept of the share for later
constexpr double kMostBalance = 64;     // passes that are kept of what drafts have saved
constexpr double kLeastSpeedup = 1.05;  // below it drafts cannot pay

// Passes that verifying a drafted token takes: at best, and until it has been measured.
constexpr double kGoodVerify = 0.04, kVerify = 0.1;
constexpr double kPromptToken = 0.25;     // passes that a token of a prompt takes, until it is measured
constexpr double kDraftOverhead = 0.05;   // passes that a step's drafts take beside those of the draft model
constexpr double kPrefillOverhead = 0.5;  // the same of a prefill: the text may have to be tokenised
constexpr int64_t kFirst = 3;             // costs of which the least counts: the first ones may be of cold caches
constexpr int64_t kLeastMeasured = 8;     // tokens of a prefill whose time tells what one takes

constexpr int64_t kLeastPlain = 8;   // steps whose time is known before there are drafts
constexpr int64_t kMostPlain = 128;  // steps with drafts after which one without is measured again
constexpr int64_t kLeastWait = 4, kMostWait = 1024, kMostPause = 32;
constexpr int64_t kTrial = 2;  // drafts of a trial

}  // namespace

void AcceptanceRate::report(int64_t drafted, int64_t accepted) {
  accepted_ = kForget * accepted_ + static_cast<double>(accepted);
  drafted_ = kForget * drafted_ + static_cast<double>(accepted + (accepted < drafted ? 1 : 0));
}

void AverageCost::add(double cost) {
  if (count_ == 0)
    cost_ = cost;
  else if (count_ < kFirst || cost < cost_)
    cost_ = std::min(cost_, count_ < kFirst ? cost : (cost_ + cost) / 2);
  else
    cost_ += 0.02 * (std::min(cost, 2 * cost_) - cost_);
  ++count_;
}

size_t DraftPolicy::context_of(int64_t tokens, bool whole) {
  if (whole) return kWhole;
  size_t context = 0;
  while (context + 1 < kWhole && tokens >= kContexts[context + 1]) ++context;
  return context;
}

void DraftPolicy::set_cost(double pass, double prefill) {
  draft_ratio_ = pass;
  prefill_ratio_ = prefill;
  constexpr double most = kGemvTokens - 1;
  can_pay_ = (most + 1) / (1 + most * (kGoodVerify + pass)) >= kLeastSpeedup;
}

// Between numbers that have been measured, along a line.
double DraftPolicy::verify_cost(int64_t drafts) const {
  int64_t below = drafts, above = drafts;
  const auto known = [this](int64_t count) { return verify_[static_cast<size_t>(count)].first.count() > 0; };
  const auto cost = [this](int64_t count) {
    const auto& [with, without] = verify_[static_cast<size_t>(count)];
    return count == 0 ? 0 : std::max(with.value() / without.value() - 1, 0.0);
  };
  while (below > 0 && !known(below)) --below;
  while (above < kGemvTokens && !known(above)) ++above;
  if (below == drafts) return cost(drafts);
  double slope = std::max(kVerify, below > 0 ? cost(below) / static_cast<double>(below) : 0);
  if (known(above)) slope = (cost(above) - cost(below)) / static_cast<double>(above - below);
  return cost(below) + slope * static_cast<double>(drafts - below);
}

double DraftPolicy::rate(size_t context) const { return rates_[context].value(kFirstRates[context], 4); }

double DraftPolicy::acceptance(const AcceptanceRate& own, size_t context) const { return own.value(rate(context)); }

double DraftPolicy::acceptance(const AcceptanceRate& own, size_t context, size_t other) const {
  const double now = acceptance(own, context);
  if (other <= context) return std::min(now, own.value(rate(other)));
  const double hoped = rates_[other].known() ? rate(other) : 1;  // what nobody has tried may be worth a trial
  return std::max(now, (now + hoped) / 2);
}

double DraftPolicy::prompt_token_seconds(int64_t requests) const {
  return draft_prompt_token_.value(prefill_ratio_ * prompt_token_.value(kPromptToken * pass_seconds(requests)));
}

// Passes that the draft model needs to read so many tokens. The pass that reads the last one makes the first draft.
double DraftPolicy::prefill_cost(const Batch& batch, int64_t tokens) const {
  if (tokens <= 2 * batch.requests) return 0;
  const double token = prompt_token_seconds(batch.requests) / pass_seconds(batch.requests);
  return std::max(token * static_cast<double>(tokens) - draft_cost(), 0.0);
}

DraftPolicy::Plan DraftPolicy::plan(const Batch& batch) {
  if (!can_pay_) return {.pause = kMostPause};
  const int64_t most = std::min(batch.most, kGemvTokens / batch.requests - 1);
  if (most <= 0 || passes_[static_cast<size_t>(batch.requests)].count() < kLeastPlain || since_plain_ >= kMostPlain) {
    since_plain_ = 0;
    return {};
  }
  const auto answered = static_cast<double>(batch.answered), left = static_cast<double>(batch.left);
  const double usual = std::max(answered, kUsualAnswer), rest = std::min(left, usual);
  const double credit = batch.proven ? kCredit : 0;
  const double allowance = balance_ + credit + kShare * (std::min(answered + left, usual) - answered);
  const auto cost_of = [&](int64_t width) {
    return verify_cost(width * batch.requests) + static_cast<double>(width) * draft_cost();
  };

  Plan best;
  double most_saved = 0, cheapest = HUGE_VAL;
  size_t cheapest_context = kGoOn;
  const auto consider = [&](size_t context, int64_t unread, double acceptance) {
    const double prefill = prefill_cost(batch, unread);
    if (prefill < cheapest) {
      cheapest = prefill;
      cheapest_context = context;
    }
    double tokens = 1, accepted = 1;
    for (int64_t width = 1; width <= most; ++width) {
      const double cost = cost_of(width);
      accepted *= acceptance;
      tokens += accepted;
      const double saved = (1 - (1 + cost) / tokens) * rest - prefill;
      if (saved <= most_saved || cost + std::max(prefill - prefill_balance_, 0.0) > allowance) continue;
      most_saved = saved;
      best = {width, context};
    }
  };
  if (batch.unread >= 0) consider(kGoOn, batch.unread, batch.acceptance);
  for (size_t context = 0; batch.length > 0 && context <= kWhole; ++context) {
    // A text that is little longer than an end may as well be read as a whole.
    const bool whole = context == kWhole;
    const int64_t unread = whole ? batch.length : kContexts[context] * batch.requests;
    if (whole || batch.length > 2 * unread) consider(context, unread, batch.again[context]);
  }
  if (best.width > 0) {
    wait_ = kLeastWait;
    ++since_plain_;
    return best;
  }
  // Drafts that do not seem to pay are tried now and then, since a text or the machine's other work may change.
  since_plain_ = 0;
  if (waited_ < wait_) return {.pause = std::min(wait_ - waited_ - 1, kMostPause)};
  int64_t width = std::min(kTrial, most);
  while (width > 0 && cost_of(width) + std::max(cheapest - prefill_balance_, 0.0) > allowance) --width;
  waited_ = 0;
  wait_ = std::min(2 * wait_, kMostWait);
  if (width == 0) {  // other work on the machine may have made the measured times so long
    verify_ = {};
    draft_ = draft_prompt_token_ = {};
  }
  return {width, cheapest_context};
}

void DraftPolicy::decoded(int64_t requests, int64_t tokens, double seconds) {
  if (std::max(requests, tokens) > kGemvTokens) return;
  AverageCost& pass = passes_[static_cast<size_t>(requests)];
  if (tokens == requests) pass.add(seconds);
  if (tokens <= requests || pass.count() == 0) return;
  auto& [with, without] = verify_[static_cast<size_t>(tokens - requests)];
  with.add(seconds);
  without.add(pass.value());
}

void DraftPolicy::prefilled(int64_t tokens, double seconds) {
  if (tokens >= kLeastMeasured) prompt_token_.add(seconds / static_cast<double>(tokens));
}

void DraftPolicy::drafted(int64_t requests, int64_t passes, double seconds) {
  if (pass_seconds(requests) > 0) draft_.add(seconds / static_cast<double>(passes) / pass_seconds(requests));
}

void DraftPolicy::draft_prefilled(int64_t tokens, double seconds) {
  if (tokens < kLeastMeasured) return;
  // The first time may be of a moment in which other work had the machine.
  const double most = prompt_token_.count() > 0 ? 3 * prefill_ratio_ * prompt_token_.value() : HUGE_VAL;
  draft_prompt_token_.add(std::min(seconds / static_cast<double>(tokens), most));
}

void DraftPolicy::stepped(const Step& step) {
  if (step.requests > kGemvTokens || pass_seconds(step.requests) == 0) return;
  ++waited_;
  const double pass = pass_seconds(step.requests), passes = static_cast<double>(step.passes);
  double cost = step.tokens == 0 ? -1 : verify_cost(std::max(step.tokens - step.requests, int64_t{0}));
  // Other work on the machine makes single times longer than what was meant to be spent.
  cost += std::min(step.drafting / pass, 2 * passes * draft_cost() + kDraftOverhead);
  const double expected = static_cast<double>(step.read) * prompt_token_seconds(step.requests) / pass;
  const double prefill = std::min(step.prefill / pass, 2 * expected + kPrefillOverhead);
  const double spent = std::min(prefill, prefill_balance_);
  prefill_balance_ -= spent;
  cost += prefill - spent;
  if (balance_ < kMostUnspent)
    cost -= kShare;
  else
    prefill_balance_ = std::min(prefill_balance_ + kShare, kMostBalance);
  balance_ = std::min(balance_ - cost, kMostBalance);
}

}  // namespace anyaccel::llm
