// SPDX-License-Identifier: Apache-2.0
#include "llm/draft/pace.h"

#include <algorithm>
#include <cmath>

namespace anyaccel::llm {
namespace {

// With each pass, of an answer's drafts; with each report, of all.
constexpr double kForget = 0.96, kForgetOfAll = 0.98;

// The account. What is estimated may turn out more expensive, and a step's clock is not the only cost: the aim is 3 %.
constexpr double kShare = 0.02;      // of the time of plain steps that drafts may cost
constexpr double kMostSaved = 64;    // steps that are kept of what came in: it may all be lost again
constexpr double kAdvance = 2;       // steps in advance, where drafts have been right lately
constexpr double kMostOfAnswer = 1;  // steps that an answer may lose, and its share, whatever others have saved
constexpr double kLeastGain = 1.05;  // times as fast as plain steps: below it drafts cannot pay

// An answer is taken to get as long again as it is, and at least so long: in the rest of it, reading its text pays. Its
// share of so many steps may be spent in advance.
constexpr double kUsualAnswer = 128;
// The tokens of an end that is read; one is read anew where it is that many times what is known.
constexpr std::array<int64_t, 3> kEnds = {16, 64, 256};
constexpr int64_t kLeastGrowth = 2;
constexpr double kHoped = 0.5;  // of wrong drafts, which are right where more is known of the text, until that is tried
constexpr double kMostOfTry = 0.25;  // of an answer's time: what reading may take when drafts do not seem to pay

constexpr int64_t kLeastPlain = 4;   // steps whose time is known before there are drafts
constexpr int64_t kMostPlain = 128;  // steps after which a pass without drafts is measured anew
constexpr int64_t kLeastWait = 4, kMostWait = 1024;
constexpr int64_t kTry = 2;  // drafts of a try
// What nobody knows yet is taken to cost this or, where it must not cost more, that: a token more of a pass, in passes;
// a pass of the draft model, times what its bytes say and passes beside; a token of a prompt, in passes.
constexpr double kMore = 0.04, kExpensiveMore = 0.2;
constexpr double kExpensiveDraft = 1.5, kExpensiveBeside = 0.05;
constexpr double kPromptToken = 0.25, kExpensiveReading = 1.5;
// Tokens, of which the time tells how long one takes. Of few, it is too long, which does no harm to prompts.
constexpr int64_t kLeastRead = 32, kLeastPrompt = 8;
constexpr int kFirst = 3;  // times of which the shortest counts: the first ones may be of cold caches
constexpr int64_t kMostPause = 32;

// Near the shortest of the latest times: what else the machine does makes many of them longer, none shorter, and those
// that are measured often have to compare with those that are measured seldom.
void settle(double& known, double seconds) {
  known += (seconds < known ? 0.5 : 0.02) * (std::min(seconds, 2 * known) - known);
}

// The time that was measured `count` times before.
void learn(double& known, int64_t count, double seconds) {
  if (count == 0)
    known = seconds;
  else if (count < kFirst)
    known = std::min(known, seconds);
  else
    settle(known, seconds);
}

void keep(double& known, double seconds) {
  known = known == 0 ? seconds : known + 0.3 * (std::min(seconds, 2 * known) - known);
}

}  // namespace

void AcceptanceRate::report(int64_t drafted, int64_t accepted) {
  right_ = kForget * right_ + static_cast<double>(accepted);
  tried_ = kForget * tried_ + static_cast<double>(accepted + (accepted < drafted ? 1 : 0));
}

int64_t DraftPace::end_tokens(Reads reads) {
  return kEnds[static_cast<size_t>(reads) - static_cast<size_t>(Reads::end)];
}

size_t DraftPace::level_of(int64_t tokens, bool part) {
  if (!part) return kWhole;
  size_t level = 0;
  while (level + 1 < kEnds.size() && tokens >= kEnds[level + 1]) ++level;
  return level;
}

void DraftPace::Times::add(int64_t tokens, double seconds) {
  if (tokens >= 1 && tokens <= kGemvTokens)
    learn(seconds_[static_cast<size_t>(tokens)], counts_[static_cast<size_t>(tokens)]++, seconds);
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

bool DraftPace::Times::any() const {
  return std::any_of(counts_.begin(), counts_.end(), [](int64_t count) { return count > 0; });
}

void DraftPace::Extras::add(int64_t drafts, double seconds, double plain) {
  const auto at = static_cast<size_t>(drafts);
  learn(seconds_[at], counts_[at], seconds);
  learn(plain_[at], counts_[at]++, plain);
}

double DraftPace::Extras::at(int64_t drafts) const {
  return std::max(seconds_[static_cast<size_t>(drafts)] - plain_[static_cast<size_t>(drafts)], 0.0);
}

double DraftPace::Extras::of(int64_t drafts, double plain) const {
  const auto is_known = [this](int64_t n) { return counts_[static_cast<size_t>(n)] > 0; };
  int64_t below = std::min<int64_t>(drafts, kGemvTokens), above = drafts;  // none cost nothing
  while (below > 0 && !is_known(below)) --below;
  while (above <= kGemvTokens && !is_known(above)) ++above;
  if (below == drafts) return at(below);
  const auto distance = static_cast<double>(drafts - below);
  if (above <= kGemvTokens) return at(below) + (at(above) - at(below)) * distance / static_cast<double>(above - below);
  double slope = kMore * plain;
  if (below > 0) {
    int64_t before = below - 1;
    while (before > 0 && !is_known(before)) --before;
    slope = std::max(slope / 2, (at(below) - at(before)) / static_cast<double>(below - before));
  }
  return at(below) + slope * distance;
}

int64_t DraftPace::Extras::known() const {
  int64_t most = kGemvTokens;
  while (most > 0 && counts_[static_cast<size_t>(most)] == 0) --most;
  return most;
}

void DraftPace::set_cost(double pass, double reading) {
  pass_cost_ = pass;
  reading_cost_ = reading;
  constexpr double most = kGemvTokens - 1;
  can_pay_ = (most + 1) / (1 + most * (kMore + pass)) >= kLeastGain;
}

double DraftPace::pass_seconds(int64_t requests, int64_t tokens) const {
  if (tokens <= requests) return plain_.of(tokens);  // some answers have tokens from the pass before
  const double plain = plain_.of(requests);
  return plain + extras_.of(tokens - requests, plain);
}

double DraftPace::draft_seconds(int64_t requests) const {
  return drafts_.any() ? drafts_.of(requests) : pass_cost_ * plain_.of(requests);
}

// The pass that reads the last token makes the first draft.
double DraftPace::reading_seconds(int64_t requests, int64_t unread, bool expensive) const {
  if (unread <= 2 * requests) return 0;
  const double plain = plain_.of(requests), tokens = static_cast<double>(unread);
  const double token = prompt_token_ > 0 ? prompt_token_ : kPromptToken * plain;
  const double reading = read_token_ > 0 ? read_token_ : token * reading_cost_ * (expensive ? kExpensiveReading : 1);
  return std::max(reading * tokens - draft_seconds(requests), 0.0);
}

double DraftPace::seconds(const Batch& batch, int64_t width) const {
  return pass_seconds(batch.requests, batch.requests * (width + 1)) +
         static_cast<double>(width) * draft_seconds(batch.requests);
}

double DraftPace::risk(const Batch& batch, const Mode& mode, int64_t width) const {
  const double plain = plain_.of(batch.requests);
  const int64_t drafts = batch.requests * width, known = extras_.known();
  double extra = extras_.of(drafts, plain);
  if (drafts > known)
    extra = std::max(extra, extras_.of(known, plain) + kExpensiveMore * plain * static_cast<double>(drafts - known));
  double draft = draft_seconds(batch.requests);
  if (!drafts_.any() && pass_cost_ > 0) draft = kExpensiveDraft * draft + kExpensiveBeside * plain;
  return extra + static_cast<double>(width) * draft + reading_seconds(batch.requests, mode.unread, true);
}

DraftPace::Estimate DraftPace::best(const Batch& batch, const Mode& mode, double budget) const {
  const double plain = plain_.of(batch.requests);
  Estimate best{0, 1 / plain, 0};
  double expected = 1, all = 1;
  for (int64_t width = 1; width <= batch.most; ++width) {
    all *= mode.chance;
    expected += all;
    const double rate = expected / seconds(batch, width);
    if (rate <= best.rate || risk(batch, mode, width) > budget) continue;
    best = {width, rate, plain - 1 / rate};
  }
  return best;
}

DraftPace::Choice DraftPace::choose(const Batch& wanted) {
  Batch batch = wanted;
  batch.most = std::min(batch.most, kGemvTokens / batch.requests - 1);
  Choice choice;
  if (!can_pay_)
    choice.pause = kMostPause;
  else if (batch.most > 0 && plain_.count(batch.requests) >= kLeastPlain && since_plain_ < kMostPlain)
    choice = decide(batch);
  since_plain_ = choice.width > 0 ? since_plain_ + 1 : 0;
  return choice;
}

int64_t DraftPace::wait_for(double seconds, double plain) const {
  const double steps = std::floor((seconds - balance_) / (kShare * plain));
  return static_cast<int64_t>(std::clamp(steps, 0.0, static_cast<double>(kMostPause)));
}

// How long the shortest answer is taken to get.
double DraftPace::length_of(const Batch& batch) {
  const auto answered = static_cast<double>(batch.answered);
  return std::min(answered + static_cast<double>(batch.left), std::max(answered, kUsualAnswer));
}

DraftPace::Choice DraftPace::decide(const Batch& batch) {
  const double plain = plain_.of(batch.requests), length = length_of(batch),
               answered = static_cast<double>(batch.answered);
  const double advance = pass_cost_ > 0 ? kShare * (length - answered) : 0;  // lookup has nothing to read
  const double budget = balance_ + plain * std::max(advance, batch.proven ? kAdvance : 0);
  const double own = plain * (kMostOfAnswer + advance + kShare * answered) - batch.lost;
  const double rest = std::min(static_cast<double>(batch.left), std::max(answered, kUsualAnswer));
  std::array<Mode, 2 + kEnds.size()> modes;
  size_t count = 0;
  if (batch.unread >= 0) modes[count++] = {Reads::on, batch.unread, batch.chance};
  if (batch.unread < 0 || batch.part) modes[count++] = {Reads::all, batch.tokens, batch.again[kWhole]};
  for (size_t level = 0; level < kEnds.size(); ++level) {
    const int64_t end = kEnds[level] * batch.requests;
    const auto reads = static_cast<Reads>(static_cast<size_t>(Reads::end) + level);
    // A text that is little longer may as well be read as a whole. What has been read is left for an end where the text
    // has gone on far beyond it, or where that end is longer.
    const bool better =
        batch.unread < 0 || batch.unread > end || (batch.part && kEnds[level] >= kLeastGrowth * batch.known);
    if (batch.tokens > 2 * end && better) modes[count++] = {reads, end, batch.again[level]};
  }

  const Mode* cheapest = nullptr;
  bool likely = false;
  double most = 0;
  Choice choice;
  for (size_t i = 0; i < count; ++i) {
    const Mode& mode = modes[i];
    const double reading = reading_seconds(batch.requests, mode.unread, false);
    if (cheapest == nullptr || mode.unread < cheapest->unread) cheapest = &mode;
    const double saved = best(batch, mode, HUGE_VAL).saved;
    if (saved <= 0 || saved * rest < reading) continue;
    likely = true;
    const Estimate estimate =
        best(batch, mode, std::min(budget, own + reading_seconds(batch.requests, mode.unread, true)));
    const double gain = estimate.saved * rest - reading;
    if (estimate.width == 0 || gain <= most) continue;
    most = gain;
    choice = {estimate.width, mode.reads};
  }
  if (choice.width > 0) {
    wait_ = kLeastWait;
    return choice;
  }
  // Where none seems to pay, or none that does can be afforded, the cheapest one is tried now and then.
  if (waited_ < wait_) {
    choice.pause = likely ? 0 : std::min(wait_ - waited_ - 1, kMostPause);
    return choice;
  }
  const double reading = reading_seconds(batch.requests, cheapest->unread, true);
  if (reading > kMostOfTry * plain * std::min(length, static_cast<double>(batch.left))) return choice;
  int64_t width = std::min(kTry, batch.most);
  const double most_of_try = std::min(balance_ + plain * advance, own + reading);
  while (width > 0 && risk(batch, *cheapest, width) > most_of_try) --width;
  if (width == 0) {
    choice.pause = wait_for(risk(batch, *cheapest, 1), plain);
    return choice;
  }
  waited_ = 0;
  // Where not even drafts that are all right would pay, only a wrong measurement is a reason to try again.
  const bool could = best(batch, {cheapest->reads, 0, 1}, HUGE_VAL).rate * plain >= kLeastGain;
  wait_ = could ? std::min(2 * wait_, kMostWait) : kMostWait;
  return {width, cheapest->reads};
}

void DraftPace::Prior::report(int64_t drafted, int64_t accepted) {
  known = true;
  right = kForgetOfAll * right + static_cast<double>(accepted);
  tried = kForgetOfAll * tried + static_cast<double>(accepted + (accepted < drafted ? 1 : 0));
}

double DraftPace::with_more(double chance, size_t level) const {
  const Prior& prior = priors_[level];
  return std::max(chance, prior.known ? (chance + prior.value()) / 2 : chance + kHoped * (1 - chance));
}

void DraftPace::report(int64_t drafted, int64_t accepted, size_t level) { priors_[level].report(drafted, accepted); }

void DraftPace::passed(int64_t requests, int64_t tokens, double seconds) {
  if (tokens <= requests)
    plain_.add(tokens, seconds);
  else if (tokens <= kGemvTokens && plain_.count(requests) > 0)
    extras_.add(tokens - requests, seconds, plain_.of(requests));
}

void DraftPace::prompted(int64_t tokens, double seconds) {
  if (tokens >= kLeastPrompt) keep(prompt_token_, seconds / static_cast<double>(tokens));
}

void DraftPace::drafted(int64_t requests, double seconds) { drafts_.add(requests, seconds); }

void DraftPace::read(int64_t tokens, double seconds) {
  if (tokens >= kLeastRead) keep(read_token_, seconds / static_cast<double>(tokens));
}

double DraftPace::stepped(const Step& step) {
  if (step.requests > kGemvTokens || plain_.count(step.requests) == 0) return 0;
  ++waited_;
  const double plain = plain_.of(step.requests);
  // Times of passes are what they usually are, since other work on the machine makes single ones late.
  double cost = (step.tokens > 0 ? pass_seconds(step.requests, step.tokens) : 0) - plain;
  cost += std::min(step.drafting,
                   kExpensiveBeside * plain + 2 * static_cast<double>(step.passes) * drafts_.of(step.requests));
  balance_ = std::min(balance_ + kShare * plain - cost - step.reading, kMostSaved * plain);
  return cost;
}

}  // namespace anyaccel::llm
