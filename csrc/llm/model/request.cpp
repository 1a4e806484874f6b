// SPDX-License-Identifier: Apache-2.0
#include "llm/model/request.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "llm/errors.h"
#include "llm/model/model.h"

namespace anyaccel::llm {
namespace {

void check_options(const RequestOptions& options) {
  const SamplingOptions& s = options.sampling;
  const auto wrong = [](const char* name, double value, const char* range) {
    throw UsageError(std::string(name) + " is " + std::to_string(value) + ", must be " + range);
  };
  if (s.do_sample && !(s.temperature > 0 && std::isfinite(s.temperature)))
    wrong("temperature", static_cast<double>(s.temperature), "above 0");
  if (s.top_k < 0) wrong("top_k", s.top_k, "0 (off) or more");
  if (!(s.top_p > 0 && s.top_p <= 1)) wrong("top_p", static_cast<double>(s.top_p), "above 0 and at most 1");
  if (!(s.min_p >= 0 && s.min_p <= 1)) wrong("min_p", static_cast<double>(s.min_p), "0 to 1");
  if (!(s.typical_p > 0 && s.typical_p <= 1))
    wrong("typical_p", static_cast<double>(s.typical_p), "above 0 and at most 1");
  if (!(s.repetition_penalty > 0 && std::isfinite(s.repetition_penalty)))
    wrong("repetition_penalty", static_cast<double>(s.repetition_penalty), "above 0");
  if (!std::isfinite(s.presence_penalty))
    wrong("presence_penalty", static_cast<double>(s.presence_penalty), "a number");
  if (!std::isfinite(s.frequency_penalty))
    wrong("frequency_penalty", static_cast<double>(s.frequency_penalty), "a number");
  if (!(s.dry_multiplier >= 0 && std::isfinite(s.dry_multiplier)))
    wrong("dry_multiplier", static_cast<double>(s.dry_multiplier), "0 (off) or more");
  if (!(s.dry_base >= 1 && std::isfinite(s.dry_base))) wrong("dry_base", static_cast<double>(s.dry_base), "1 or more");
  if (s.dry_allowed_length < 0) wrong("dry_allowed_length", s.dry_allowed_length, "0 or more");
  if (s.dry_last_n < -1) wrong("dry_last_n", static_cast<double>(s.dry_last_n), "-1 (all tokens), 0 (off) or more");
  if (!(s.xtc_probability >= 0 && s.xtc_probability <= 1))
    wrong("xtc_probability", static_cast<double>(s.xtc_probability), "0 to 1");
  if (!(s.xtc_threshold >= 0 && s.xtc_threshold <= 1))
    wrong("xtc_threshold", static_cast<double>(s.xtc_threshold), "0 to 1");
  if (s.no_repeat_ngram < 0) wrong("no_repeat_ngram", s.no_repeat_ngram, "0 (off) or more");
  for (const auto& [token, bias] : s.bias)
    if (!std::isfinite(bias)) wrong("bias", static_cast<double>(bias), "a number");
  if (options.max_new_tokens < 0)
    wrong("max_new_tokens", static_cast<double>(options.max_new_tokens), "0 (as many as the context takes) or more");
  if (options.draft_tokens < 0)
    wrong("draft_tokens", static_cast<double>(options.draft_tokens), "0 (no drafts) or more");
  if (options.min_new_tokens < 0) wrong("min_new_tokens", static_cast<double>(options.min_new_tokens), "0 or more");
}

void check_room(const DecoderSpec& spec, int64_t tokens, bool answer) {
  if (spec.max_tokens > 0 && tokens + (answer ? 1 : 0) > spec.max_tokens)
    throw UsageError("a prompt of " + std::to_string(tokens) +
                     " tokens leaves no room for an answer: the model's "
                     "context has " +
                     std::to_string(spec.max_tokens) + " tokens");
}

}  // namespace

Request::Request(std::shared_ptr<Model> model, std::vector<int64_t> prompt, RequestOptions options,
                 std::shared_ptr<Request> prefix, bool keep_logits)
    : model_(std::move(model)),
      options_(std::move(options)),
      prefix_(std::move(prefix)),
      keep_logits_(keep_logits),
      tokens_(std::move(prompt)),
      prompt_(static_cast<int64_t>(tokens_.size())),
      random_(options_.seed) {
  check_options(options_);
  if (prefix_ != nullptr && prefix_->model_ != model_) throw UsageError("the prefix is a request of another model");
  const auto held = model_->lock();
  if (options_.draft_model && model_->draft_ == nullptr)
    throw UsageError("draft_model: the model has no draft model; set_draft() comes first");
  if (tokens_.empty()) throw UsageError("the prompt is empty: it needs one token at least");
  model_->check_tokens(tokens_.data(), prompt_);
  check_room(model_->spec(), prompt_, answering());
  if (options_.prompt_logprobs >= 0) prompt_scores_.resize(static_cast<size_t>(prompt_ - 1));
  sequence_ = model_->cache().create();
}

Request::~Request() {
  if (sequence_ >= 0) model_->leave(sequence_);
}

std::vector<int64_t> Request::tokens() const {
  const auto held = model_->lock();
  return {tokens_.begin() + prompt_, tokens_.end()};
}

int64_t Request::prompt_length() const {
  const auto held = model_->lock();
  return prompt_;
}

Request::Finish Request::finished() const {
  const auto held = model_->lock();
  return finished_;
}

void Request::finish() {
  const auto held = model_->lock();
  prefix_.reset();
  if (sequence_ >= 0) model_->cache().destroy(sequence_);
  sequence_ = -1;
  cached_ = lost_ = 0;
  chosen_.clear();
  drafter_.reset();
  if (finished_ == Finish::no) finished_ = Finish::stopped;
}

void Request::extend(const std::vector<int64_t>& tokens, int64_t max_new_tokens) {
  if (max_new_tokens < 0) throw UsageError("max_new_tokens is " + std::to_string(max_new_tokens));
  const auto held = model_->lock();
  if (sequence_ < 0) throw UsageError("the request was finished with finish(): make a new one");
  model_->check_tokens(tokens.data(), static_cast<int64_t>(tokens.size()));
  check_room(model_->spec(), static_cast<int64_t>(tokens_.size() + tokens.size()), true);
  if (!answering() || options_.prompt_logprobs >= 0) throw UsageError("extend: the request is of a prompt only");
  if (tokens_.size() == static_cast<size_t>(cached_) && tokens.empty())
    throw UsageError("extend: no tokens to go on with");
  drop_chosen();
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  prompt_ = static_cast<int64_t>(tokens_.size());
  if (max_new_tokens > 0) options_.max_new_tokens = max_new_tokens;
  finished_ = Finish::no;
}

void Request::copy_logits(float* out) const {
  const auto held = model_->lock();
  if (logits_.empty())
    throw UsageError(keep_logits_ ? "no step has been made yet" : "logits are kept with keep_logits only");
  std::copy(logits_.begin(), logits_.end(), out);
}

// Before the first step, with the prefix in the cache as far as it will be.
void Request::share_prefix() {
  const std::shared_ptr<Request> prefix = std::move(prefix_);
  prefix_ = nullptr;
  if (prefix == nullptr || prefix->sequence_ < 0 || cached_ > 0) return;
  // Nobody asks for drafts of a request that has ended, or that only this one knew.
  if (drafter_ == nullptr && (prefix->finished_ != Finish::no || prefix.use_count() == 1)) {
    drafter_ = std::move(prefix->drafter_);
    draft_from_ = prefix->draft_from_;
    draft_read_to_ = std::min(prefix->draft_read_to_, static_cast<int64_t>(tokens_.size()) - 1);
    if (draft_from_ >= draft_read_to_) drafter_.reset();
  }
  // The last token of the prompt is computed anyway: its logits are wanted.
  const int64_t most = std::min(
      {prefix->cached_, static_cast<int64_t>(prefix->tokens_.size()), static_cast<int64_t>(tokens_.size()) - 1});
  int64_t common =
      std::mismatch(tokens_.begin(), tokens_.begin() + std::max<int64_t>(most, 0), prefix->tokens_.begin()).first -
      tokens_.begin();
  common = std::min(common, model_->cache().length(prefix->sequence_));
  common = model_->cache().reachable(prefix->sequence_, common);
  if (common <= 0) return;
  for (const RopeSpec& rope : model_->spec().ropes)
    if (RopeTable(rope).changes_between(static_cast<int64_t>(tokens_.size()), prefix->cached_)) return;
  const int shared = model_->cache().fork(prefix->sequence_, common);
  model_->cache().destroy(sequence_);
  sequence_ = shared;
  cached_ = common;
  context_ = prefix->context_;
}

void Request::share(const Request& other, int64_t tokens) {
  if (other.model_ != model_) throw UsageError("share: the other request is of another model");
  const auto held = model_->lock();
  if (sequence_ < 0 || other.sequence_ < 0) throw UsageError("share: a request was finished with finish()");
  if (cached_ > 0 || tokens < 1 || tokens > other.cached_ || tokens >= static_cast<int64_t>(tokens_.size()) ||
      !std::equal(tokens_.begin(), tokens_.begin() + tokens, other.tokens_.begin()))
    throw UsageError("share: the first " + std::to_string(tokens) + " tokens are not those of the other request");
  Sequences& cache = model_->cache();
  const int64_t there = cache.reachable(other.sequence_, std::min(tokens, cache.length(other.sequence_)));
  const int shared = cache.fork(other.sequence_, there);
  cache.destroy(sequence_);
  sequence_ = shared;
  cached_ = tokens;
  lost_ = tokens - there;
  context_ = other.context_;
}

std::vector<uint8_t*> Request::pages(int64_t first, int64_t count) const {
  const auto held = model_->lock();
  if (sequence_ < 0) throw UsageError("pages: the request was finished with finish()");
  if (first < 0 || count < 0 || (first + count) * kPageTokens > cached_ - lost_)
    throw UsageError("pages: " + std::to_string(cached_) + " tokens are there");
  return model_->cache().pages(sequence_, first, count);
}

std::vector<uint8_t*> Request::restore(int64_t tokens) {
  const auto held = model_->lock();
  if (sequence_ < 0) throw UsageError("restore: the request was finished with finish()");
  if (cached_ > 0 || tokens < 1 || tokens % kPageTokens != 0 || tokens > static_cast<int64_t>(tokens_.size()))
    throw UsageError("restore: " + std::to_string(tokens) + " of " + std::to_string(tokens_.size()) + " tokens");
  Sequences& cache = model_->cache();
  cache.extend(sequence_, tokens);
  cached_ = tokens;
  return cache.pages(sequence_, 0, tokens / kPageTokens);
}

void Request::shrink(int64_t tokens) {
  const auto held = model_->lock();
  if (sequence_ < 0) throw UsageError("shrink: the request was finished with finish()");
  if (tokens < 0 || tokens > cached_) throw UsageError("shrink: " + std::to_string(cached_) + " tokens are there");
  chosen_.clear();
  drafter_.reset();
  cached_ = tokens;
  keep_ = std::min(keep_, tokens);
  go_back(tokens);
}

void Request::keep(int64_t tokens) {
  const auto held = model_->lock();
  if (tokens <= cached_ || tokens > static_cast<int64_t>(tokens_.size()))
    throw UsageError("keep: behind " + std::to_string(tokens) + " tokens, and " + std::to_string(cached_) + " of " +
                     std::to_string(tokens_.size()) + " have passed");
  keep_ = tokens;
}

void Request::go_back(int64_t tokens) {
  Sequences& cache = model_->cache();
  const int64_t length = cache.length(sequence_);
  const int64_t there = tokens >= length ? length : cache.reachable(sequence_, tokens);
  if (there < length) cache.truncate(sequence_, there);
  lost_ = cached_ - std::min(cached_, there);
}

int64_t Request::keep_at() const {
  const int64_t end = cached_ + passing_;
  if (keep_ > cached_ && keep_ <= end) return keep_;
  if (!options_.keep_states) return 0;
  // The last token of a prompt is computed for every answer, so that the state before it is of use.
  const int64_t of_prompt = (prompt_ - 1) / kPageTokens * kPageTokens;
  if (of_prompt > cached_ && of_prompt <= end) return of_prompt;
  return cached_ >= prompt_ ? end / kPageTokens * kPageTokens : 0;
}

int64_t Request::cached() const {
  const auto held = model_->lock();
  return cached_;
}

void Request::set_mask(std::vector<uint32_t> mask) {
  const auto words = static_cast<size_t>((model_->spec().vocab + 31) / 32);
  if (mask.size() != words)
    throw UsageError("set_mask: " + std::to_string(mask.size()) + " words, and the vocabulary has " +
                     std::to_string(words));
  const auto held = model_->lock();
  drop_chosen();
  mask_ = std::move(mask);
}

std::pair<int64_t, int64_t> Request::drafts() const {
  const auto held = model_->lock();
  return {drafted_in_all_, accepted_in_all_};
}

int64_t Request::draft_room(int64_t most) const {
  if (options_.draft_tokens == 0 || keep_logits_ || !mask_.empty()) return 0;
  const auto length = static_cast<int64_t>(tokens_.size());
  most = std::min(most, options_.draft_tokens);
  // The next token itself is no draft.
  if (options_.max_new_tokens > 0) most = std::min(most, options_.max_new_tokens - (length - prompt_) - 1);
  if (const int64_t context = model_->spec().max_tokens; context > 0) most = std::min(most, context - length - 1);
  // Drafts stay on the page that the next token is on, so that they never take memory which the answer does not need
  // itself. Ranks, which may have different room, must draft alike.
  most = std::min(most, kPageTokens - 1 - (length - 1) % kPageTokens);
  if (most <= 0) return 0;
  // The angles are those of a cache of context_ tokens, and must be those of a cache with all drafts.
  for (const RopeSpec& rope : model_->spec().ropes)
    if (!rope.long_inv_freq.empty() && RopeTable(rope).changes_between(context_, length + most)) return 0;
  return most;
}

void Request::add_draft(int64_t token) {
  tokens_.push_back(token);
  ++drafted_;
}

void Request::follow(const std::vector<int64_t>& tokens, const Request& other, int64_t skipped) {
  const auto held = model_->lock();
  drop_chosen();
  const auto common = std::mismatch(tokens_.begin(), tokens_.end(), tokens.begin(), tokens.end()).first;
  const auto same = static_cast<int64_t>(common - tokens_.begin());
  cached_ = std::min({cached_, sure_, same, static_cast<int64_t>(tokens.size()) - 1});
  model_->cache().truncate(sequence_, cached_);
  tokens_ = tokens;
  prompt_ = std::clamp<int64_t>(other.prompt_ - skipped, 0, static_cast<int64_t>(tokens.size()));
  random_ = other.random_;
  finished_ = Finish::no;
}

void HiddenStates::put(int64_t position, const float* values, int64_t width) {
  if (width != width_ || position < first_ || position > end()) {
    values_.clear();
    first_ = position;
    width_ = width;
  }
  truncate(position);
  values_.insert(values_.end(), values, values + width);
  if (count() < 2 * kKept) return;
  values_.erase(values_.begin(), values_.begin() + kKept * width);
  first_ += kKept;
}

void HiddenStates::truncate(int64_t position) {
  if (position < end()) values_.resize(static_cast<size_t>(std::max<int64_t>(position - first_, 0) * width_));
}

void Request::guess(int64_t token) {
  guess_ = token;
  guess_at_ = static_cast<int64_t>(tokens_.size());
}

void Request::check_guess() {
  const int64_t at = std::exchange(guess_at_, -1);
  if (at < prompt_ || at + 1 != static_cast<int64_t>(tokens_.size())) return;
  const int64_t right = tokens_.back() == guess_ ? 1 : 0;
  ngrams_.report(1, right);
  acceptance_.report(1, right);
  model_->pace_of(*this).report(1, right, DraftPace::kWhole);
}

void Request::drop_drafts() {
  tokens_.resize(tokens_.size() - static_cast<size_t>(drafted_));
  drafted_ = 0;
}

void Request::take(std::vector<ChosenToken> chosen) {
  if (drafted_ > 0) {
    const auto accepted = static_cast<int64_t>(chosen.size()) - 1;
    if (!options_.draft_model) ngrams_.report(drafted_, accepted);
    acceptance_.report(drafted_, accepted);
    model_->pace_of(*this).report(drafted_, accepted, draft_level());
    drafted_in_all_ += drafted_;
    accepted_in_all_ += accepted;
    drop_drafts();
    Sequences& cache = model_->cache();
    cache.truncate(sequence_, cache.reachable(sequence_, cached_ + accepted));
    states_.truncate(cached_ + accepted);
  }
  for (ChosenToken& one : chosen) chosen_.push_back(std::move(one));
  --cached_;  // next() counts a token of the cache for each token that it gives
}

int64_t Request::next() {
  ChosenToken one = std::move(chosen_.front());
  chosen_.pop_front();
  ++cached_;
  // A recurrent state that drafts have changed has gone back to before them.
  lost_ = std::max<int64_t>(cached_ - model_->cache().length(sequence_), 0);
  random_ = one.random;
  tokens_.push_back(one.token);
  mask_.clear();
  if (options_.logprobs >= 0) scores_.push_back(std::move(one.score));
  const auto& ends = options_.end_tokens;
  const auto count = static_cast<int64_t>(tokens_.size());
  const int64_t most = options_.max_new_tokens, context = model_->spec().max_tokens;
  if (!options_.ignore_end && std::find(ends.begin(), ends.end(), one.token) != ends.end())
    finished_ = Finish::end;
  else if ((most > 0 && count - prompt_ >= most) || (context > 0 && count >= context))
    finished_ = Finish::length;
  return one.token;
}

void Request::drop_chosen() {
  if (chosen_.empty()) return;
  chosen_.clear();
  go_back(cached_);
}

std::vector<TokenScore> Request::take_scores() {
  const auto held = model_->lock();
  return std::exchange(scores_, {});
}

std::vector<TokenScore> Request::prompt_scores() const {
  const auto held = model_->lock();
  return prompt_scores_;
}

void Request::pool(const float* hidden, int64_t width, int64_t position, int64_t count) {
  pooled_.resize(static_cast<size_t>(width));
  const int64_t passed = std::clamp<int64_t>(pooled_tokens_ - position, 0, count);
  for (int64_t t = passed; t < count; ++t)
    for (int64_t i = 0; i < width; ++i) pooled_[static_cast<size_t>(i)] += static_cast<double>(hidden[t * width + i]);
  pooled_tokens_ += count - passed;
}

std::vector<float> Request::embedding(bool normalize) const {
  const auto held = model_->lock();
  if (pooled_.empty() || finished_ == Finish::no) throw UsageError("embedding: no hidden states have been pooled");
  double squares = 0;
  for (const double value : pooled_) squares += value * value;
  const double norm = std::sqrt(squares);
  if (!std::isfinite(norm))
    throw ModelError("the model's hidden states are NaN or infinite: try another dtype, such as fp32");
  const double divisor = !normalize ? static_cast<double>(pooled_tokens_) : norm > 0 ? norm : 1;
  std::vector<float> result;
  result.reserve(pooled_.size());
  for (const double value : pooled_) result.push_back(static_cast<float>(value / divisor));
  return result;
}

}  // namespace anyaccel::llm
