// SPDX-License-Identifier: Apache-2.0
// Sampling against a plain double-precision version of Hugging Face's logits processors, and against the distribution
// that they leave.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "llm/model/sampling.h"

namespace {

using namespace anyaccel::llm;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
using Tokens = std::vector<int64_t>;

struct Case {
  SamplingOptions options;
  Tokens history;
  int64_t prompt = 0;
  Tokens suppressed;
  std::vector<uint32_t> mask;  // empty: none
};

std::vector<double> softmax_of(const std::vector<double>& scores) {
  const double top = *std::max_element(scores.begin(), scores.end());
  std::vector<double> p;
  double total = 0;
  for (const double score : scores) total += p.emplace_back(std::exp(score - top));
  for (double& value : p) value /= total;
  return p;
}

std::vector<size_t> order_of(const std::vector<double>& keys) {  // ascending, stable
  std::vector<size_t> order(keys.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return keys[a] < keys[b]; });
  return order;
}

// How far back a repetition may reach, by trying each breaker at each place.
size_t reach_of(const SamplingOptions& o, const Tokens& history) {
  const size_t n = history.size();
  for (size_t back = 0; back < n; ++back) {  // the head of the breaker has `back` tokens behind it
    size_t best = n + 1;
    for (const auto& breaker : o.dry_breakers) {
      const size_t tail = breaker.size() - 1;
      if (history[n - 1 - back] != breaker[0] || tail > back) continue;
      bool same = true;
      for (size_t i = 0; i < tail; ++i) same = same && history[n - back + i] == breaker[i + 1];
      if (same && (best > n || tail > best)) best = tail;
    }
    if (best <= n) return back - best;
  }
  return n;
}

// DRY: for each place where the text so far has ended before, how many tokens before it are those at the end.
void penalise(std::vector<double>& s, const SamplingOptions& o, Tokens history) {
  if (o.dry_last_n >= 0 && static_cast<size_t>(o.dry_last_n) < history.size())
    history.erase(history.begin(), history.end() - o.dry_last_n);
  const size_t n = history.size(), reach = reach_of(o, history), allowed = static_cast<size_t>(o.dry_allowed_length);
  if (n <= allowed || reach < allowed) return;
  for (size_t token = 0; token < s.size(); ++token) {
    bool breaks = false;
    for (const auto& breaker : o.dry_breakers)
      breaks = breaks || (breaker.size() == 1 && breaker[0] == static_cast<int64_t>(token));
    size_t longest = 0;
    bool found = false;
    for (size_t place = 1; place < n && !breaks; ++place) {
      if (history[place] != static_cast<int64_t>(token)) continue;
      size_t same = 0;
      while (same < place && history[place - 1 - same] == history[n - 1 - same]) ++same;
      if (std::min(same, reach) >= allowed) found = true, longest = std::max(longest, std::min(same, reach));
    }
    if (found)
      s[token] -= static_cast<double>(
          static_cast<float>(static_cast<double>(o.dry_multiplier) *
                             std::pow(static_cast<double>(o.dry_base), static_cast<double>(longest - allowed))));
  }
}

// XTC: probabilities without the likeliest tokens, where it applies.
std::vector<double> excluded(std::vector<double> p, const SamplingOptions& o) {
  double total = 0;
  for (const double value : p) total += std::pow(value, static_cast<double>(o.temperature));
  std::vector<size_t> reaching;
  for (size_t i = 0; i < p.size(); ++i)
    if (p[i] > 0 && std::pow(p[i], static_cast<double>(o.temperature)) / total >= static_cast<double>(o.xtc_threshold))
      reaching.push_back(i);
  if (o.xtc_threshold > 0.5f || reaching.size() < 2) return p;
  const size_t kept =
      *std::min_element(reaching.begin(), reaching.end(), [&](size_t a, size_t b) { return p[a] < p[b]; });
  double left = 0;
  for (const size_t i : reaching)
    if (i != kept) p[i] = 0;
  for (const double value : p) left += value;
  for (double& value : p) value /= left;
  return p;
}

// As transformers.generation.logits_process does each step, one after another over the whole vocabulary.
std::vector<double> oracle(const std::vector<float>& logits, const Case& c) {
  std::vector<double> s(logits.begin(), logits.end());
  const SamplingOptions& o = c.options;
  for (const auto& [token, bias] : o.bias) s[static_cast<size_t>(token)] += static_cast<double>(bias);
  for (const int64_t token : std::set<int64_t>(c.history.begin(), c.history.end())) {
    double& score = s[static_cast<size_t>(token)];
    score = score < 0 ? score * o.repetition_penalty : score / o.repetition_penalty;
  }
  const Tokens generated(c.history.begin() + c.prompt, c.history.end());
  for (const int64_t token : generated) s[static_cast<size_t>(token)] -= o.frequency_penalty;
  for (const int64_t token : std::set<int64_t>(generated.begin(), generated.end()))
    s[static_cast<size_t>(token)] -= o.presence_penalty;
  const size_t n = static_cast<size_t>(o.no_repeat_ngram);
  if (n > 0 && c.history.size() + 1 >= n)
    for (size_t i = 0; i + n <= c.history.size(); ++i)
      if (std::equal(c.history.end() - static_cast<int64_t>(n) + 1, c.history.end(),
                     c.history.begin() + static_cast<int64_t>(i)))
        s[static_cast<size_t>(c.history[i + n - 1])] = -kInfinity;
  if (o.dry_multiplier > 0 && o.dry_last_n != 0) penalise(s, o, c.history);
  for (const int64_t token : c.suppressed) s[static_cast<size_t>(token)] = -kInfinity;
  for (size_t i = 0; i < s.size() && !c.mask.empty(); ++i)
    if ((c.mask[i / 32] >> (i % 32) & 1) == 0) s[i] = -kInfinity;
  if (!o.do_sample) return s;
  for (double& score : s) score /= o.temperature;
  if (o.top_k > 0) {
    std::vector<double> sorted = s;
    std::sort(sorted.begin(), sorted.end(), std::greater<double>());
    const double limit = sorted[std::min(sorted.size(), static_cast<size_t>(o.top_k)) - 1];
    for (double& score : s)
      if (score < limit) score = -kInfinity;
  }
  if (o.top_p < 1) {
    const auto p = softmax_of(s);
    const auto order = order_of(s);
    double sum = 0;
    for (size_t i = 0; i + 1 < order.size(); ++i)
      if ((sum += p[order[i]]) <= 1 - static_cast<double>(o.top_p)) s[order[i]] = -kInfinity;
  }
  if (o.min_p > 0) {
    const auto p = softmax_of(s);
    const double top = *std::max_element(p.begin(), p.end());
    for (size_t i = 0; i < s.size(); ++i)
      if (p[i] < o.min_p * top) s[i] = -kInfinity;
  }
  if (o.typical_p < 1) {
    const auto p = softmax_of(s);
    double entropy = 0;
    for (const double value : p)
      if (value > 0) entropy -= value * std::log(value);
    std::vector<double> distance;
    for (const double value : p) distance.push_back(std::abs(-std::log(value) - entropy));
    const auto order = order_of(distance);
    double sum = 0;
    size_t last = 0;
    for (const size_t index : order) last += (sum += p[index]) < o.typical_p;
    last = std::min(last, order.size() - 1);
    for (size_t i = 0; i < s.size(); ++i)
      if (distance[i] > distance[order[last]]) s[i] = -kInfinity;
  }
  return s;
}

int64_t draw(std::vector<float> logits, const Case& c, Random& random, SamplingScratch& scratch) {
  return sample(logits.data(), static_cast<int64_t>(logits.size()), c.options, c.history.data(),
                static_cast<int64_t>(c.history.size()), c.prompt, c.suppressed.data(),
                static_cast<int64_t>(c.suppressed.size()), random, scratch, c.mask.empty() ? nullptr : c.mask.data());
}

std::vector<float> random_logits(int64_t n, float scale, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> logits(static_cast<size_t>(n));
  for (float& value : logits) value = normal(generator);
  return logits;
}

// The frequencies of many draws are within five deviations of the probabilities; nothing impossible is drawn.
void check_distribution(const std::vector<float>& logits, const Case& c, int draws) {
  auto p = softmax_of(oracle(logits, c));
  const auto without = excluded(p, c.options);
  const auto chance = static_cast<double>(c.options.xtc_probability);
  for (size_t i = 0; i < p.size(); ++i) p[i] = chance * without[i] + (1 - chance) * p[i];
  Random random(123);
  SamplingScratch scratch;
  std::vector<int> counts(logits.size());
  for (int i = 0; i < draws; ++i) {
    const int64_t token = draw(logits, c, random, scratch);
    CHECK(token >= 0 && token < static_cast<int64_t>(logits.size()));
    ++counts[static_cast<size_t>(token)];
  }
  for (size_t i = 0; i < p.size(); ++i) {
    const double expected = p[i] * draws;
    if (p[i] == 0) CHECK(counts[i] == 0);
    CHECK(std::abs(counts[i] - expected) <= 5 * std::sqrt(expected * (1 - p[i])) + 4);
  }
}

std::vector<Case> cases() {
  const auto sampled = [](SamplingOptions options) {
    options.do_sample = true;
    return Case{options, {}, 0, {}, {}};
  };
  std::vector<Case> result = {
      sampled({}),
      sampled({.temperature = 0.5f}),
      sampled({.temperature = 2.0f, .top_k = 5}),
      sampled({.top_k = 1}),
      sampled({.top_k = 1000000}),
      sampled({.top_p = 0.7f}),
      sampled({.top_p = 1e-6f}),
      sampled({.top_k = 20, .top_p = 0.8f}),
      sampled({.min_p = 0.2f}),
      sampled({.top_k = 30, .top_p = 0.95f, .min_p = 0.1f}),
      sampled({.typical_p = 0.4f}),
      sampled({.top_k = 25, .typical_p = 0.7f}),
      sampled({.temperature = 0.7f, .top_k = 40, .top_p = 0.9f, .repetition_penalty = 1.3f}),
      sampled({.xtc_probability = 0.5f, .xtc_threshold = 0.05f}),
      sampled({.temperature = 1.6f, .top_p = 0.9f, .xtc_probability = 1.0f, .xtc_threshold = 0.04f}),
      sampled({.temperature = 0.6f, .top_k = 12, .xtc_probability = 0.7f, .xtc_threshold = 0.1f}),
      sampled({.min_p = 0.05f, .xtc_probability = 1.0f, .xtc_threshold = 0.6f}),
      sampled({.xtc_probability = 1.0f, .xtc_threshold = 0.0f}),
  };
  Case processed = sampled({.top_p = 0.9f,
                            .repetition_penalty = 1.5f,
                            .presence_penalty = 0.5f,
                            .frequency_penalty = 0.25f,
                            .no_repeat_ngram = 2});
  processed.history = {3, 4, 5, 3, 4, 6, 7, 7, 4};
  processed.prompt = 4;
  processed.suppressed = {0, 9};
  result.push_back(processed);
  return result;
}

void test_distributions() {
  for (const Case& c : cases()) {
    check_distribution(random_logits(50, 2, 1), c, 20000);
    check_distribution(random_logits(3000, 3, 2), c, 2000);
  }
  // Equal values at the limit of top_k are all kept.
  std::vector<float> ties(40, 1.0f);
  ties[7] = 2.0f;
  Case c;
  c.options = {.do_sample = true, .top_k = 3};
  check_distribution(ties, c, 5000);
}

// In a large vocabulary: what is kept is what the oracle keeps.
void test_large() {
  for (const int64_t n : {49152, 151936}) {
    for (const Case& c : cases()) {
      const auto logits = random_logits(n, 2, 5);
      const auto s = oracle(logits, c);
      Random random(9);
      SamplingScratch scratch;
      for (int i = 0; i < 6; ++i) {
        const int64_t token = draw(logits, c, random, scratch);
        CHECK(token >= 0 && token < n && s[static_cast<size_t>(token)] > -kInfinity);
      }
    }
  }
}

void test_greedy() {
  Random random;
  SamplingScratch scratch;
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 generator(seed);
    Case c;
    c.options.repetition_penalty = seed % 2 != 0 ? 1.2f : 1.0f;
    c.options.presence_penalty = seed % 3 == 0 ? 0.4f : 0.0f;
    c.options.frequency_penalty = seed % 5 == 0 ? 0.3f : 0.0f;
    c.options.no_repeat_ngram = static_cast<int>(seed % 4);
    for (unsigned i = 0; i < seed % 60; ++i) c.history.push_back(static_cast<int64_t>(generator() % 12));
    c.prompt = static_cast<int64_t>(c.history.size() / 2);
    if (seed % 7 == 0) c.suppressed = {1, 5};
    if (seed % 11 == 0) c.mask = {static_cast<uint32_t>(generator() | 1u << 3)};
    if (seed % 13 == 0) c.options.bias = {{2, 3.0f}, {7, -1.5f}};
    if (seed % 3 == 1) {
      c.options.dry_multiplier = 0.8f;
      c.options.dry_base = seed % 2 != 0 ? 1.75f : 1.0f;
      c.options.dry_allowed_length = static_cast<int>(seed % 4);
      c.options.dry_last_n = seed % 5 == 0 ? 17 : -1;
      if (seed % 4 == 1) c.options.dry_breakers = {{3}, {4, 5}, {4, 5, 6}, {7, 7}};
      // With few different tokens there are long repetitions.
      for (int64_t& token : c.history) token %= 2 + static_cast<int64_t>(seed % 9);
    }
    const auto logits = random_logits(20, 1, seed + 1000);
    const auto s = oracle(logits, c);
    CHECK(draw(logits, c, random, scratch) == std::max_element(s.begin(), s.end()) - s.begin());
  }
  Case c;
  CHECK(draw({1, 3, 3, 2}, c, random, scratch) == 1);
  c.history = {-5, 700};  // not of this vocabulary
  c.suppressed = {-1, 4, 1};
  c.options.repetition_penalty = 2;
  c.options.no_repeat_ngram = 1;
  CHECK(draw({1, 3, 3, 2}, c, random, scratch) == 2);
  // A penalty that no float can hold is the largest one, and not a NaN.
  Case repeated;
  repeated.history.assign(3000, 1);
  repeated.options.dry_multiplier = 1;
  CHECK(draw({1, 3, 2}, repeated, random, scratch) == 2);
  repeated.options.dry_last_n = 0;
  CHECK(draw({1, 3, 2}, repeated, random, scratch) == 1);
}

// Log-probabilities of a distribution, and its likeliest tokens in order.
void test_scores() {
  SamplingScratch scratch;
  TokenScore found;
  for (const int64_t n : {int64_t{1}, int64_t{7}, int64_t{3000}}) {
    const auto logits = random_logits(n, 4, static_cast<unsigned>(n));
    const auto p = softmax_of({logits.begin(), logits.end()});
    for (const int top : {0, 1, 5, 20}) {
      CHECK(score(logits.data(), n, n / 2, top, scratch, found));
      CHECK(found.token == n / 2 &&
            std::abs(static_cast<double>(found.logprob) - std::log(p[static_cast<size_t>(n / 2)])) < 1e-4);
      CHECK(static_cast<int64_t>(found.top.size()) == std::min<int64_t>(top, n));
      std::vector<double> minus;
      for (const double value : p) minus.push_back(-value);
      const auto order = order_of(minus);
      for (size_t i = 0; i < found.top.size(); ++i) {
        CHECK(found.top[i].first == static_cast<int64_t>(order[i]));
        CHECK(std::abs(static_cast<double>(found.top[i].second) - std::log(p[order[i]])) < 1e-4);
      }
    }
  }
  const std::vector<float> equal(40, 1.0f);
  CHECK(score(equal.data(), 40, 39, 3, scratch, found) && found.top.size() == 3 && found.top[2].first == 2);
  const std::vector<float> bad{1, std::nanf(""), 2};
  CHECK(!score(bad.data(), 3, 0, 1, scratch, found));
}

void test_bad_logits() {
  Random random;
  SamplingScratch scratch;
  const float nan = std::nanf(""), infinity = std::numeric_limits<float>::infinity();
  for (const bool do_sample : {false, true}) {
    for (const int top_k : {0, 2}) {
      Case c;
      c.options.do_sample = do_sample;
      c.options.top_k = top_k;
      CHECK(draw({1, nan, 2}, c, random, scratch) == -1);
      CHECK(draw({1, infinity, 2}, c, random, scratch) == -1);
      CHECK(draw({-infinity, -infinity, -infinity}, c, random, scratch) == -1);
      CHECK(draw({}, c, random, scratch) == -1);
      CHECK(draw({-infinity, -3, -infinity}, c, random, scratch) == 1);
      CHECK(draw({5}, c, random, scratch) == 0);
      c.options.temperature = 1e-30f;
      CHECK(draw({1, 2, -infinity, 3}, c, random, scratch) == 3);
      c.suppressed = {0};
      CHECK(draw({5}, c, random, scratch) == -1);
    }
  }
}

void test_random() {
  Random a(42), b(42), c(43);
  double mean = 0;
  int equal = 0;
  for (int i = 0; i < 100000; ++i) {
    const double x = a.uniform();
    CHECK(x >= 0 && x < 1 && x == b.uniform());
    equal += x == c.uniform();
    mean += x / 100000;
  }
  CHECK(std::abs(mean - 0.5) < 0.005 && equal == 0);
  // The generator's own reference: the first number of seed 0 (splitmix64, then xoshiro256**).
  CHECK(std::floor(Random(0).uniform() * 0x1p53) == std::floor(static_cast<double>(0x99ec5f36cb75f2b4u >> 11)));
}

}  // namespace

int main() {
  test_random();
  test_greedy();
  test_scores();
  test_bad_logits();
  test_distributions();
  test_large();
  std::printf("passed\n");
  return 0;
}
