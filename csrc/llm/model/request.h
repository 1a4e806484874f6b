// SPDX-License-Identifier: Apache-2.0
// One answer under way.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "llm/draft/ngram.h"
#include "llm/draft/pace.h"
#include "llm/model/sampling.h"

namespace anyaccel::llm {

class Model;
struct Pick;

// What a model has made of the last tokens of a sequence, for a head that drafts.
class HiddenStates {
 public:
  int64_t begin() const { return first_; }
  int64_t end() const { return first_ + count(); }
  int64_t count() const { return width_ == 0 ? 0 : static_cast<int64_t>(values_.size()) / width_; }
  const float* at(int64_t position) const { return values_.data() + (position - first_) * width_; }
  // Of the token at `position`; what is known of those behind it is forgotten, and all where some before it are
  // missing.
  void put(int64_t position, const float* values, int64_t width);
  void truncate(int64_t position);
  // As many as these are kept, and at most so many once more.
  static constexpr int64_t kKept = 256;

 private:
  int64_t first_ = 0, width_ = 0;
  std::vector<float> values_;
};

struct RequestOptions {
  // What comes of the prompt: an answer; nothing, as only its scores are wanted; the hidden states after the last norm,
  // their mean over the prompt's tokens or that of its last token, divided by the 2-norm.
  enum class Goal : uint8_t { answer, scores, mean, last };

  Goal goal = Goal::answer;
  SamplingOptions sampling;
  uint64_t seed = 0;
  int64_t max_new_tokens = 0;  // 0: as many as the context takes
  int64_t min_new_tokens = 0;
  std::vector<int64_t> end_tokens;
  bool ignore_end = false;
  // For each token of the answer, and of the prompt: how many of the likeliest tokens are told beside it, with their
  // log-probabilities before any sampling option; 0: only its own; -1: nothing.
  int logprobs = -1, prompt_logprobs = -1;
  // The most tokens of a draft that a step verifies beside choosing the next one; 0: none. The answer is the same
  // with and without. Requests that keep their logits or have a mask get no drafts, nor do long batches.
  int64_t draft_tokens = 0;
  // Who guesses: the model's draft model (Model::set_draft), where it has one, or the text so far.
  bool draft_model = false;
  // Drafts also where they cost more than they save: for tests, and to measure what they cost.
  bool draft_always = false;
  // With draft_always: the draft model knows no more than the end of the text.
  bool draft_end = false;
  // Of a model with a recurrent state: it is kept at the end of the last whole block of the prompt and of the answer,
  // where another request may go on (share), or this one after shrink().
  bool keep_states = false;
};

// A token that has been chosen, and the state of the generator after it.
struct ChosenToken {
  int64_t token = 0;
  Random random;
  TokenScore score;
};

class Request {
 public:
  // `prefix`: its cache is shared as far as both have the same tokens. Throws UsageError.
  Request(std::shared_ptr<Model> model, std::vector<int64_t> prompt, RequestOptions options,
          std::shared_ptr<Request> prefix, bool keep_logits);
  ~Request();
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  enum class Finish { no, end, length, stopped };

  const std::shared_ptr<Model>& model() const { return model_; }
  // The answer so far: tokens chosen since the prompt, or since the last extend().
  std::vector<int64_t> tokens() const;
  // How many tokens come before the answer.
  int64_t prompt_length() const;
  Finish finished() const;
  // Ends the request: its cache is freed, and it may not be in a step again.
  void finish();
  // Goes on with more prompt; `max_new_tokens` counts anew, 0 keeps its value. Throws UsageError.
  void extend(const std::vector<int64_t>& tokens, int64_t max_new_tokens);
  // The logits of the last step, [vocab]. Throws UsageError when the request does not keep them.
  void copy_logits(float* out) const;

  // --- for callers that share caches themselves
  // Takes over the first `tokens` tokens of another request's cache, which must be its own tokens too, before its first
  // step. Throws UsageError.
  void share(const Request& other, int64_t tokens);
  // Forgets what is in the cache from token `tokens` on; a request that goes on computes it again.
  void shrink(int64_t tokens);
  // The memory of `count` whole pages in the cache, until the next step or change. Throws UsageError.
  std::vector<uint8_t*> pages(int64_t first, int64_t count) const;
  // Before its first step: its first `tokens` tokens, whole pages, count as computed; the caller fills the pages, which
  // are returned. Throws UsageError, OutOfCache.
  std::vector<uint8_t*> restore(int64_t tokens);
  // Of a model with a recurrent state: it is kept behind the first `tokens` tokens, once they have passed, whatever
  // memory that takes; shrink() forgets it. Throws UsageError.
  void keep(int64_t tokens);
  // How many of its tokens have keys and values in the cache.
  int64_t cached() const;
  // Which tokens may come in the next step, see sample(); of vocab bits. Throws UsageError.
  void set_mask(std::vector<uint32_t> mask);
  // How many tokens have been drafted, and how many of them were right.
  std::pair<int64_t, int64_t> drafts() const;
  // The log-probabilities of the answer's tokens that were chosen since the last call.
  std::vector<TokenScore> take_scores();
  // The log-probabilities of the prompt's tokens from the second on: nothing predicts the first one.
  std::vector<TokenScore> prompt_scores() const;
  // The result for the goals `mean` and `last`, [hidden], once the prompt has been processed. Else throws UsageError.
  // `normalize`: of length 1.
  std::vector<float> embedding(bool normalize = true) const;

 private:
  friend class Model;

  // What follows is called with the model's lock held. pending(): tokens that are not in the cache yet.
  int64_t pending() const { return static_cast<int64_t>(tokens_.size()) - cached_; }
  bool answering() const { return options_.goal == RequestOptions::Goal::answer; }
  // Adds the hidden states of the tokens at position, position + 1, ... to the sum. Tokens that it has already, because
  // they are computed again, are passed over.
  void pool(const float* hidden, int64_t width, int64_t position, int64_t count);
  void share_prefix();
  // The cache goes back to `tokens` tokens, or further, to where it can: then the next step makes up for that.
  void go_back(int64_t tokens);
  // Where the state is to be kept in the next pass, behind this many tokens.
  int64_t keep_at() const;
  // How the executor chooses the next token, where it does.
  Pick pick(int32_t row) const;
  // The most drafts that the next pass may take, of `most`; 0 where there is no room, or the request takes none.
  int64_t draft_room(int64_t most) const;
  // Drafts stand behind the tokens while a step runs.
  void add_draft(int64_t token);
  void drop_drafts();
  // What lookup would draft next where nothing is drafted: whether it was right costs nothing to know in the next step.
  void guess(int64_t token);
  void check_guess();
  // Whether it has a request of that draft model.
  bool follows(const std::shared_ptr<Model>& draft) const { return drafter_ != nullptr && drafter_->model_ == draft; }
  // Of a draft model's request: goes on behind other tokens, with what is right of its cache, and draws as `other`
  // will, whose first `skipped` tokens it does not have.
  void follow(const std::vector<int64_t>& tokens, const Request& other, int64_t skipped);
  // What a step has chosen; the drafts go, from the cache too as far as they were wrong.
  void take(std::vector<ChosenToken> chosen);
  // The next token of those that have been taken, which is the answer's from then on.
  int64_t next();
  // Forgets what was chosen and is not the answer's yet.
  void drop_chosen();

  const std::shared_ptr<Model> model_;
  RequestOptions options_;
  std::shared_ptr<Request> prefix_;  // until the first step
  const bool keep_logits_;
  int sequence_ = -1;
  int64_t cached_ = 0;  // tokens whose keys and values are in the cache
  int64_t keep_ = 0;    // where keep() wants the state
  int64_t lost_ = 0;    // the last ones of them, which are not: the next step computes them again, beside its own
  std::vector<int64_t> tokens_;  // of prompt and answer
  int64_t prompt_;               // how many of them come before the answer
  Finish finished_ = Finish::no;
  Random random_;
  std::vector<float> logits_;
  int64_t context_ = 0;  // the sequence's length when its cache was computed, which longrope's angles depend on
  int64_t passing_ = 0;  // tokens that the step under way computes
  int64_t drafted_ = 0;  // tokens at the end of tokens_ that are drafts, while a step runs
  NgramDrafts ngrams_;
  std::shared_ptr<Request> drafter_;            // of the draft model, once it has drafted
  int64_t draft_from_ = 0, draft_read_to_ = 0;  // those of tokens_ that it has read
  // How much the draft model knows when it drafts.
  size_t draft_level() const {
    return DraftPace::level_of(static_cast<int64_t>(tokens_.size()) - draft_from_, draft_from_ > 0);
  }
  HiddenStates states_;  // of its own tokens, where a head drafts for it; of a head's request: what it reads
  // Of a head's request: how many of its tokens come with the model's hidden states, not with its own.
  int64_t sure_ = INT64_MAX;
  int64_t guess_ = 0, guess_at_ = -1;
  AcceptanceRate acceptance_;
  double draft_lost_ = 0;  // seconds that its steps took more for its drafts, but for reading
  int64_t drafted_in_all_ = 0, accepted_in_all_ = 0;
  // Chosen, but not the answer's yet: each of the next steps gives one, without computing anything. Their keys and
  // values, but for the last one's, are in the cache behind those of tokens_.
  std::deque<ChosenToken> chosen_;
  std::vector<uint32_t> mask_;
  std::vector<TokenScore> scores_, prompt_scores_;
  std::vector<double> pooled_;  // sum of hidden states
  int64_t pooled_tokens_ = 0;
};

}  // namespace anyaccel::llm
