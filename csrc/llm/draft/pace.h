// SPDX-License-Identifier: Apache-2.0
// How many tokens to draft, by what drafts cost here and how many of them are right.
#pragma once

#include <array>
#include <cstdint>

#include "llm/kernels/multiply.h"

namespace anyaccel::llm {

// How likely the next draft of an answer is right: of its latest drafts, and of other answers' as long as it had few.
class AcceptanceRate {
 public:
  double value(double prior) const { return (right_ + kWeight * prior) / (tried_ + kWeight); }
  // Whether drafts have been right lately, most of them.
  bool proven() const { return right_ > kProven && 2 * right_ > tried_; }
  // `drafted` is above 0; drafts behind a wrong one were not tried.
  void report(int64_t drafted, int64_t accepted);

 private:
  static constexpr double kWeight = 2, kProven = 1.5;
  double right_ = 0, tried_ = 0;
};

// Weighs the drafts of one kind, all answers of a model together. Each step gives a token to each answer, so a draft
// saves a pass only where those of all answers are right. Times are of this rank: the caller tells the others.
//
// It keeps an account: a small share of what steps would take without drafts comes in, and what drafts save; what they
// cost goes out. An answer may spend in advance what would come in while it gets as long as answers usually are.
// Nothing else is drafted that the account could not pay if all of it were wrong, so that answers of that length never
// take longer than the share allows, whatever the draft model is, and shorter ones lose no more time than those may.
class DraftPace {
 public:
  // What a pass of the draft model takes of the model's, by the bytes that both read a token, and what reading a text
  // takes, by their products; 0: drafts cost nothing to make. Times are measured; this is for the first of them.
  void set_cost(double pass, double reading);
  // Whether drafts could pay if all of them were right: else they are never tried.
  bool can_pay() const { return can_pay_; }

  // What the draft model knows of a text when it drafts: what it has read before and what has come since, all of it, or
  // its end only, which costs less to read and makes worse drafts: so many tokens (end_tokens()).
  enum class Reads : uint8_t { on, all, end, more, most };
  static int64_t end_tokens(Reads reads);
  static bool is_end(Reads reads) { return reads >= Reads::end; }
  // How much of a text a draft model knows: its drafts are the better, the more. The last level: all of it.
  static constexpr size_t kLevels = 4;
  static constexpr size_t kWhole = kLevels - 1;
  static size_t level_of(int64_t tokens, bool part);

  // Answers that could have drafts in the next pass.
  struct Batch {
    int64_t requests = 1;
    int64_t most = 0;                        // drafts of each
    double chance = 0;                       // that the next drafts of all of them are right, if it reads on
    std::array<double, kLevels> again = {};  // if it reads them anew, as ends or all of them
    bool proven = false;                     // AcceptanceRate::proven() of all of them
    // Tokens that it has to read, of all together, to go on from what it has read, below 0 where it has read nothing of
    // one of them; and to know all. Both 0: drafts are not made by reading.
    int64_t unread = 0, tokens = 0;
    bool part = false;         // it has read only a part of one of them
    int64_t known = 0;         // then: of how many tokens, at least
    double lost = 0;           // seconds that drafts have cost one of these answers more than saved, but for reading
    int64_t answered = 0;      // tokens of the shortest answer so far
    int64_t left = INT32_MAX;  // tokens that each of them has to come, at most
  };
  struct Choice {
    int64_t width = 0;  // drafts of each answer, 0 to batch.most
    Reads reads = Reads::on;
    int64_t pause = 0;  // if there are none: for how many steps that will be so, at least
  };
  Choice choose(const Batch& batch);

  // How likely a draft is right of an answer that has had none yet, where the draft model knows so much of it.
  double prior(size_t level) const { return priors_[level].value(); }
  // The same of an answer whose drafts have that chance so far, if the draft model read so much more of it.
  double with_more(double chance, size_t level) const;
  void report(int64_t drafted, int64_t accepted, size_t level);

  // What took how long: a pass of the model over the next tokens of `requests` answers, drafts among them; one over
  // tokens of prompts; a pass of the draft model for each of `requests` answers; and what it took to read.
  void passed(int64_t requests, int64_t tokens, double seconds);
  void prompted(int64_t tokens, double seconds);
  void drafted(int64_t requests, double seconds);
  void read(int64_t tokens, double seconds);

  // A step of answers, for the account.
  struct Step {
    int64_t requests;
    int64_t tokens = 0;   // of its pass; 0: there was none, as all answers had tokens ahead
    int64_t passes = 0;   // of the draft model, but for those in which it read
    double drafting = 0;  // seconds of these, and of all else that making drafts took
    double reading = 0;   // seconds in which it read the text
  };
  // Returns the seconds that it took more than without drafts, but for reading.
  double stepped(const Step& step);
  // Seconds of plain steps that drafts may cost now.
  double balance() const { return balance_; }

 private:
  // Seconds by a number of tokens; index 0 is not used.
  class Times {
   public:
    void add(int64_t tokens, double seconds);
    int64_t count(int64_t tokens) const { return counts_[static_cast<size_t>(tokens)]; }
    // Between those that are known, along a line; beyond them a little more for each token. 0: nothing is known.
    double of(int64_t tokens) const;
    bool any() const;

   private:
    std::array<double, kGemvTokens + 1> seconds_ = {};
    std::array<int64_t, kGemvTokens + 1> counts_ = {};
  };
  // What drafts make a pass take longer, by their number. A plain pass takes longer behind a long text, so it is kept
  // with each time what one took then: times of passes with drafts from behind a short text would seem to cost nothing.
  class Extras {
   public:
    void add(int64_t drafts, double seconds, double plain);
    // As Times::of(); `plain`: what a plain pass takes now.
    double of(int64_t drafts, double plain) const;
    // The most drafts of which it is known.
    int64_t known() const;

   private:
    double at(int64_t drafts) const;

    std::array<double, kGemvTokens + 1> seconds_ = {}, plain_ = {};
    std::array<int64_t, kGemvTokens + 1> counts_ = {};
  };

  // The share of right ones among the latest drafts.
  struct Prior {
    double right, tried;
    bool known = false;
    double value() const { return right / tried; }
    void report(int64_t drafted, int64_t accepted);
  };
  // How it may draft: what it takes to read first, and how likely drafts are right then.
  struct Mode {
    Reads reads = Reads::on;
    int64_t unread = 0;
    double chance = 0;
  };
  // Drafts that many wide: tokens a second, and the seconds that each token takes less.
  struct Estimate {
    int64_t width = 0;
    double rate = 0, saved = 0;
  };
  // A pass over so many tokens of `requests` answers.
  double pass_seconds(int64_t requests, int64_t tokens) const;
  double draft_seconds(int64_t requests) const;
  // `expensive`: what it may be where nobody knows.
  double reading_seconds(int64_t requests, int64_t unread, bool expensive) const;
  double seconds(const Batch& batch, int64_t width) const;
  // The seconds that are lost if all drafts are wrong.
  double risk(const Batch& batch, const Mode& mode, int64_t width) const;
  // The best width of those that lose at most `budget`.
  Estimate best(const Batch& batch, const Mode& mode, double budget) const;
  Choice decide(const Batch& batch);
  static double length_of(const Batch& batch);
  int64_t wait_for(double seconds, double plain) const;

  Times plain_, drafts_;  // passes of the model without drafts, and of the draft model
  Extras extras_;
  double pass_cost_ = 0, reading_cost_ = 0;
  double prompt_token_ = 0, read_token_ = 0;  // seconds; 0: not known
  bool can_pay_ = true;
  std::array<Prior, kLevels> priors_{{{2, 4}, {2.4, 4}, {2.6, 4}, {2.8, 4}}};
  double balance_ = 0;
  int64_t since_plain_ = 0;        // passes with drafts since the last one without
  int64_t wait_ = 4, waited_ = 0;  // steps between two tries of drafts that do not seem to pay
};

}  // namespace anyaccel::llm
