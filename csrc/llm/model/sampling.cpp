// SPDX-License-Identifier: Apache-2.0
#include "llm/model/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <unordered_map>

#include "llm/kernels/ops.h"

namespace anyaccel::llm {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Calls fn(token) for each that the vocabulary has.
template <class Fn>
void each_token(const int64_t* tokens, int64_t count, int64_t vocabulary, Fn&& fn) {
  for (int64_t i = 0; i < count; ++i)
    if (tokens[i] >= 0 && tokens[i] < vocabulary) fn(tokens[i]);
}

// Sets the logit of every listed token to fn(its logit), once however often it is listed: all are read first.
template <class Fn>
void change_once(float* logits, const int64_t* tokens, int64_t count, int64_t vocabulary, std::vector<float>& old,
                 Fn&& fn) {
  old.clear();
  each_token(tokens, count, vocabulary, [&](int64_t token) { old.push_back(logits[token]); });
  size_t next = 0;
  each_token(tokens, count, vocabulary, [&](int64_t token) { logits[token] = fn(old[next++]); });
}

void forbid_repeated_ngrams(float* logits, int64_t vocabulary, int size, const int64_t* history, int64_t length) {
  const int64_t known = size - 1;  // tokens of the n-gram that the next token would complete
  const int64_t* last = history + length - known;
  for (int64_t i = 0; i + known < length; ++i) {
    const int64_t token = history[i + known];
    if (token >= 0 && token < vocabulary && std::equal(last, history + length, history + i)) logits[token] = -kInfinity;
  }
}

// How far back a repetition may reach: to the end of the last breaker.
int64_t behind_breaker(const std::vector<std::vector<int64_t>>& breakers, const int64_t* history, int64_t length,
                       int64_t most) {
  std::unordered_multimap<int64_t, const std::vector<int64_t>*> by_head;
  for (const auto& breaker : breakers)
    if (!breaker.empty()) by_head.emplace(breaker[0], &breaker);
  for (int64_t back = 0; back < most; ++back) {
    int64_t longest = -1;
    const auto [first, end] = by_head.equal_range(history[length - 1 - back]);
    for (auto found = first; found != end; ++found) {
      const std::vector<int64_t>& breaker = *found->second;
      const auto tail = static_cast<int64_t>(breaker.size()) - 1;
      if (tail > longest && tail <= back && std::equal(breaker.begin() + 1, breaker.end(), history + length - back))
        longest = tail;
    }
    if (longest >= 0) return back - longest;
  }
  return most;
}

// Lowers the logits of tokens that would go on with a repetition.
void penalise_repetitions(float* logits, int64_t vocabulary, const SamplingOptions& options, const int64_t* history,
                          int64_t length) {
  const int64_t n = options.dry_last_n < 0 ? length : std::min(options.dry_last_n, length);
  const int64_t allowed = options.dry_allowed_length;
  if (n <= allowed) return;
  const int64_t limit = behind_breaker(options.dry_breakers, history, length, n);
  if (limit < allowed) return;
  // From the end backwards: how many tokens before place i are those before the end (the Z function).
  const auto at = [&](int64_t i) { return history[length - 1 - i]; };
  std::vector<int64_t> same(static_cast<size_t>(n));
  std::unordered_map<int64_t, int64_t> longest;  // by the token that comes next
  for (int64_t i = 1, left = 0, right = 0; i < n; ++i) {
    int64_t z = i < right ? std::min(right - i, same[static_cast<size_t>(i - left)]) : 0;
    while (i + z < n && at(z) == at(i + z)) ++z;
    same[static_cast<size_t>(i)] = z;
    if (i + z > right) left = i, right = i + z;
    if (const int64_t repeated = std::min(z, limit); repeated >= allowed) {
      int64_t& most = longest[at(i - 1)];
      most = std::max(most, repeated);
    }
  }
  for (const auto& breaker : options.dry_breakers)
    if (breaker.size() == 1) longest.erase(breaker[0]);
  const double base = static_cast<double>(options.dry_base);
  const double most =
      base > 1.000001 ? std::floor(std::log(static_cast<double>(std::numeric_limits<float>::max())) / std::log(base))
                      : kInfinity;  // beyond it, the penalty is no float any more
  for (const auto& [token, repeated] : longest) {
    if (token < 0 || token >= vocabulary) continue;
    const double exponent = std::min(static_cast<double>(repeated - allowed), most);
    logits[token] -= static_cast<float>(static_cast<double>(options.dry_multiplier) * std::pow(base, exponent));
  }
}

void process(float* logits, int64_t vocabulary, const SamplingOptions& options, const int64_t* history, int64_t length,
             int64_t prompt, const int64_t* suppressed, int64_t suppressed_count, SamplingScratch& scratch,
             const uint32_t* mask) {
  for (const auto& [token, bias] : options.bias)
    if (token >= 0 && token < vocabulary) logits[token] += bias;
  if (options.repetition_penalty != 1.0f) {
    const float penalty = options.repetition_penalty;
    change_once(logits, history, length, vocabulary, scratch.values,
                [=](float logit) { return logit < 0 ? logit * penalty : logit / penalty; });
  }
  const int64_t* generated = history + std::min(prompt, length);
  const int64_t generated_count = std::max<int64_t>(0, length - prompt);
  if (options.presence_penalty != 0)
    change_once(logits, generated, generated_count, vocabulary, scratch.values,
                [&](float logit) { return logit - options.presence_penalty; });
  if (options.frequency_penalty != 0)
    each_token(generated, generated_count, vocabulary,
               [&](int64_t token) { logits[token] -= options.frequency_penalty; });
  if (options.no_repeat_ngram > 0 && length + 1 >= options.no_repeat_ngram)
    forbid_repeated_ngrams(logits, vocabulary, options.no_repeat_ngram, history, length);
  if (options.dry_multiplier != 0 && options.dry_last_n != 0)
    penalise_repetitions(logits, vocabulary, options, history, length);
  each_token(suppressed, suppressed_count, vocabulary, [&](int64_t token) { logits[token] = -kInfinity; });
  if (mask == nullptr) return;
  for (int64_t first = 0; first < vocabulary; first += 32) {
    const uint32_t word = mask[first / 32];
    if (word == ~uint32_t{0}) continue;
    for (int64_t token = first; token < std::min(first + 32, vocabulary); ++token)
      if ((word >> (token - first) & 1) == 0) logits[token] = -kInfinity;
  }
}

// Indices of the `count` largest of n values, and of all that equal the smallest of them. One pass finds the maxima of
// many small sets; as many values as there are sets are at least as large as the count-th of those, so that few remain
// to be ordered.
void largest(const float* x, int64_t n, int64_t count, std::vector<int32_t>& indices, std::vector<float>& maxima) {
  constexpr int64_t kWidth = 16, kDepth = 16;
  indices.clear();
  maxima.clear();
  float bound = -kInfinity;
  if (n / kDepth > 2 * count) {
    for (int64_t first = 0; first < n; first += kWidth * kDepth) {
      const int64_t end = std::min(n, first + kWidth * kDepth);
      float lanes[kWidth];
      std::fill(lanes, lanes + kWidth, -kInfinity);
      int64_t i = first;
      for (; i + kWidth <= end; i += kWidth)
        for (int64_t lane = 0; lane < kWidth; ++lane)
          lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
      for (; i < end; ++i) lanes[0] = std::max(lanes[0], x[i]);
      maxima.insert(maxima.end(), lanes, lanes + kWidth);
    }
    std::nth_element(maxima.begin(), maxima.begin() + (count - 1), maxima.end(), std::greater<float>());
    bound = maxima[static_cast<size_t>(count - 1)];
  }
  for (int64_t i = 0; i < n; ++i)
    if (x[i] >= bound) indices.push_back(static_cast<int32_t>(i));
  if (static_cast<int64_t>(indices.size()) <= count) return;
  maxima.resize(indices.size());
  std::transform(indices.begin(), indices.end(), maxima.begin(), [x](int32_t i) { return x[i]; });
  std::nth_element(maxima.begin(), maxima.begin() + (count - 1), maxima.end(), std::greater<float>());
  bound = maxima[static_cast<size_t>(count - 1)];
  std::erase_if(indices, [=](int32_t i) { return x[i] < bound; });
}

// Tokens whose information is nearest to the entropy (Meister et al., "Locally Typical Sampling", 2022).
void keep_typical(float mass, std::vector<int32_t>& indices, std::vector<double>& weights) {
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  double entropy = 0;
  for (const double weight : weights)
    if (weight > 0) entropy -= weight / total * std::log(weight / total);
  std::vector<size_t> order(indices.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto distance = [&](size_t i) { return std::abs(-std::log(weights[i] / total) - entropy); };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return distance(a) < distance(b); });
  double before = 0;  // the mass of those that are kept before this one
  size_t last = 0;
  for (; last + 1 < order.size(); ++last) {
    before += weights[order[last]] / total;
    if (before >= mass) break;
  }
  const double limit = distance(order[last]);
  size_t kept = 0;
  for (size_t i = 0; i < indices.size(); ++i) {
    if (distance(i) > limit) continue;
    indices[kept] = indices[i];
    weights[kept++] = weights[i];
  }
  indices.resize(kept);
  weights.resize(kept);
}

// Leaves out the likeliest tokens, which come first, but for the last one that reaches the threshold. Probabilities are
// those of the tokens that are left, at temperature 1.
void exclude_top_choices(float threshold, double temperature, std::vector<int32_t>& indices,
                         std::vector<double>& weights) {
  double total = 0;
  for (const double weight : weights) total += std::pow(weight, temperature);
  size_t reach = 0;
  while (reach < weights.size() && std::pow(weights[reach], temperature) >= static_cast<double>(threshold) * total)
    ++reach;
  if (reach < 2) return;
  indices.erase(indices.begin(), indices.begin() + static_cast<int64_t>(reach) - 1);
  weights.erase(weights.begin(), weights.begin() + static_cast<int64_t>(reach) - 1);
}

template <class Weights>
size_t draw(const Weights& weights, size_t count, Random& random) {
  const double total = std::accumulate(weights.begin(), weights.begin() + static_cast<int64_t>(count), 0.0);
  double left = random.uniform() * total;
  size_t last = 0;  // rounding may leave some: then the last one that is possible
  for (size_t i = 0; i < count; ++i) {
    const double weight = static_cast<double>(weights[i]);
    if (weight <= 0) continue;
    if (left < weight) return i;
    left -= weight;
    last = i;
  }
  return last;
}

}  // namespace

Random::Random(uint64_t seed) {
  for (uint64_t& word : state_) {
    seed += 0x9e3779b97f4a7c15u;
    uint64_t z = seed;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    word = z ^ (z >> 31);
  }
}

double Random::uniform() {
  const auto rotate = [](uint64_t x, int k) { return (x << k) | (x >> (64 - k)); };
  const uint64_t result = rotate(state_[1] * 5, 7) * 9;
  const uint64_t shifted = state_[1] << 17;
  state_[2] ^= state_[0];
  state_[3] ^= state_[1];
  state_[1] ^= state_[2];
  state_[0] ^= state_[3];
  state_[2] ^= shifted;
  state_[3] = rotate(state_[3], 45);
  return static_cast<double>(result >> 11) * 0x1p-53;
}

int64_t sample(float* logits, int64_t vocabulary, const SamplingOptions& options, const int64_t* history,
               int64_t history_length, int64_t prompt, const int64_t* suppressed, int64_t suppressed_count,
               Random& random, SamplingScratch& scratch, const uint32_t* mask) {
  process(logits, vocabulary, options, history, history_length, prompt, suppressed, suppressed_count, scratch, mask);
  const int64_t top = argmax(logits, vocabulary);
  if (!options.do_sample || top < 0) return top;

  // Candidates and their probabilities, up to a common factor. Filters after the first see few of them.
  std::vector<int32_t>& indices = scratch.indices;
  std::vector<double>& weights = scratch.weights;
  const double temperature = std::max(1e-20, static_cast<double>(options.temperature));
  const float highest = logits[top];
  double total = 1.0;
  const bool excludes = options.xtc_probability > 0 && options.xtc_threshold <= 0.5f &&
                        random.uniform() <= static_cast<double>(options.xtc_probability);
  if (options.top_k > 0 && options.top_k < vocabulary) {
    largest(logits, vocabulary, options.top_k, indices, scratch.values);
    std::sort(indices.begin(), indices.end(),
              [=](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
    weights.clear();
    for (const int32_t index : indices)
      weights.push_back(std::exp((static_cast<double>(logits[index]) - highest) / temperature));
    total = std::accumulate(weights.begin(), weights.end(), 0.0);
  } else {
    const float inverse = static_cast<float>(1.0 / temperature);
    for (int64_t i = 0; i < vocabulary; ++i) logits[i] = (logits[i] - highest) * inverse;
    softmax(logits, vocabulary);
    if (options.top_p < 1.0f) {
      for (int64_t count = 256;; count *= 8) {
        largest(logits, vocabulary, std::min(count, vocabulary), indices, scratch.values);
        double sum = 0;
        for (const int32_t index : indices) sum += logits[index];
        if (sum >= options.top_p || count >= vocabulary) break;
      }
    } else if (options.min_p > 0 || options.typical_p < 1.0f || excludes) {
      const float least = std::max(options.min_p * logits[top], std::numeric_limits<float>::min());
      indices.clear();
      for (int64_t i = 0; i < vocabulary; ++i)
        if (logits[i] >= least) indices.push_back(static_cast<int32_t>(i));
    } else {
      const struct {
        const float* data;
        int64_t count;
        const float* begin() const { return data; }
        float operator[](size_t i) const { return data[i]; }
      } all{logits, vocabulary};
      return static_cast<int64_t>(draw(all, static_cast<size_t>(vocabulary), random));
    }
    std::sort(indices.begin(), indices.end(),
              [=](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
    weights.clear();
    for (const int32_t index : indices) weights.push_back(logits[index]);
  }

  size_t kept = weights.size();  // sorted: a filter keeps the first ones
  if (options.top_p < 1.0f) {
    double before = 0;
    for (size_t i = 0; i < kept; ++i) {
      if (i > 0 && before >= options.top_p * total)
        kept = i;
      else
        before += weights[i];
    }
  }
  while (kept > 1 && weights[kept - 1] < static_cast<double>(options.min_p) * weights[0]) --kept;
  indices.resize(kept);
  weights.resize(kept);
  if (options.typical_p < 1.0f) keep_typical(options.typical_p, indices, weights);
  if (excludes) exclude_top_choices(options.xtc_threshold, temperature, indices, weights);
  return indices[draw(weights, weights.size(), random)];
}

bool score(const float* logits, int64_t vocabulary, int64_t token, int top, SamplingScratch& scratch, TokenScore& out) {
  const int64_t likeliest = argmax(logits, vocabulary);
  if (likeliest < 0) return false;
  std::vector<float>& p = scratch.values;
  p.assign(logits, logits + vocabulary);
  softmax(p.data(), vocabulary);
  // The likeliest token's probability is 1 / sum of exp(logit - highest).
  const double normaliser =
      static_cast<double>(logits[likeliest]) - std::log(static_cast<double>(p[static_cast<size_t>(likeliest)]));
  const auto logprob = [&](int64_t i) { return static_cast<float>(static_cast<double>(logits[i]) - normaliser); };
  out.token = token;
  out.logprob = logprob(token);
  out.top.clear();
  const int64_t count = std::min<int64_t>(top, vocabulary);
  if (count <= 0) return true;
  std::vector<int32_t>& indices = scratch.indices;
  largest(logits, vocabulary, count, indices, scratch.values);
  std::sort(indices.begin(), indices.end(),
            [=](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
  indices.resize(std::min(indices.size(), static_cast<size_t>(count)));
  for (const int32_t index : indices) out.top.emplace_back(index, logprob(index));
  return true;
}

}  // namespace anyaccel::llm
