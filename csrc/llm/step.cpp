// SPDX-License-Identifier: Apache-2.0
// Steps of many sequences together: which tokens pass in which run, and what becomes of their logits.
#include <algorithm>
#include <exception>
#include <unordered_set>

#include "llm/errors.h"
#include "llm/model.h"
#include "llm/request.h"

namespace anyaccel::llm {

// New tokens of one sequence.
struct Model::Work {
  int sequence;
  const int64_t* tokens;
  int64_t count;
  int64_t start;  // the sequence's length before
};

// What a step will have done, when all of it went well.
struct StepResult {
  struct One {
    Request* request;
    int64_t token;
    Random random;
  };
  const std::vector<Request*>& asked;  // all of the step
  std::vector<One> ones;
};

void Model::check_room(const std::vector<Work>& work) const {
  size_t needed = 0;
  for (const Work& one : work) needed += cache_.extend_bytes(one.sequence, one.count);
  const size_t left = cache_.limit_bytes() - std::min(cache_.limit_bytes(), cache_.used_bytes());
  if (needed > left) throw OutOfCache(needed, left, cache_.limit_bytes());
}

// In runs of about equal size.
template <class Wanted, class Done>
void Model::process(std::vector<Work>& work, Wanted wanted, Done done) {
  check_room(work);
  int64_t total = 0;
  for (Work& one : work) {
    one.start = cache_.length(one.sequence);
    total += one.count;
  }
  if (total == 0) return;
  const int64_t most = forward_.most_tokens();
  const int64_t runs = (total + most - 1) / most;
  const int64_t size = runs == 1 ? total : std::min(most, ((total + runs - 1) / runs + 15) / 16 * 16);
  try {
    size_t at = 0;      // in work
    int64_t taken = 0;  // of work[at]
    int64_t index = 0;  // of the next token among all
    while (index < total) {
      if (index > 0 && interrupt_check_) interrupt_check_();
      tokens_.clear();
      const int64_t first = index;
      while (at < work.size() && index - first < size) {
        const Work& one = work[at];
        const int64_t count = std::min(one.count - taken, size - (index - first));
        if (count > 0) {
          tokens_.queries.push_back(
              {one.sequence, one.start + taken, static_cast<int>(count), static_cast<int>(tokens_.tokens.size())});
          tokens_.contexts.push_back(one.start + one.count);
          for (int64_t i = 0; i < count; ++i) {
            if (wanted(index + i)) tokens_.wanted.push_back(static_cast<int32_t>(tokens_.tokens.size()));
            tokens_.tokens.push_back(static_cast<int32_t>(one.tokens[taken + i]));
          }
          cache_.extend(one.sequence, count);
          index += count;
          taken += count;
        }
        if (taken == one.count) {
          ++at;
          taken = 0;
        }
      }
      tokens_.logits_stride = spec_.vocab;
      tokens_.logits = done.logits(tokens_.wanted.size());
      forward_.run(tokens_);
      done.take(tokens_.wanted.size());
    }
  } catch (...) {
    for (const Work& one : work)
      if (cache_.length(one.sequence) > one.start) cache_.truncate(one.sequence, one.start);
    throw;
  }
}

void Model::forward(const std::vector<int>& sequences, const std::vector<int64_t>& counts, const int64_t* tokens,
                    float* logits, const std::vector<int64_t>& rows) {
  const auto held = lock();
  check_ready();
  if (sequences.size() != counts.size()) throw UsageError("forward: needs one count a sequence");
  if (!rows.empty() && logits == nullptr) throw UsageError("forward: rows are wanted, and no place for logits");
  std::vector<Work> work;
  std::unordered_set<int> seen;
  int64_t total = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    check_sequence(sequences[i]);
    if (!seen.insert(sequences[i]).second)
      throw UsageError("forward: sequence " + std::to_string(sequences[i]) + " is there twice");
    if (counts[i] < 0) throw UsageError("forward: a sequence with " + std::to_string(counts[i]) + " tokens");
    const int64_t length = cache_.length(sequences[i]) + counts[i];
    if (spec_.max_tokens > 0 && length > spec_.max_tokens)
      throw UsageError("sequence " + std::to_string(sequences[i]) + " would have " + std::to_string(length) +
                       " tokens: the model's context has " + std::to_string(spec_.max_tokens));
    work.push_back({sequences[i], tokens + total, counts[i], 0});
    total += counts[i];
  }
  check_tokens(tokens, total);
  for (size_t i = 0; i < rows.size(); ++i)
    if (rows[i] < 0 || rows[i] >= total || (i > 0 && rows[i] <= rows[i - 1]))
      throw UsageError("forward: rows must be ascending, and of the " + std::to_string(total) + " tokens");

  struct Done {
    float* next;
    int64_t vocab;
    float* logits(size_t) { return next; }
    void take(size_t count) { next += static_cast<int64_t>(count) * vocab; }
  };
  auto row = rows.begin();
  process(
      work,
      [&](int64_t index) {
        if (row == rows.end() || *row != index) return false;
        ++row;
        return true;
      },
      Done{logits, spec_.vocab});
}

std::vector<int64_t> Model::step(const std::vector<Request*>& requests) {
  const auto held = lock();
  check_ready();
  std::unordered_set<const Request*> seen;
  std::vector<Request*> first, second;  // the second ones wait for the prefix that they share
  for (size_t i = 0; i < requests.size(); ++i) {
    Request* request = requests[i];
    if (request->model_.get() != this)
      throw UsageError("request " + std::to_string(i) + " of the step is of another model");
    if (!seen.insert(request).second) throw UsageError("request " + std::to_string(i) + " is in the step twice");
    if (request->finished_ == Request::Finish::stopped || request->sequence_ < 0)
      throw UsageError("request " + std::to_string(i) + " of the step was finished with finish()");
  }
  for (Request* request : requests) {
    if (request->finished_ != Request::Finish::no) continue;
    const Request* prefix = request->prefix_.get();
    const bool waits = prefix != nullptr && prefix->cached_ == 0 && seen.contains(prefix) &&
                       prefix->finished_ == Request::Finish::no && prefix->prefix_ == nullptr;
    (waits ? second : first).push_back(request);
  }
  StepResult result{requests, {}};
  result.ones.reserve(requests.size());
  try {
    step_some(first, result);
    // The second wave can share what the first one has put into the cache.
    for (Request* request : first) request->cached_ = static_cast<int64_t>(request->tokens_.size());
    step_some(second, result);
  } catch (...) {
    // A wave that failed has taken back its own; the first one's last tokens are computed again in the next step.
    for (Request* request : first) {
      if (request->pending() > 0) continue;
      --request->cached_;
      cache_.truncate(request->sequence_, request->cached_);
    }
    throw;
  }
  for (Request* request : second) request->cached_ = static_cast<int64_t>(request->tokens_.size());

  std::vector<int64_t> tokens(requests.size(), -1);
  for (StepResult::One& one : result.ones) {
    Request& request = *one.request;
    request.random_ = one.random;
    request.tokens_.push_back(one.token);
    const auto& ends = request.options_.end_tokens;
    const auto count = static_cast<int64_t>(request.tokens_.size());
    const int64_t most = request.options_.max_new_tokens;
    if (!request.options_.ignore_end && std::find(ends.begin(), ends.end(), one.token) != ends.end())
      request.finished_ = Request::Finish::end;
    else if ((most > 0 && count - request.prompt_ >= most) || (spec_.max_tokens > 0 && count >= spec_.max_tokens))
      request.finished_ = Request::Finish::length;
    const auto index = std::find(requests.begin(), requests.end(), one.request) - requests.begin();
    tokens[static_cast<size_t>(index)] = one.token;
  }
  return tokens;
}

void Model::step_some(const std::vector<Request*>& requests, StepResult& result) {
  std::vector<Work> work;
  for (Request* request : requests) {
    request->share_prefix();
    // As transformers does with longrope: the cache is made anew when the context grows beyond the short factors.
    const auto length = static_cast<int64_t>(request->tokens_.size());
    for (const RopeSpec& rope : spec_.ropes) {
      if (rope.long_inv_freq.empty() || request->cached_ == 0) continue;
      if (!RopeTable(rope).changes_between(request->cached_, length)) continue;
      cache_.truncate(request->sequence_, 0);
      request->cached_ = 0;
    }
    work.push_back({request->sequence_, request->tokens_.data() + request->cached_, request->pending(), 0});
  }
  std::vector<int64_t> last;  // index of each request's last token among all
  int64_t total = 0;
  for (const Work& one : work) last.push_back((total += one.count) - 1);

  struct Done {
    Model& model;
    const std::vector<Request*>& requests;
    StepResult& result;
    size_t next = 0;  // of requests
    float* logits(size_t count) {
      const size_t floats = count * static_cast<size_t>(model.spec_.vocab);
      if (model.logits_.size() < floats) model.logits_.resize(floats);
      return model.logits_.data();
    }
    void take(size_t count) {
      model.choose(requests, next, count, result);
      next += count;
    }
  };
  auto row = last.begin();
  process(
      work,
      [&](int64_t index) {
        if (row == last.end() || *row != index) return false;
        ++row;
        return true;
      },
      Done{*this, requests, result});
}

// Tokens for requests first, first + 1, ..., whose logits are there.
void Model::choose(const std::vector<Request*>& requests, size_t first, size_t count, StepResult& result) {
  const size_t begin = result.ones.size();
  for (size_t i = 0; i < count; ++i) result.ones.push_back({requests[first + i], -1, requests[first + i]->random_});
  std::exception_ptr failure;
  std::mutex failed;
  const auto choose_part = [&](int thread, int threads) {
    try {
      for (auto i = static_cast<size_t>(thread); i < count; i += static_cast<size_t>(threads)) {
        StepResult::One& one = result.ones[begin + i];
        Request& request = *one.request;
        float* logits = logits_.data() + i * static_cast<size_t>(spec_.vocab);
        if (request.keep_logits_) request.logits_.assign(logits, logits + spec_.vocab);
        const auto length = static_cast<int64_t>(request.tokens_.size());
        const auto& ends = request.options_.end_tokens;
        const bool goes_on = length - request.prompt_ < request.options_.min_new_tokens;
        one.token = sample(logits, spec_.vocab, request.options_.sampling, request.tokens_.data(), length,
                           request.prompt_, ends.data(), goes_on ? static_cast<int64_t>(ends.size()) : 0, one.random,
                           scratch_[static_cast<size_t>(thread)]);
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failed);
      failure = std::current_exception();
    }
  };
  profile_.start();
  if (count > 1)
    team_.run([&](int thread) { choose_part(thread, team_.size()); });
  else
    choose_part(0, 1);
  profile_.mark(anyaccel::llm::Work::sample);
  if (failure) std::rethrow_exception(failure);
  for (size_t i = begin; i < result.ones.size(); ++i) {
    if (result.ones[i].token >= 0) continue;
    const auto index = std::find(result.asked.begin(), result.asked.end(), result.ones[i].request);
    throw ModelError("the model's logits are NaN or infinite, for request " +
                     std::to_string(index - result.asked.begin()) +
                     " of the step: its weights may be damaged; or try another dtype, such as fp32");
  }
}

}  // namespace anyaccel::llm
