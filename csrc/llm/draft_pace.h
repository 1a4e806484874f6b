// SPDX-License-Identifier: Apache-2.0
// How many tokens to draft, by what drafts cost here and how many of them are right.
#pragma once

#include <array>
#include <cstdint>

#include "llm/matrix.h"

namespace anyaccel::llm {

// How likely the next draft of an answer is right: of its latest drafts, and of other answers' as long as it had few.
class DraftChance {
 public:
  double value(double prior) const { return (right_ + kWeight * prior) / (tried_ + kWeight); }
  // `drafted` is above 0; drafts behind a wrong one were not tried.
  void report(int64_t drafted, int64_t accepted);

 private:
  static constexpr double kWeight = 1.5;
  double right_ = 0, tried_ = 0;
};

// Weighs the drafts of one kind, all answers of a model together. Each step gives a token to each answer, so a draft
// saves a pass only where those of all answers are right. Times are of this rank: the caller tells the others.
class DraftPace {
 public:
  // The most drafts of each of `requests` answers in the next pass; 0: drafts would not pay, or had better not be
  // tried. `chance`: that the next drafts of all answers are right.
  int64_t width(int64_t requests, double chance, int64_t most);
  // How likely a draft is right of an answer that has had none yet.
  double prior() const { return prior_; }
  void report(int64_t drafted, int64_t accepted);

  // What took how long: a pass of the model over the next tokens of answers, drafts among them; and a token of the
  // draft model for each of `requests` answers.
  void passed(int64_t tokens, double seconds);
  void drafted(int64_t requests, double seconds);

  // A step of answers, for the account of what drafts cost and save.
  struct Step {
    int64_t requests;
    int64_t tokens = 0;  // of its pass; 0: there was none, as all answers had tokens ahead
    int64_t width = 0;   // drafts of an answer, at most
    bool ahead = false;  // an answer had its token from earlier drafts
    double seconds = 0;  // all of it, but for
    double reading = 0;  // what the draft model took to read the text, which counts as part of the prompt
                         // but for tries
  };
  void stepped(const Step& step);

 private:
  int64_t best_width(int64_t requests, double chance, int64_t most);

  // Seconds by a number of tokens; index 0 is not used.
  class Times {
   public:
    void add(int64_t tokens, double seconds);
    int64_t count(int64_t tokens) const { return counts_[static_cast<size_t>(tokens)]; }
    // Between those that are known, along a line; beyond them a little more for each token. 0: nothing is known.
    double of(int64_t tokens) const;

   private:
    std::array<double, kGemvTokens + 1> seconds_ = {};
    std::array<int64_t, kGemvTokens + 1> counts_ = {};
  };

  Times passes_, drafts_;
  double prior_ = 0.7;
  double spent_ = 0, lost_ = 0;    // seconds of steps, and how many of them drafts have cost; both of the latest steps
  int64_t since_plain_ = 0;        // passes with drafts since the last one without
  int64_t wait_ = 4, waited_ = 0;  // steps between two tries of drafts that do not seem to pay
  bool trying_ = false;            // the latest drafts are such a try
};

}  // namespace anyaccel::llm
