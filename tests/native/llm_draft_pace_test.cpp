// SPDX-License-Identifier: Apache-2.0
// The pace of drafts, with costs and right guesses that are given: what they cost at most, and what they bring.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "check.h"
#include "llm/draft/ngram.h"
#include "llm/draft/pace.h"

namespace {

using namespace anyaccel::llm;

constexpr double kMostLoss = 0.03;    // of the time without drafts
constexpr double kUsualAnswer = 128;  // tokens: what shorter ones may lose
constexpr double kAdvance = 0.02;     // of it

// What things take, in seconds.
struct Machine {
  double plain = 1;     // a pass over the next token of each answer
  double more = 0.05;   // a token more of it, in passes
  double draft = 0.1;   // a pass of the draft model, in passes
  double prompt = 0.1;  // a token of a prompt, in passes; the draft model's: times `draft`, or `reading`
  double reading = -1;
  double told = -1;  // what the bytes of both models say of `draft`; below 0: the truth
  int64_t requests = 1;
  std::mt19937* noise = nullptr;  // other work, which makes some of the times that are measured several times as long

  double measured(double seconds) const {
    if (noise == nullptr) return seconds;
    std::uniform_real_distribution<double> uniform;
    return uniform(*noise) < 0.5 ? seconds * (1 + 0.1 * uniform(*noise)) : seconds * (1 + 5 * uniform(*noise));
  }
  double pass(int64_t tokens) const { return plain * (1 + more * static_cast<double>(tokens - requests)); }
  double draft_pass() const { return plain * draft; }
  double read(int64_t tokens) const {
    return std::max(draft_pass(), plain * prompt * (reading < 0 ? draft : reading) * static_cast<double>(tokens));
  }
  double prompt_seconds(int64_t tokens) const { return plain * prompt * static_cast<double>(tokens); }
};

// How many of `width` drafts of one answer are right, where the draft model knows so much of the text.
using Accepts = std::function<int64_t(int64_t width, size_t level)>;
using Chooses = std::function<DraftPace::Choice(const DraftPace::Batch&)>;

struct Told {
  std::vector<double> seconds;  // of decoding, after each token of the answer
  int64_t first = -1;           // the token behind which the first drafts came
  int64_t drafted = 0, read = 0;
};

DraftPace pace_for(const Machine& machine) {
  DraftPace pace;
  if (machine.draft == 0) return pace;
  const double told = machine.told < 0 ? machine.draft : machine.told;
  pace.set_cost(told, machine.reading < 0 ? told : machine.reading);
  return pace;
}

// The answers of one batch, which all have as many tokens: what Model::step does, without a model. A draft model that
// costs nothing is lookup, which reads nothing. `limited`: it is known beforehand how many tokens there will be at
// most.
Told answer(DraftPace& pace, const Machine& machine, int64_t prompt, int64_t tokens, const Accepts& accepts,
            const Chooses& chooses = nullptr, bool limited = true) {
  Told told;
  const int64_t count = machine.requests;
  std::vector<AcceptanceRate> chances(static_cast<size_t>(count));
  std::vector<int64_t> ahead(chances.size());
  pace.prompted(prompt * count, machine.measured(machine.prompt_seconds(prompt * count)));
  int64_t known = -1, from = 0;  // up to where the draft model has read, and from where on
  double now = 0, lost = 0;
  for (int64_t done = 1; done < tokens; ++done) {
    const auto waiting = static_cast<int64_t>(std::count(ahead.begin(), ahead.end(), 0));
    DraftPace::Step step{count};
    DraftPace::Choice choice;
    if (waiting == count) {
      const bool part = from > 0;
      const size_t level = DraftPace::level_of(prompt + done - from, part);
      DraftPace::Batch batch{.requests = count, .most = std::min(kGemvTokens / count - 1, tokens - done - 1)};
      batch.chance = 1;
      batch.again.fill(1);
      batch.proven = true;
      batch.answered = done;
      batch.left = limited ? tokens - done : INT32_MAX;
      batch.part = part;
      batch.known = prompt + done - from;
      batch.lost = lost;
      if (machine.draft > 0) {
        batch.unread = known < 0 ? -1 : count * (prompt + done - known);
        batch.tokens = known < 0 || part ? count * (prompt + done) : batch.unread;
      }
      for (const AcceptanceRate& one : chances) {
        const double chance = one.value(pace.prior(level));
        batch.chance *= chance;
        for (size_t other = 0; other < batch.again.size(); ++other)
          batch.again[other] *=
              other > level ? pace.with_more(chance, other) : std::min(chance, one.value(pace.prior(other)));
        batch.proven = batch.proven && one.proven();
      }
      if (batch.most > 0) choice = chooses ? chooses(batch) : pace.choose(batch);
      CHECK(choice.width >= 0 && choice.width <= batch.most);
      if (choice.width > 0 && machine.draft > 0) {
        const bool end = DraftPace::is_end(choice.reads);
        const int64_t unread = end ? count * DraftPace::end_tokens(choice.reads)
                               : batch.unread < 0 || choice.reads == DraftPace::Reads::all ? batch.tokens
                                                                                           : batch.unread;
        if (choice.reads != DraftPace::Reads::on) {
          if (part) chances.assign(chances.size(), {});
          from = end ? prompt + done - DraftPace::end_tokens(choice.reads) : 0;
        }
        step.passes = choice.width;
        if (unread > 2 * count) {
          now += machine.read(unread);
          step.reading = machine.measured(machine.read(unread));
          pace.read(unread, step.reading);
          told.read += unread;
          --step.passes;
        }
        now += static_cast<double>(step.passes) * machine.draft_pass();
        step.drafting = machine.measured(static_cast<double>(step.passes) * machine.draft_pass());
        if (step.passes > 0) pace.drafted(count, step.drafting / static_cast<double>(step.passes));
        known = prompt + done + choice.width - 1;
      }
      if (choice.width > 0 && told.first < 0) told.first = done;
      told.drafted += choice.width * count;
    }
    step.tokens = waiting + choice.width * count;
    if (step.tokens > 0) {
      const double pass = machine.pass(std::max(step.tokens, count));
      pace.passed(count, step.tokens, machine.measured(pass));
      now += pass;
    }
    for (size_t i = 0; i < ahead.size(); ++i) {
      if (ahead[i] > 0) {
        --ahead[i];
        continue;
      }
      if (choice.width == 0) continue;
      const size_t level = DraftPace::level_of(prompt + done - from, from > 0);
      ahead[i] = accepts(choice.width, level);
      chances[i].report(choice.width, ahead[i]);
      pace.report(choice.width, ahead[i], level);
      known = std::min(known, prompt + done + ahead[i]);
    }
    lost += pace.stepped(step);
    told.seconds.push_back(now);
  }
  return told;
}

// `shares`: of the chance where the draft model knows only so much of the text.
Accepts chance_of(double chance, std::mt19937& generator, std::array<double, 4> shares = {0.6, 0.8, 0.9, 1}) {
  return [chance, shares, &generator](int64_t width, size_t level) {
    const double right_one = chance * shares[level];
    std::uniform_real_distribution<double> uniform;
    int64_t right = 0;
    while (right < width && uniform(generator) < right_one) ++right;
    return right;
  };
}

int64_t none_right(int64_t, size_t) { return 0; }

// At every length, not the last one only: an answer may end anywhere. What is lost before it is as long as answers are
// is no more than what those may lose.
void check_loss(const Told& told, const Machine& machine) {
  for (size_t i = 0; i < told.seconds.size(); ++i) {
    const double plain = machine.plain * static_cast<double>(i + 1);
    CHECK(told.seconds[i] <= plain + kMostLoss * std::max(plain, kUsualAnswer * machine.plain));
  }
}

void test_drafts_that_are_never_right() {
  for (const double draft : {0.0, 0.02, 0.1, 0.3, 0.55, 0.85, 1.0, 3.0})
    for (const double more : {0.0, 0.05, 0.3})
      for (const int64_t prompt : {1, 16, 512, 2000, 20000})
        for (const int64_t requests : {1, 4}) {
          const Machine machine{.more = more, .draft = draft, .requests = requests};
          DraftPace pace = pace_for(machine);
          check_loss(answer(pace, machine, prompt, 2000, none_right), machine);
        }
}

// Answers of one model one after the other: what is not spent in one may be in the next, and what one has spent in
// advance and did not bring in is the debt of the next.
void test_drafts_that_are_never_right_in_many_answers() {
  for (const double draft : {0.05, 0.3, 0.8})
    for (const int64_t prompt : {16, 512, 2000})
      for (const int64_t tokens : {2, 8, 32, 128}) {
        const Machine machine{.draft = draft};
        DraftPace pace = pace_for(machine);
        double all = 0, plain = 0;
        for (int i = 0; i < (kSanitized ? 30 : 150); ++i) {
          const Told told = answer(pace, machine, prompt, tokens, none_right);
          all += told.seconds.back();
          plain += machine.plain * static_cast<double>(told.seconds.size());
          CHECK(all <= (1 + kMostLoss) * plain + kAdvance * kUsualAnswer * machine.plain);
        }
      }
}

// Costs, lengths and chances by chance; drafts cost other than their bytes say.
void test_random_costs() {
  std::mt19937 generator(5);
  const auto uniform = [&](double from, double to) {
    return std::uniform_real_distribution<double>(from, to)(generator);
  };
  for (int i = 0; i < (kSanitized ? 50 : 800); ++i) {
    Machine machine{.plain = std::exp(uniform(-8, 0)), .more = uniform(0, 0.3), .draft = std::exp(uniform(-4, 1))};
    machine.prompt = std::exp(uniform(-4, -0.7));
    machine.reading = machine.draft * uniform(1, 2);
    machine.told = machine.draft * uniform(0.6, 1.2);
    machine.requests = i % 3 == 0 ? 4 : 1;
    if (i % 10 == 0) machine.draft = 0;
    DraftPace pace = pace_for(machine);
    const auto prompt = static_cast<int64_t>(std::exp(uniform(0, 8)));
    const auto tokens = static_cast<int64_t>(std::exp(uniform(0.7, 7.6)));
    check_loss(answer(pace, machine, prompt, tokens, none_right), machine);
    // Right now and then, so that they have been worth a try: the whole must not be slower all the same.
    DraftPace other = pace_for(machine);
    const Told some = answer(other, machine, prompt, 2000, chance_of(uniform(0, 1), generator));
    CHECK(some.seconds.back() <= (1 + kMostLoss) * machine.plain * static_cast<double>(some.seconds.size()));
  }
}

// Where other work makes half of all measurements late, answers still take about as long as without drafts, all
// together.
void test_a_busy_machine() {
  std::mt19937 noise(9);
  for (const double draft : {0.0, 0.03, 0.1, 0.5})
    for (const double more : {0.05, 0.3})
      for (const int64_t tokens : {32, 128, 1000}) {
        double all = 0, plain = 0;
        for (int i = 0; i < (kSanitized ? 20 : 100); ++i) {
          const Machine machine{.more = more, .draft = draft, .noise = &noise};
          DraftPace pace = pace_for(machine);
          const Told told = answer(pace, machine, 16, tokens, none_right);
          all += told.seconds.back();
          plain += static_cast<double>(told.seconds.size());
        }
        CHECK(all <= (1 + kMostLoss) * plain);
      }
}

// The seconds that answers of so many tokens take, one with each seed, with the width that is best for all of them.
double best_fixed(const Machine& machine, int64_t prompt, int64_t tokens, double chance, int seeds) {
  double best = HUGE_VAL;
  for (int64_t width = 0; width < kGemvTokens / machine.requests; ++width) {
    double all = 0;
    for (int seed = 0; seed < seeds; ++seed) {
      std::mt19937 generator(static_cast<unsigned>(seed));
      DraftPace unused;
      const auto fixed = [width](const DraftPace::Batch& batch) {
        return DraftPace::Choice{std::min(width, batch.most),
                                 batch.unread < 0 ? DraftPace::Reads::all : DraftPace::Reads::on};
      };
      all += answer(unused, machine, prompt, tokens, chance_of(chance, generator), fixed).seconds.back();
    }
    best = std::min(best, all);
  }
  return best;
}

void test_drafts_that_pay() {
  const Machine machine{};  // a draft model of a tenth
  constexpr int kSeeds = 20;
  for (const int64_t prompt : {16, 128, 512}) {
    double first = 0, later = 0;
    int64_t begin = 0;
    for (int seed = 0; seed < kSeeds; ++seed) {
      std::mt19937 generator(static_cast<unsigned>(seed));
      DraftPace pace = pace_for(machine);
      const Told told = answer(pace, machine, prompt, 2000, chance_of(0.9, generator));
      first += told.seconds.back();
      begin = std::max(begin, told.first);
      const Told next = answer(pace, machine, prompt, 400, chance_of(0.9, generator));
      CHECK(next.first <= 3);  // it profits from the start
      later += next.seconds.back();
    }
    const double best = best_fixed(machine, prompt, 2000, 0.9, kSeeds),
                 soon = best_fixed(machine, prompt, 400, 0.9, kSeeds);
    CHECK(begin <= 32 && first <= 1.05 * best && later <= 1.05 * soon);
    std::printf("prompt %ld: first drafts behind token %ld, %.3f, later %.3f of the best width's time\n",
                static_cast<long>(prompt), static_cast<long>(begin), first / best, later / soon);
  }
}

// A draft model of a long prompt whose answers are of ordinary length: it has to read before it can save anything, and
// knows the better what comes the more it has read. As SmolLM2 in 4 bits drafts for itself in bf16, whose prompts both
// read equally fast.
void test_long_prompts() {
  const Machine machine{.more = 0.08, .draft = 0.33, .prompt = 0.08, .reading = 1};
  constexpr int kSeeds = 20, kAnswers = 6;
  for (const int64_t prompt : {200, 500}) {
    double first = 0, later = 0, plain = 0;
    int64_t begin = 0;
    for (int seed = 0; seed < kSeeds; ++seed) {
      std::mt19937 generator(static_cast<unsigned>(seed));
      DraftPace pace = pace_for(machine);
      for (int i = 0; i < kAnswers; ++i) {
        const Told told = answer(pace, machine, prompt, 200, chance_of(0.92, generator), nullptr, false);
        (i == 0 ? first : later) += told.seconds.back();
        if (i == 0) begin = std::max(begin, told.first < 0 ? 200 : told.first);
        if (i == 0) plain += machine.plain * static_cast<double>(told.seconds.size());
      }
    }
    CHECK(begin <= 8 && plain >= 1.07 * first && (kAnswers - 1) * plain >= 1.17 * later);
    std::printf("prompt %ld: first drafts behind token %ld, %.3f and %.3f times as fast as without drafts\n",
                static_cast<long>(prompt), static_cast<long>(begin), plain / first, (kAnswers - 1) * plain / later);
  }
}

// Passes take longer behind a long text: what drafts cost behind a short one must not be compared with that.
void test_long_texts_behind_short_ones() {
  const Machine small{.more = 0.15, .draft = 0.02};
  Machine large = small;
  large.plain = 1.5;
  large.more = small.more / large.plain;  // a draft costs what it did
  large.draft = small.draft / large.plain;
  DraftPace pace = pace_for(small);
  std::mt19937 generator(3);
  for (int i = 0; i < 20; ++i) answer(pace, small, 16, 200, chance_of(0.6, generator));
  // What those have saved may be spent, one step of an answer at once.
  for (int i = 0; i < 30; ++i) answer(pace, small, 16, 400, none_right);
  for (int i = 0; i < 100; ++i) pace.passed(1, 1, large.plain);  // of an answer that takes no drafts
  double all = 0, plain = 0;
  for (int i = 0; i < 10; ++i) {
    const Told told = answer(pace, large, 2000, 32, none_right);
    all += told.seconds.back();
    plain += large.plain * static_cast<double>(told.seconds.size());
  }
  CHECK(all <= (1 + kMostLoss) * plain);
}

// Lookup: what came before is drafted, further where more of the text came before, and less often where it was wrong.
void test_lookup() {
  NgramDrafts drafts;
  std::vector<int64_t> text;
  for (int64_t token = 0; token < 40; ++token) text.push_back(token);
  for (int64_t token = 0; token < 3; ++token) text.push_back(token);
  const auto length = [&] { return static_cast<int64_t>(drafts.propose(text, 15).size()); };
  CHECK(drafts.propose(text, 15) == (std::vector<int64_t>{3, 4, 5, 6}));
  CHECK(drafts.propose(text, 2) == (std::vector<int64_t>{3, 4}));
  drafts.report(4, 1);
  CHECK(length() == 4);  // three of the text and a half more; of the draft only one was right
  for (int64_t token = 3; token < 8; ++token) text.push_back(token);
  CHECK(length() == 12);
  drafts.report(12, 0);
  CHECK(length() == 12);
  drafts.report(12, 0);
  CHECK(length() == 0 && length() == 12);
  drafts.report(12, 0);
  CHECK(length() == 0 && length() == 0 && length() == 12);
  drafts.report(12, 12);
  CHECK(length() == 15);
}

}  // namespace

int main() {
  test_lookup();
  test_long_texts_behind_short_ones();
  test_a_busy_machine();
  test_drafts_that_pay();
  test_long_prompts();
  test_drafts_that_are_never_right();
  test_drafts_that_are_never_right_in_many_answers();
  test_random_costs();
  return 0;
}
