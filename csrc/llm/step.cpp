// SPDX-License-Identifier: Apache-2.0
// Steps of many sequences together: which tokens pass in which run, and what becomes of their logits.
#include <algorithm>
#include <exception>
#include <unordered_set>

#include "llm/errors.h"
#include "llm/feed.h"
#include "llm/model.h"
#include "llm/request.h"

namespace anyaccel::llm {

// New tokens of one sequence.
struct Model::Work {
  int sequence;
  const int64_t* tokens;
  int64_t count;
  int64_t context = 0;  // the sequence's length that rotary positions are of; 0: that after the call
  int64_t start = 0;    // the sequence's length before
};

// How tokens are put into runs; `exact` and `prompt` are those of StepTokens.
struct Model::Pass {
  int64_t most;  // tokens of a run
  bool exact = false, prompt = false;
};

// A token of a request whose logits or hidden state are wanted.
struct Model::Wanted {
  int64_t index;  // among all tokens of the pass
  Request* request;
  int64_t position;  // in its sequence
};

namespace {

enum class Row : uint8_t { none, logits, hidden };

// The most rows of logits in memory at a time, where those of a whole prompt are wanted.
constexpr size_t kMostRows = 128;

}  // namespace

// The tokens that a step has chosen. Requests get them only once nothing can fail any more.
struct StepResult {
  struct One {
    Request* request;
    int64_t token;
    Random random;
    TokenScore score;
  };
  const std::vector<Request*>& asked;  // the requests of the step, in the caller's order
  std::vector<One> ones;
};

void Model::check_room(const std::vector<Work>& work) const {
  size_t needed = 0;
  for (const Work& one : work) needed += cache_.extend_bytes(one.sequence, one.count);
  const size_t left = cache_.limit_bytes() - std::min(cache_.limit_bytes(), cache_.used_bytes());
  if (needed > left) throw OutOfCache(needed, left, cache_.limit_bytes());
}

// The runs are of about equal size.
template <class Kind, class Done>
void Model::process(std::vector<Work>& work, const Pass& pass, Kind kind, Done done) {
  check_room(work);
  int64_t total = 0;
  for (Work& one : work) {
    one.start = cache_.length(one.sequence);
    total += one.count;
  }
  if (total == 0) return;
  const int64_t runs = (total + pass.most - 1) / pass.most;
  const int64_t size = runs == 1 ? total : std::min(pass.most, ((total + runs - 1) / runs + 15) / 16 * 16);
  try {
    size_t at = 0;      // in work
    int64_t taken = 0;  // of work[at]
    int64_t index = 0;  // of the next token among all
    while (index < total) {
      if (index > 0 && interrupt_check_) interrupt_check_();
      tokens_.clear();
      const int64_t first = index;
      while (at < work.size() && index - first < size && tokens_.wanted.size() < done.most_rows()) {
        const Work& one = work[at];
        const int64_t most = std::min(one.count - taken, size - (index - first));
        const auto row = static_cast<int>(tokens_.tokens.size());
        int64_t count = 0;
        for (; count < most && tokens_.wanted.size() < done.most_rows(); ++count) {
          const Row wanted = kind(index + count);
          const auto next = static_cast<int32_t>(tokens_.tokens.size());
          if (wanted == Row::logits) tokens_.wanted.push_back(next);
          if (wanted == Row::hidden) tokens_.hidden_wanted.push_back(next);
          tokens_.tokens.push_back(static_cast<int32_t>(one.tokens[taken + count]));
        }
        if (count > 0) {
          tokens_.queries.push_back({one.sequence, one.start + taken, static_cast<int>(count), row, pass.prompt});
          tokens_.contexts.push_back(one.context > 0 ? one.context : one.start + one.count);
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
      tokens_.hidden = done.hidden(tokens_.hidden_wanted.size());
      tokens_.exact = pass.exact;
      tokens_.prompt = pass.prompt;
      forward_.run(tokens_);
      done.take(tokens_.wanted.size(), tokens_.hidden_wanted.size());
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
    work.push_back({sequences[i], tokens + total, counts[i]});
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
    float* hidden(size_t) { return nullptr; }
    void take(size_t count, size_t) { next += static_cast<int64_t>(count) * vocab; }
    size_t most_rows() const { return SIZE_MAX; }
  };
  auto row = rows.begin();
  process(
      work, Pass{forward_.most_tokens()},
      [&](int64_t index) {
        if (row == rows.end() || *row != index) return Row::none;
        ++row;
        return Row::logits;
      },
      Done{logits, spec_.vocab});
}

std::vector<int64_t> Model::step(const std::vector<Request*>& requests, const std::vector<int64_t>& limits,
                                 bool exact) {
  const auto held = lock();
  check_ready();
  if (!limits.empty() && limits.size() != requests.size())
    throw UsageError("step: " + std::to_string(limits.size()) + " limits for " + std::to_string(requests.size()) +
                     " requests");
  std::unordered_set<const Request*> seen;
  std::vector<Request*> first, second;  // the second ones wait for the prefix that they share
  for (size_t i = 0; i < requests.size(); ++i) {
    Request* request = requests[i];
    if (request->model_.get() != this)
      throw UsageError("request " + std::to_string(i) + " of the step is of another model");
    if (!seen.insert(request).second) throw UsageError("request " + std::to_string(i) + " is in the step twice");
    if (request->finished_ == Request::Finish::stopped || request->sequence_ < 0)
      throw UsageError("request " + std::to_string(i) + " of the step was finished with finish()");
    request->passing_ = limits.empty() || limits[i] <= 0 ? INT64_MAX : limits[i];
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
    step_some(first, exact, result);
    // The second wave can share what the first one has put into the cache.
    for (Request* request : first) request->cached_ += request->passing_;
    step_some(second, exact, result);
  } catch (...) {
    // The first wave's last tokens are computed again in the next step, as is all of a wave that failed.
    for (Request* request : first)
      if (request->pending() == 0) --request->cached_;
    for (const std::vector<Request*>* wave : {&first, &second})
      for (Request* request : *wave)
        if (cache_.length(request->sequence_) > request->cached_) cache_.truncate(request->sequence_, request->cached_);
    throw;
  }
  for (Request* request : second) request->cached_ += request->passing_;

  std::vector<int64_t> tokens(requests.size(), -1);
  for (size_t i = 0; i < requests.size(); ++i) {
    Request& request = *requests[i];
    if (request.finished_ != Request::Finish::no) continue;
    tokens[i] = -2;
    if (!request.answering() && request.pending() == 0) request.finished_ = Request::Finish::length;
  }
  for (StepResult::One& one : result.ones) {
    Request& request = *one.request;
    request.random_ = one.random;
    request.tokens_.push_back(one.token);
    request.mask_.clear();
    if (request.options_.logprobs >= 0) request.scores_.push_back(std::move(one.score));
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

Steps Model::steps(const std::vector<Request*>& requests, int64_t most, TokenFeed& feed, int64_t tag) {
  Steps result;
  result.tokens.push_back(step(requests, {}, true));
  while (static_cast<int64_t>(result.tokens.size()) < most && !feed.stopped()) {
    const std::vector<int64_t>& last = result.tokens.back();
    const bool all_go_on = std::all_of(requests.begin(), requests.end(), [](const Request* request) {
      return request->finished() == Request::Finish::no;
    });
    if (!all_go_on || std::any_of(last.begin(), last.end(), [](int64_t token) { return token < 0; })) break;
    feed.add(tag, last);
    ++result.fed;
    try {
      result.tokens.push_back(step(requests, {}, true));
    } catch (const ModelError&) {  // the model is as it was before this step, and what came before is not lost
      break;
    }
  }
  return result;
}

void Model::step_some(const std::vector<Request*>& requests, bool exact, StepResult& result) {
  for (Request* request : requests) {
    request->share_prefix();
    // As transformers does with longrope: the cache is made anew when the context grows beyond the short factors.
    const auto length = static_cast<int64_t>(request->tokens_.size());
    for (const RopeSpec& rope : spec_.ropes) {
      if (rope.long_inv_freq.empty() || request->cached_ == 0) continue;
      if (!RopeTable(rope).changes_between(request->context_, length)) continue;
      cache_.truncate(request->sequence_, 0);
      request->cached_ = 0;
    }
    request->context_ = length;
    request->passing_ = std::min(request->passing_, request->pending());
  }
  if (!exact) return pass(requests, {forward_.most_tokens()}, result);
  std::vector<Request*> few, prompts;
  for (Request* request : requests)
    (request->cached_ >= request->prompt_ && request->pending() == 1 ? few : prompts).push_back(request);
  check_room(work_of(requests));
  pass(few, {kGemvTokens, true, false}, result);
  pass(prompts, {forward_.most_tokens(), true, true}, result);
}

std::vector<Model::Work> Model::work_of(const std::vector<Request*>& requests) {
  std::vector<Work> work;
  for (const Request* request : requests)
    work.push_back({request->sequence_, request->tokens_.data() + request->cached_, request->passing_,
                    static_cast<int64_t>(request->tokens_.size())});
  return work;
}

void Model::pass(const std::vector<Request*>& requests, const Pass& how, StepResult& result) {
  std::vector<Work> work = work_of(requests);
  std::vector<Wanted> logits, hidden;
  int64_t first = 0;
  for (Request* request : requests) {
    const RequestOptions& options = request->options_;
    const auto length = static_cast<int64_t>(request->tokens_.size());
    const int64_t begin = request->cached_, end = begin + request->passing_;
    if (options.prompt_logprobs >= 0)
      for (int64_t position = begin; position < std::min(end, request->prompt_ - 1); ++position)
        logits.push_back({first + position - begin, request, position});
    if (options.goal == RequestOptions::Goal::mean)
      for (int64_t position = begin; position < end; ++position)
        hidden.push_back({first + position - begin, request, position});
    if (end == length && request->answering()) logits.push_back({first + end - 1 - begin, request, end - 1});
    if (end == length && options.goal == RequestOptions::Goal::last)
      hidden.push_back({first + end - 1 - begin, request, 0});
    first += request->passing_;
  }

  struct Done {
    Model& model;
    const std::vector<Wanted>&all_logits, &all_hidden;
    StepResult& result;
    size_t next_logits = 0, next_hidden = 0;
    static float* room(std::vector<float>& floats, size_t count, int64_t width) {
      const size_t wanted = count * static_cast<size_t>(width);
      if (floats.size() < wanted) floats.resize(wanted);
      return floats.data();
    }
    float* logits(size_t count) { return room(model.logits_, count, model.spec_.vocab); }
    float* hidden(size_t count) { return room(model.hidden_, count, model.spec_.hidden); }
    void take(size_t logits_count, size_t hidden_count) {
      model.choose(all_logits, next_logits, logits_count, result);
      next_logits += logits_count;
      for (size_t i = 0; i < hidden_count; ++i) {
        const Wanted& one = all_hidden[next_hidden++];
        one.request->pool(model.hidden_.data() + i * static_cast<size_t>(model.spec_.hidden), model.spec_.hidden,
                          one.position, 1);
      }
    }
    size_t most_rows() const { return std::max(kMostRows, all_logits.empty() ? 0 : result.asked.size()); }
  };
  auto row = logits.begin();
  auto state = hidden.begin();
  process(
      work, how,
      [&](int64_t index) {
        if (row != logits.end() && row->index == index) {
          ++row;
          return Row::logits;
        }
        if (state != hidden.end() && state->index == index) {
          ++state;
          return Row::hidden;
        }
        return Row::none;
      },
      Done{*this, logits, hidden, result});
}

// Takes what is wanted of rows first, first + 1, ..., whose logits have been computed: the next token of an answer, or,
// within a prompt, the log-probability of the prompt's next token.
void Model::choose(const std::vector<Wanted>& rows, size_t first, size_t count, StepResult& result) {
  const size_t begin = result.ones.size();
  std::vector<size_t> places(count, SIZE_MAX);  // in result.ones
  for (size_t i = 0; i < count; ++i) {
    Request* request = rows[first + i].request;
    if (rows[first + i].position + 1 < static_cast<int64_t>(request->tokens_.size())) continue;
    places[i] = result.ones.size();
    result.ones.push_back({request, -1, request->random_, {}});
  }
  std::exception_ptr failure;
  std::mutex failed;
  const Request* wrong = nullptr;
  const auto one_row = [&](size_t i, SamplingScratch& scratch) {
    const Wanted& row = rows[first + i];
    Request& request = *row.request;
    const RequestOptions& options = request.options_;
    float* logits = logits_.data() + i * static_cast<size_t>(spec_.vocab);
    if (places[i] == SIZE_MAX) {
      TokenScore& told = request.prompt_scores_[static_cast<size_t>(row.position)];
      return score(logits, spec_.vocab, request.tokens_[static_cast<size_t>(row.position + 1)], options.prompt_logprobs,
                   scratch, told);
    }
    StepResult::One& one = result.ones[places[i]];
    if (request.keep_logits_) request.logits_.assign(logits, logits + spec_.vocab);
    if (options.logprobs >= 0) scratch.kept.assign(logits, logits + spec_.vocab);
    const auto length = static_cast<int64_t>(request.tokens_.size());
    const auto& ends = options.end_tokens;
    const bool goes_on = length - request.prompt_ < options.min_new_tokens;
    one.token = sample(logits, spec_.vocab, options.sampling, request.tokens_.data(), length, request.prompt_,
                       ends.data(), goes_on ? static_cast<int64_t>(ends.size()) : 0, one.random, scratch,
                       request.mask_.empty() ? nullptr : request.mask_.data());
    if (one.token < 0) return false;
    return options.logprobs < 0 ||
           score(scratch.kept.data(), spec_.vocab, one.token, options.logprobs, scratch, one.score);
  };
  const auto choose_part = [&](int thread, int threads) {
    try {
      for (auto i = static_cast<size_t>(thread); i < count; i += static_cast<size_t>(threads)) {
        if (one_row(i, scratch_[static_cast<size_t>(thread)])) continue;
        const std::lock_guard<std::mutex> lock(failed);
        wrong = rows[first + i].request;
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failed);
      failure = std::current_exception();
    }
  };
  profile_.start();
  if (count > 1)
    team_.run([&](int thread) { choose_part(thread, team_.size()); });
  else if (count == 1)
    choose_part(0, 1);
  profile_.mark(anyaccel::llm::Work::sample);
  if (failure) std::rethrow_exception(failure);
  if (wrong == nullptr) return;
  for (size_t i = begin; i < result.ones.size(); ++i)  // threads have found several in any order: name the first
    if (result.ones[i].token < 0) {
      wrong = result.ones[i].request;
      break;
    }
  const auto index = std::find(result.asked.begin(), result.asked.end(), wrong);
  throw ModelError("the model's logits are NaN or infinite, for request " +
                   std::to_string(index - result.asked.begin()) +
                   " of the step: its weights may be damaged; or try another dtype, such as fp32");
}

}  // namespace anyaccel::llm
