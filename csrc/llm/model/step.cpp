// SPDX-License-Identifier: Apache-2.0
// Steps of many sequences together: which tokens pass in which run, and what becomes of their logits.
#include "llm/model/step.h"

#include <algorithm>
#include <exception>
#include <unordered_set>

#include "llm/errors.h"
#include "llm/model/feed.h"

namespace anyaccel::llm {

namespace {

// The most rows of logits in memory at a time, where those of a whole prompt are wanted.
constexpr size_t kMostRows = 128;

// Where there are stages, tokens of a run, at least, and runs of a pass for each stage, at most: all stages are at work
// for as many of the runs as are not one less than there are stages. Fewer tokens take as long, since weights are read
// once a run; of a pass of few tokens each stage gets one run, which pays from 8 tokens on two stages on.
constexpr int64_t kLeastPart = 32;
constexpr int kPartsAStage = 8;
constexpr int64_t kLeastOfFew = 4;

// For process(), where only the cache is wanted.
struct NoLogits {
  float* logits(size_t) const { return nullptr; }
  float* hidden(size_t) const { return nullptr; }
  float* features(size_t) const { return nullptr; }
  template <class Wanted>
  Pick pick(const Wanted&, int32_t) const {
    return {};
  }
  template <class Rows>
  void take(const Rows&) const {}
  size_t most_rows() const { return SIZE_MAX; }
  bool everywhere() const { return false; }
};

}  // namespace

// With stages, runs are so small that all stages have one at a time; but more tokens than pass as few are not divided
// into so few, since these are summed otherwise.
int64_t Model::most_of_a_run(int64_t total, const Pass& pass) const {
  if (stages_ == nullptr) return pass.most;
  const bool few = total <= kGemvTokens;
  const int64_t least = few ? kLeastOfFew : kLeastPart;
  const int64_t parts = std::clamp<int64_t>(total / least, 1, int64_t{few ? 1 : kPartsAStage} * stages_->count());
  return std::min(pass.most, (total + parts - 1) / parts);
}

// The runs are of about equal size.
template <class Done>
void Model::process(std::vector<Work>& work, const Pass& pass, const std::vector<Wanted>& wanted, Done done) {
  check_room(work);
  int64_t total = 0;
  for (Work& one : work) {
    one.start = cache().length(one.sequence);
    total += one.count;
  }
  if (total == 0) return;
  const int64_t longest = most_of_a_run(total, pass);
  const int64_t runs = (total + longest - 1) / longest;
  int64_t size = runs == 1 ? total : std::min(longest, ((total + runs - 1) / runs + 15) / 16 * 16);
  int64_t left = runs;
  std::vector<std::pair<int, bool>> keeping;  // sequences of a run
  try {
    size_t at = 0;               // in work
    int64_t taken = 0;           // of work[at]
    int64_t index = 0;           // of the next token among all
    auto next = wanted.begin();  // of what is wanted of it and those after it
    while (index < total) {
      if (index > 0 && interrupt_check_) interrupt_check_();
      tokens_.clear();
      picks_.clear();
      const int64_t first = index;
      const auto first_wanted = next;
      if (stages_ != nullptr)
        size = std::min(longest, (total - index + left - 1) / left);  // of equal size: none of few
      left = std::max<int64_t>(left - 1, 1);
      while (at < work.size() && index - first < size && tokens_.wanted.size() < done.most_rows()) {
        const Work& one = work[at];
        const int64_t until_kept = one.keep - one.start - taken;
        const int64_t most =
            std::min({one.count - taken, size - (index - first), until_kept > 0 ? until_kept : INT64_MAX});
        const auto row = static_cast<int>(tokens_.tokens.size());
        int64_t count = 0;
        for (; count < most && tokens_.wanted.size() < done.most_rows(); ++count) {
          const auto token_row = static_cast<int32_t>(tokens_.tokens.size());
          for (; next != wanted.end() && next->index == index + count; ++next) {
            if (next->kind == Wanted::Kind::logits) tokens_.wanted.push_back(token_row);
            if (next->kind == Wanted::Kind::hidden) tokens_.hidden_wanted.push_back(token_row);
            if (next->kind == Wanted::Kind::features) tokens_.features_wanted.push_back(token_row);
            if (next->kind == Wanted::Kind::pick) picks_.push_back(done.pick(*next, token_row));
          }
          tokens_.tokens.push_back(static_cast<int32_t>(one.tokens[taken + count]));
        }
        if (one.inputs != nullptr) {
          const int64_t width = spec_.hidden_inputs->width;
          tokens_.inputs.insert(tokens_.inputs.end(), one.inputs + taken * width, one.inputs + (taken + count) * width);
          for (int64_t i = taken; i < taken + count; ++i) tokens_.own_inputs.push_back(i >= one.model_inputs);
        }
        if (count > 0) {
          const int64_t position = one.start + taken;
          if (one.apart) {
            for (int i = 0; i < static_cast<int>(count); ++i) {
              tokens_.queries.push_back({one.sequence, position + i, 1, row + i, pass.prompt, true});
              tokens_.contexts.push_back(one.context > 0 ? one.context : position + i + 1);
            }
          } else {
            tokens_.queries.push_back({one.sequence, position, static_cast<int>(count), row, pass.prompt});
            tokens_.contexts.push_back(one.context > 0 ? one.context : one.start + one.count);
          }
          cache().extend(one.sequence, count);
          index += count;
          taken += count;
        }
        const bool kept = count > 0 && one.keep == one.start + taken;
        if (kept) keeping.emplace_back(one.sequence, one.keep_anyway);
        if (taken == one.count) {
          ++at;
          taken = 0;
        } else if (kept) {
          break;  // what follows changes the state
        }
      }
      tokens_.logits_stride = spec_.vocab;
      tokens_.logits = done.logits(tokens_.wanted.size());
      tokens_.hidden = done.hidden(tokens_.hidden_wanted.size());
      tokens_.features = done.features(tokens_.features_wanted.size());
      tokens_.exact = pass.exact;
      tokens_.prompt = pass.prompt;
      run(tokens_, picks_);
      for (const auto& [sequence, anyway] : keeping) cache().keep(sequence, anyway);
      keeping.clear();
      if (stages_ != nullptr && done.everywhere()) share_rows(tokens_);
      if (stages_ == nullptr || stages_->is_last() || done.everywhere())
        done.take(std::vector<Wanted>(first_wanted, next));
    }
  } catch (...) {
    for (const Work& one : work)
      if (cache().length(one.sequence) > one.start)
        cache().truncate(one.sequence, cache().reachable(one.sequence, one.start));
    throw;
  }
}

void Model::forward(const std::vector<int>& sequences, const std::vector<int64_t>& counts, const int64_t* tokens,
                    float* logits, const std::vector<int64_t>& rows) {
  const auto held = lock();
  check_ready();
  if (spec_.hidden_inputs) throw UsageError("forward: a head that drafts computes with its model only: set_draft()");
  if (sequences.size() != counts.size()) throw UsageError("forward: needs one count a sequence");
  if (!rows.empty() && logits == nullptr && exact())
    throw UsageError("forward: rows are wanted, and no place for logits");
  std::vector<Work> work;
  std::unordered_set<int> seen;
  int64_t total = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    check_sequence(sequences[i]);
    if (!seen.insert(sequences[i]).second)
      throw UsageError("forward: sequence " + std::to_string(sequences[i]) + " is there twice");
    if (counts[i] < 0) throw UsageError("forward: a sequence with " + std::to_string(counts[i]) + " tokens");
    const int64_t length = cache().length(sequences[i]) + counts[i];
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
    static float* features(size_t) { return nullptr; }
    static Pick pick(const Wanted&, int32_t) { return {}; }
    void take(const std::vector<Wanted>& rows) {
      if (next != nullptr) next += static_cast<int64_t>(rows.size()) * vocab;
    }
    size_t most_rows() const { return SIZE_MAX; }
    static bool everywhere() { return false; }  // all at once, below: no stage waits for the last one meanwhile
  };
  std::vector<Wanted> wanted;
  for (const int64_t row : rows) wanted.push_back({row});
  process(work, Pass{most_tokens()}, wanted, Done{logits, spec_.vocab});
  if (stages_ != nullptr) stages_->share(logits, rows.size() * static_cast<size_t>(spec_.vocab) * sizeof(float));
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
    if (request->finished_ != Request::Finish::no || !request->chosen_.empty()) continue;
    const Request* prefix = request->prefix_.get();
    const bool waits = prefix != nullptr && prefix->cached_ == 0 && seen.contains(prefix) &&
                       prefix->finished_ == Request::Finish::no && prefix->prefix_ == nullptr;
    (waits ? second : first).push_back(request);
  }
  StepResult result{requests, {}};
  result.ones.reserve(requests.size());
  DraftPace::Step account{answers_only(requests)};
  try {
    if (second.empty()) draft(first, account);
    for (const Request* request : first) account.tokens += 1 + request->drafted_;
    const Stopwatch pass;
    step_some(first, exact, result);
    if (account.requests > 0 && !first.empty()) {
      lookup_pace_.passed(account.requests, account.tokens, pass.seconds());
      model_pace_.passed(account.requests, account.tokens, pass.seconds());
    } else if (second.empty()) {
      int64_t passing = 0;
      for (const Request* request : first) passing += request->passing_;
      model_pace_.prompted(passing, pass.seconds());
    }
    // The second wave can share what the first one has put into the cache.
    for (Request* request : first) request->cached_ += request->passing_ - request->drafted_;
    step_some(second, exact, result);
  } catch (...) {
    for (Request* request : first) request->drop_drafts();
    // The first wave's last tokens are computed again in the next step, as is all of a wave that failed.
    for (Request* request : first)
      if (request->pending() == 0) --request->cached_;
    for (const std::vector<Request*>* wave : {&first, &second})
      for (Request* request : *wave) request->go_back(request->cached_);
    throw;
  }
  for (Request* request : second) request->cached_ += request->passing_;
  for (StepResult::One& one : result.ones) one.request->take(std::move(one.chosen));
  if (account.requests > 0) {
    const double lost = pace_of(*requests.front()).stepped(account);
    for (Request* request : requests) request->draft_lost_ += lost;
  }

  std::vector<int64_t> tokens(requests.size(), -1);
  for (size_t i = 0; i < requests.size(); ++i) {
    Request& request = *requests[i];
    if (request.finished_ != Request::Finish::no) continue;
    tokens[i] = -2;
    if (!request.chosen_.empty()) tokens[i] = request.next();
    if (!request.answering() && request.pending() == 0) request.finished_ = Request::Finish::length;
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

// The tokens pass as they did the first time: those of a prompt as many, those of an answer as few.
void Model::recover(const std::vector<Request*>& requests) {
  for (Request* request : requests) {
    if (request->lost_ == 0) continue;
    const int64_t end = request->cached_, begin = end - request->lost_;
    const int64_t of_prompt = std::clamp(request->prompt_, begin, end);
    const auto context = static_cast<int64_t>(request->tokens_.size());
    const auto pass = [&](int64_t first, int64_t last, const Pass& how) {
      std::vector<Work> work{{request->sequence_, request->tokens_.data() + first, last - first, context, !how.prompt}};
      work.back().keep = request->keep_;
      if (request->options_.keep_states)
        work.back().keep = (how.prompt ? request->prompt_ - 1 : last) / kPageTokens * kPageTokens;
      process(work, how, {}, NoLogits{});
    };
    pass(begin, of_prompt, {most_tokens(), true, true});
    pass(of_prompt, end, {kGemvTokens, true, false});
    request->lost_ = 0;
  }
}

void Model::step_some(const std::vector<Request*>& requests, bool exact, StepResult& result) {
  for (Request* request : requests) {
    request->share_prefix();
    cache().checkpoint(request->sequence_, false);
  }
  recover(requests);
  for (Request* request : requests)
    if (request->drafted_ > 0) cache().checkpoint(request->sequence_, true);
  for (Request* request : requests) {
    // As transformers does with longrope: the cache is made anew when the context grows beyond the short factors.
    const int64_t length = static_cast<int64_t>(request->tokens_.size()) - request->drafted_;
    for (const RopeSpec& rope : spec_.ropes) {
      if (rope.long_inv_freq.empty() || request->cached_ == 0) continue;
      if (!RopeTable(rope).changes_between(request->context_, length)) continue;
      cache().truncate(request->sequence_, 0);
      request->cached_ = request->lost_ = 0;
    }
    request->context_ = length;
    request->passing_ = request->drafted_ > 0 ? request->pending() : std::min(request->passing_, request->pending());
    // What is computed again has the bits of the first time: a prompt's tokens as many, an answer's as few.
    if (exact && request->cached_ < request->prompt_)
      request->passing_ = std::min(request->passing_, request->prompt_ - request->cached_);
  }
  const bool drafted = std::any_of(requests.begin(), requests.end(), [](const Request* r) { return r->drafted_ > 0; });
  if (!exact && !drafted) return pass(requests, {most_tokens()}, result);
  if (!this->exact()) return pass(requests, {most_tokens(), true, true}, result);
  std::vector<Request*> few, prompts;
  for (Request* request : requests)
    (request->cached_ >= request->prompt_ && (exact || request->pending() == 1 + request->drafted_) ? few : prompts)
        .push_back(request);
  const Pass as_few{kGemvTokens, true, false}, as_many{most_tokens(), true, true};
  std::vector<Work> work = work_of(few, as_few);
  const std::vector<Work> others = work_of(prompts, as_many);
  work.insert(work.end(), others.begin(), others.end());
  check_room(work);
  pass(few, as_few, result);
  pass(prompts, as_many, result);
}

std::vector<Model::Work> Model::work_of(const std::vector<Request*>& requests, const Pass& how) {
  const bool whole = std::any_of(spec_.ropes.begin(), spec_.ropes.end(),
                                 [](const RopeSpec& rope) { return !rope.long_inv_freq.empty(); });
  std::vector<Work> work;
  for (const Request* request : requests) {
    const bool apart = how.exact && !how.prompt && request->passing_ > 1;
    int64_t context = static_cast<int64_t>(request->tokens_.size());
    // But for longrope, whose cache is made anew when they change, angles are those of the first time.
    if (how.exact && !whole) context = apart ? 0 : std::max(request->prompt_, request->cached_ + request->passing_);
    work.push_back({request->sequence_, request->tokens_.data() + request->cached_, request->passing_, context, apart});
    if (spec_.hidden_inputs) {
      const HiddenStates& states = request->states_;
      if (states.begin() > request->cached_ || states.end() < request->cached_ + request->passing_)
        throw UsageError("a head that drafts computes with its model only: set_draft()");
      work.back().inputs = states.at(request->cached_);
      work.back().model_inputs = request->sure_ - request->cached_;
    }
    work.back().keep = request->keep_at();
    work.back().keep_anyway = work.back().keep == request->keep_;
  }
  return work;
}

void Model::pass(const std::vector<Request*>& requests, const Pass& how, StepResult& result) {
  std::vector<Work> work = work_of(requests, how);
  std::vector<Wanted> wanted;
  int64_t first = 0;
  tokens_.taps.clear();
  for (Request* request : requests) {
    const RequestOptions& options = request->options_;
    const std::vector<int> taps = taps_of(*request);
    if (!taps.empty()) tokens_.taps = taps;  // all that have some have the same ones
    const auto length = static_cast<int64_t>(request->tokens_.size());
    const int64_t begin = request->cached_, end = begin + request->passing_;
    for (int64_t position = begin; position < end; ++position) {
      const int64_t index = first + position - begin;
      const bool last = end == length && position >= end - 1 - request->drafted_;
      if (options.prompt_logprobs >= 0 && position < request->prompt_ - 1)
        wanted.push_back({index, Wanted::Kind::logits, request, position});
      if (options.goal == RequestOptions::Goal::mean)
        wanted.push_back({index, Wanted::Kind::hidden, request, position});
      if (last && request->answering())
        wanted.push_back({index, can_pick(*request) ? Wanted::Kind::pick : Wanted::Kind::logits, request, position});
      if (last && options.goal == RequestOptions::Goal::last)
        wanted.push_back({index, Wanted::Kind::hidden, request, 0});
      if (!taps.empty() && position >= length - (spec_.hidden_inputs ? 1 : HiddenStates::kKept))
        wanted.push_back({index, Wanted::Kind::features, request, position});
    }
    first += request->passing_;
  }

  // Of answers, the last stage's tokens are enough for all; whatever else is made of logits is made on each.
  const bool tokens_only = stages_ != nullptr && std::all_of(requests.begin(), requests.end(), [](const Request* one) {
                             return one->answering() && !one->keep_logits_ && one->options_.prompt_logprobs < 0;
                           });
  struct Done {
    Model& model;
    StepResult& result;
    const bool tokens_only;
    std::string& failure;
    bool everywhere() const { return !tokens_only; }
    static float* room(std::vector<float>& floats, size_t count, int64_t width) {
      const size_t wanted = count * static_cast<size_t>(width);
      if (floats.size() < wanted) floats.resize(wanted);
      return floats.data();
    }
    float* logits(size_t count) { return room(model.logits_, count, model.spec_.vocab); }
    float* hidden(size_t count) { return room(model.hidden_, count, model.spec_.hidden); }
    float* features(size_t count) { return room(model.features_, count, width()); }
    int64_t width() const { return static_cast<int64_t>(model.tokens_.taps.size()) * model.spec_.hidden; }
    static Pick pick(const Wanted& one, int32_t row) { return one.request->pick(row); }
    void take(const std::vector<Wanted>& rows) {
      std::vector<Wanted> with_logits, picked;
      const float* hidden = model.hidden_.data();
      const float* features = model.features_.data();
      std::vector<float> own;  // a head reads what it makes of a token with the next one, in as much room
      if (model.spec_.hidden_inputs) own.resize(static_cast<size_t>(model.spec_.hidden_inputs->width));
      for (const Wanted& row : rows) {
        if (row.kind == Wanted::Kind::logits) with_logits.push_back(row);
        if (row.kind == Wanted::Kind::pick) picked.push_back(row);
        if (row.kind == Wanted::Kind::features) {
          if (own.empty())
            row.request->states_.put(row.position, features, width());
          else
            std::copy(features, features + std::min(width(), static_cast<int64_t>(own.size())), own.begin());
          if (!own.empty()) row.request->states_.put(row.position + 1, own.data(), static_cast<int64_t>(own.size()));
          features += width();
        }
        if (row.kind != Wanted::Kind::hidden) continue;
        row.request->pool(hidden, model.spec_.hidden, row.position, 1);
        hidden += model.spec_.hidden;
      }
      try {
        if (!failure.empty()) return;
        model.choose(with_logits, result);
        model.take_picks(picked, result);
      } catch (const ModelError& error) {
        if (!tokens_only) throw;
        failure = error.what();  // the other stages are told once all runs are through
      }
    }
    size_t most_rows() const { return std::max(kMostRows, result.asked.size()); }
  };
  const size_t before = result.ones.size();
  std::string failure;
  process(work, how, wanted, Done{*this, result, tokens_only, failure});
  if (tokens_only && !wanted.empty()) share_chosen(before, failure, result);
  if (!failure.empty()) throw ModelError(failure);
}

}  // namespace anyaccel::llm
