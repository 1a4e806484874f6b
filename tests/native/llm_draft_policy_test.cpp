// SPDX-License-Identifier: Apache-2.0
// Drafts on a simulated machine, whose costs and accepted drafts are given: what they cost at most and what they save.
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
#include "llm/draft/policy.h"

namespace {

using namespace anyaccel::llm;

constexpr double kMostLoss = 0.03;     // of the time without drafts
constexpr int64_t kUsualAnswer = 128;  // tokens: what shorter answers may lose

// What things take, in passes over the next token of each request.
struct Machine {
  double verify = 0.05;  // a drafted token
  double draft = 0.1;    // a pass of the draft model; 0: a lookup
  double prompt = 0.1;   // a token of a prompt
  double prefill = -1;   // the draft model's prefill, as a share of the model's; below 0: `draft`
  int64_t requests = 1;
  std::mt19937* noise = nullptr;  // other work, which makes half of the measured times up to six times as long
  double scale = 1;               // seconds of a pass

  double measured(double passes) const {
    if (noise == nullptr) return scale * passes;
    std::uniform_real_distribution<double> uniform;
    const double most = uniform(*noise) < 0.5 ? 0.1 : 5;
    return scale * passes * (1 + most * uniform(*noise));
  }
  double prefill_of(int64_t tokens) const {
    return std::max(draft, prompt * (prefill < 0 ? draft : prefill) * static_cast<double>(tokens));
  }
};

// How many of `width` drafts of a request are accepted, if the draft model has read so much of the text.
using Accepts = std::function<int64_t(int64_t width, size_t context)>;
using Plans = std::function<DraftPolicy::Plan(const DraftPolicy::Batch&)>;

struct Answer {
  std::vector<double> passes;  // that the answer took, behind each of its tokens
  int64_t first = INT64_MAX;   // the token behind which the first drafts came
  int64_t drafted = 0;
  double slowdown(int64_t least = 1) const {  // the greatest at any length
    double most = 0;
    for (size_t i = 0; i < passes.size(); ++i) {
      const auto plain = static_cast<double>(i + 1);
      most = std::max(most, (passes[i] - plain) / std::max(plain, static_cast<double>(least)));
    }
    return most;
  }
};

DraftPolicy policy_for(const Machine& machine) {
  DraftPolicy policy;
  if (machine.draft > 0) policy.set_cost(machine.draft, machine.prefill < 0 ? machine.draft : machine.prefill);
  return policy;
}

// A batch of answers of equal length, as Model::step makes them. `plans`: instead of the policy.
Answer answer(DraftPolicy& policy, const Machine& machine, int64_t prompt, int64_t tokens, const Accepts& accepts,
              const Plans& plans = nullptr) {
  Answer answer;
  const int64_t count = machine.requests;
  std::vector<AcceptanceRate> rates(static_cast<size_t>(count));
  std::vector<int64_t> accepted(rates.size());  // drafts that are left of the pass before
  policy.prefilled(prompt * count, machine.measured(machine.prompt * static_cast<double>(prompt * count)));
  int64_t read_to = -1, from = 0;  // what the draft model has read
  double now = 0;
  for (int64_t done = 1; done < tokens; ++done) {
    const int64_t length = prompt + done, open = std::count(accepted.begin(), accepted.end(), 0);
    DraftPolicy::Step step{count};
    DraftPolicy::Plan plan;
    if (open == count) {
      DraftPolicy::Batch batch{.requests = count, .most = std::min(kGemvTokens / count - 1, tokens - done - 1)};
      batch.answered = done;
      batch.left = tokens - done;
      const size_t context = DraftPolicy::context_of(length - from, from == 0);
      for (const AcceptanceRate& rate : rates) {
        batch.acceptance *= policy.acceptance(rate, context);
        batch.proven = batch.proven && rate.proven();
        for (size_t i = 0; i < batch.again.size(); ++i) batch.again[i] *= policy.acceptance(rate, context, i);
      }
      if (machine.draft > 0) {
        batch.length = count * length;
        batch.unread = read_to < 0 ? -1 : count * (length - read_to);
      }
      if (batch.most > 0) plan = plans ? plans(batch) : policy.plan(batch);
      CHECK(plan.width >= 0 && plan.width <= std::max<int64_t>(batch.most, 0));
    }
    if (plan.width > 0 && machine.draft > 0) {
      if (plan.context != DraftPolicy::kGoOn) {
        if (from > 0) rates.assign(rates.size(), {});
        from = plan.context < DraftPolicy::kWhole ? std::max(length - DraftPolicy::kContexts[plan.context], int64_t{0})
                                                  : 0;
        read_to = from;
      }
      const int64_t unread = count * (length - read_to);
      step.passes = plan.width;
      if (unread > 2 * count) {
        now += machine.prefill_of(unread);
        step.prefill = machine.measured(machine.prefill_of(unread));
        step.read = unread;
        policy.draft_prefilled(unread, step.prefill);
        --step.passes;
      }
      now += static_cast<double>(step.passes) * machine.draft;
      step.drafting = machine.measured(static_cast<double>(step.passes) * machine.draft);
      if (step.passes > 0) policy.drafted(count, step.passes, step.drafting);
      read_to = length + plan.width - 1;
    }
    if (plan.width > 0) answer.first = std::min(answer.first, done);
    answer.drafted += plan.width * count;
    step.tokens = open + plan.width * count;
    if (step.tokens > 0) {
      const double pass = 1 + machine.verify * static_cast<double>(plan.width * count);
      policy.decoded(count, step.tokens, machine.measured(pass));
      now += pass;
    }
    const size_t context = DraftPolicy::context_of(length - from, from == 0);
    for (size_t i = 0; i < accepted.size(); ++i) {
      if (accepted[i] > 0) {
        --accepted[i];
      } else if (plan.width > 0) {
        accepted[i] = accepts(plan.width, context);
        rates[i].report(plan.width, accepted[i]);
        policy.report(plan.width, accepted[i], context);
        read_to = std::min(read_to, length + accepted[i]);
      }
    }
    policy.stepped(step);
    answer.passes.push_back(now);
  }
  return answer;
}

// Drafts that are right with that probability where all of the text was read, and less often where an end was.
Accepts right(double probability, std::mt19937& generator) {
  return [probability, &generator](int64_t width, size_t context) {
    constexpr std::array<double, 4> shares = {0.6, 0.8, 0.9, 1};
    std::bernoulli_distribution is_right(probability * shares[context]);
    int64_t accepted = 0;
    while (accepted < width && is_right(generator)) ++accepted;
    return accepted;
  };
}

int64_t never(int64_t, size_t) { return 0; }

void test_drafts_that_do_not_pay_stop_costing() {
  for (const double draft : {0.0, 0.02, 0.1, 0.3, 0.85, 3.0})
    for (const double verify : {0.0, 0.05, 0.3})
      for (const int64_t prompt : {1, 16, 512, 20000})
        for (const int64_t requests : {1, 4}) {
          const Machine machine{.verify = verify, .draft = draft, .requests = requests};
          DraftPolicy policy = policy_for(machine);
          CHECK(answer(policy, machine, prompt, 2000, never).slowdown(kUsualAnswer) <= kMostLoss);
          // What short answers spend in advance is missing in the next ones.
          double passes = 0, plain = 0;
          for (int i = 0; i < 50; ++i) {
            const Answer next = answer(policy, machine, prompt, 16, never);
            passes += next.passes.back();
            plain += static_cast<double>(next.passes.size());
          }
          CHECK(passes <= (1 + kMostLoss) * plain + 1);
          // What was not spent so far may go into reading a text: once, and then no more.
          CHECK(answer(policy, machine, prompt, 2000, never).passes.back() <= (1 + kMostLoss) * 2000);
          const Answer late = answer(policy, machine, prompt, 2000, never);
          CHECK(late.passes.back() <= (1 + kMostLoss) * 2000);
          if (draft + verify >= 0.05) CHECK(late.drafted < 200 * requests);
        }
}

void test_random_costs_and_busy_machines() {
  std::mt19937 generator(5);
  const auto uniform = [&](double from, double to) {
    return std::uniform_real_distribution<double>(from, to)(generator);
  };
  for (int i = 0; i < (kSanitized ? 50 : 500); ++i) {
    Machine machine{.verify = uniform(0, 0.3), .draft = i % 10 == 0 ? 0 : std::exp(uniform(-4, 1))};
    machine.prompt = std::exp(uniform(-4, -0.7));
    machine.prefill = machine.draft * uniform(1, 2);
    machine.requests = i % 3 == 0 ? 4 : 1;
    machine.scale = std::exp(uniform(-8, 0));
    const auto prompt = static_cast<int64_t>(std::exp(uniform(0, 8)));
    DraftPolicy wrong = policy_for(machine), some = policy_for(machine);
    // A half per cent more, since what a pass costs is known only once it has been made.
    CHECK(answer(wrong, machine, prompt, 1000, never).slowdown(kUsualAnswer) <= kMostLoss + 0.005);
    CHECK(answer(some, machine, prompt, 2000, right(uniform(0, 1), generator)).passes.back() <= (1 + kMostLoss) * 2000);
    machine.noise = &generator;
    double passes = 0, plain = 0;
    for (int j = 0; j < 40; ++j) {
      DraftPolicy fresh = policy_for(machine);
      const Answer late = answer(fresh, machine, 16, 200, never);
      passes += late.passes.back();
      plain += static_cast<double>(late.passes.size());
    }
    CHECK(passes <= (1 + kMostLoss) * plain);
  }
}

// The passes that answers take with the best fixed width.
double best_fixed(const Machine& machine, int64_t prompt, int64_t tokens, double probability) {
  double best = HUGE_VAL;
  for (int64_t width = 0; width < kGemvTokens; ++width) {
    std::mt19937 generator(1);
    DraftPolicy unused;
    double all = 0;
    for (int i = 0; i < 20; ++i)
      all += answer(unused, machine, prompt, tokens, right(probability, generator), [width](const auto& batch) {
               return DraftPolicy::Plan{std::min(width, batch.most),
                                        batch.unread < 0 ? DraftPolicy::kWhole : DraftPolicy::kGoOn};
             }).passes.back();
    best = std::min(best, all / 20);
  }
  return best;
}

void test_drafts_that_pay_are_used() {
  // A cheap draft model, and one that reads as slowly as the model and takes a third of its time for a token.
  const Machine cheap{}, dear{.verify = 0.08, .draft = 0.33, .prompt = 0.08, .prefill = 1};
  for (const auto& [machine, tokens, prompt, most] :
       {std::tuple{cheap, 2000, 16, 1.05}, {cheap, 400, 512, 1.25}, {dear, 400, 16, 1.1}, {dear, 400, 500, 1.35}}) {
    std::mt19937 generator(1);
    double first = 0, later = 0;
    for (int i = 0; i < 20; ++i) {
      DraftPolicy policy = policy_for(machine);
      const Answer one = answer(policy, machine, prompt, tokens, right(0.92, generator));
      CHECK(one.first <= 32);
      first += one.passes.back() / 20;
      for (int j = 0; j < 3; ++j) later = answer(policy, machine, prompt, tokens, right(0.92, generator)).passes.back();
    }
    const double best = best_fixed(machine, prompt, tokens, 0.92);
    std::printf("prompt %d: %.3f and %.3f of the best width's time, %.2f of plain decoding's\n", prompt, first / best,
                later / best, first / tokens);
    CHECK(first <= most * best && first <= 0.98 * tokens && later <= 0.9 * tokens);
  }
}

void test_drafts_are_tried_again_where_the_text_changes() {
  for (const double draft : {0.0, 0.1}) {
    const Machine machine{.draft = draft};
    DraftPolicy policy = policy_for(machine);
    std::mt19937 generator(2);
    int64_t steps = 0;
    const Accepts changing = [&steps, good = right(0.95, generator)](int64_t width, size_t context) {
      return ++steps > 12 ? good(width, context) : 0;
    };
    const Answer one = answer(policy, machine, 64, 4000, changing);
    CHECK(steps > 12 && one.passes.back() <= 0.8 * 4000);
    // What has been saved is not spent on drafts that are wrong from then on.
    CHECK(answer(policy, machine, 64, 400, never).slowdown(400) <= 0.05);
  }
}

// Passes take longer behind a long text: drafts behind a short one must not seem to cost nothing there.
void test_long_texts_behind_short_ones() {
  const Machine small{.verify = 0.15, .draft = 0.02};
  Machine large = small;
  large.scale = 1.5;
  DraftPolicy policy = policy_for(small);
  std::mt19937 generator(3);
  for (int i = 0; i < 20; ++i) answer(policy, small, 16, 200, right(0.6, generator));
  for (int i = 0; i < 30; ++i) answer(policy, small, 16, 400, never);
  double passes = 0;
  for (int i = 0; i < 10; ++i) passes += answer(policy, large, 2000, 129, never).passes.back();
  CHECK(passes <= (1 + kMostLoss) * 1280);
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
  test_drafts_that_do_not_pay_stop_costing();
  test_random_costs_and_busy_machines();
  test_drafts_that_pay_are_used();
  test_drafts_are_tried_again_where_the_text_changes();
  test_long_texts_behind_short_ones();
  return 0;
}
