// SPDX-License-Identifier: Apache-2.0
// How many tokens to draft: by the acceptance rate of earlier drafts and the measured cost of passes.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "llm/kernels/multiply.h"

namespace anyaccel::llm {

// The share of drafted tokens that were accepted, as a moving average.
class AcceptanceRate {
 public:
  // `prior`: what it is taken to be until there are drafts, as if it came of `weight` drafts.
  double value(double prior, double weight = 2) const { return (accepted_ + weight * prior) / (drafted_ + weight); }
  bool known() const { return drafted_ > 0; }
  // Whether drafts have been accepted lately, most of them.
  bool proven() const { return accepted_ > 0.9 && 2 * accepted_ > drafted_; }
  // `drafted` is above 0. Drafts behind a rejected one do not count.
  void report(int64_t drafted, int64_t accepted);

 private:
  double accepted_ = 0, drafted_ = 0;
};

// A moving average of measured costs. It stays near the least of them: other work on the machine makes times longer,
// never shorter.
class AverageCost {
 public:
  void add(double cost);
  int64_t count() const { return count_; }
  double value(double unknown = 0) const { return count_ > 0 ? cost_ : unknown; }

 private:
  double cost_ = 0;
  int64_t count_ = 0;
};

// Decides for all requests of a model whose drafts come from one proposer, a draft model or a lookup in the text. Costs
// are in passes of the model over the next token of each request of a batch. Drafts may cost a small share of the time
// of decoding and what earlier drafts have saved, so that those which are never accepted cost no more than that share.
class DraftPolicy {
 public:
  // How many tokens of the text a draft model reads before it drafts: the end or all of it. Its drafts are better and
  // dearer the more it reads.
  static constexpr std::array<int64_t, 4> kContexts = {16, 64, 256, INT64_MAX};
  static constexpr size_t kWhole = kContexts.size() - 1;
  static size_t context_of(int64_t tokens, bool whole);

  // A draft model's pass over one token and over a prompt, as shares of the model's, until they are measured.
  void set_cost(double pass, double prefill);
  // Whether drafts could save time if all of them were accepted.
  bool can_pay() const { return can_pay_; }

  struct Batch {
    int64_t requests = 1;
    int64_t most = 0;  // drafts of each request
    // The probability that the next drafts of all requests are accepted, if the draft model goes on from what it has
    // read, and if it reads the text anew.
    double acceptance = 1;
    std::array<double, kContexts.size()> again = {1, 1, 1, 1};
    bool proven = true;  // AcceptanceRate::proven() of all requests
    // Tokens of all requests that the draft model has to read to go on (below 0: it cannot) and those of their texts.
    // Both are 0 for a lookup.
    int64_t unread = 0, length = 0;
    int64_t answered = 0, left = INT32_MAX;  // tokens of the shortest answer: so far, and still to come at most
  };
  struct Plan {
    int64_t width = 0;       // drafts of each request
    size_t context = kGoOn;  // index in kContexts
    int64_t pause = 0;       // without drafts: steps until it is worth asking again
  };
  static constexpr size_t kGoOn = kContexts.size();
  Plan plan(const Batch& batch);

  // The acceptance rate of a request's next drafts with the context that it has, and with another one.
  double acceptance(const AcceptanceRate& own, size_t context) const;
  double acceptance(const AcceptanceRate& own, size_t context, size_t other) const;
  void report(int64_t drafted, int64_t accepted, size_t context) { rates_[context].report(drafted, accepted); }

  // Measured times of: a pass over the next tokens and the drafts of `requests` requests; a prefill of the model; the
  // draft model's passes over one token, and its prefill.
  void decoded(int64_t requests, int64_t tokens, double seconds);
  void prefilled(int64_t tokens, double seconds);
  void drafted(int64_t requests, int64_t passes, double seconds);
  void draft_prefilled(int64_t tokens, double seconds);

  // A step of requests that are all decoding.
  struct Step {
    int64_t requests = 0;
    int64_t tokens = 0;   // of its pass; 0: there was none, as all requests had accepted drafts left
    int64_t passes = 0;   // of the draft model over one token
    double drafting = 0;  // seconds of these, and of what else drafts took
    int64_t read = 0;     // tokens that the draft model read in a prefill
    double prefill = 0;   // seconds in which the draft model read the text
  };
  void stepped(const Step& step);

 private:
  double rate(size_t context) const;
  double pass_seconds(int64_t requests) const { return passes_[static_cast<size_t>(requests)].value(); }
  double verify_cost(int64_t drafts) const;
  double draft_cost() const { return draft_.value(draft_ratio_); }
  // Seconds that a token of a prompt takes the draft model.
  double prompt_token_seconds(int64_t requests) const;
  double prefill_cost(const Batch& batch, int64_t tokens) const;

  bool can_pay_ = true;
  double draft_ratio_ = 0, prefill_ratio_ = 0;  // what set_cost() was given
  std::array<AcceptanceRate, kContexts.size()> rates_;
  std::array<AverageCost, kGemvTokens + 1> passes_;  // seconds of passes without drafts, by the number of requests
  // Seconds of passes with drafts, by their number, and what one without took then: it takes longer behind a long text.
  std::array<std::pair<AverageCost, AverageCost>, kGemvTokens + 1> verify_;
  AverageCost draft_;                              // passes
  AverageCost prompt_token_, draft_prompt_token_;  // seconds
  // Passes that drafts may cost, and what was not spent before, which is for prefills of the draft model.
  double balance_ = 0, prefill_balance_ = 0;
  int64_t since_plain_ = 0;        // steps with drafts since the last one without
  int64_t wait_ = 4, waited_ = 0;  // steps between two trials of drafts that do not seem to pay
};

}  // namespace anyaccel::llm
