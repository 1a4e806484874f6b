// SPDX-License-Identifier: Apache-2.0
// Requests and the steps of generation, whatever computes them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llm/attention/sequences.h"
#include "llm/decoder/profile.h"
#include "llm/decoder/spec.h"
#include "llm/decoder/weights.h"
#include "llm/draft/pace.h"
#include "llm/forward/forward.h"
#include "llm/model/sampling.h"
#include "llm/ranks/stages.h"

namespace anyaccel::llm {

class Request;
class TokenFeed;
struct StepResult;

// What several steps brought: the tokens of each of them, and how many of these went to the feed.
struct Steps {
  std::vector<std::vector<int64_t>> tokens;
  int64_t fed = 0;
};

// What a model and its draft model, which has another vocabulary, make of each other's tokens.
struct DraftTranslation {
  // The draft model's tokens of the text that this one's are; none where the text breaks off within a character.
  std::function<std::vector<int64_t>(const std::vector<int64_t>&)> to_draft;
  // This model's tokens of what the draft model has said behind `before`: (tokens, before, said).
  std::function<std::vector<int64_t>(const std::vector<int64_t>&, const std::vector<int64_t>&,
                                     const std::vector<int64_t>&)>
      from_draft;
};

// A token that the executor chooses itself, from the logits of a row of its run.
struct Pick {
  int32_t row;
  // As in SamplingOptions; temperature 0: the likeliest token.
  float temperature = 0;
  int top_k = 0;
  float top_p = 1, min_p = 0;
  double uniform = 0;    // the random number that it is drawn by
  double following = 0;  // and that of the token behind it
  int64_t token = -1;    // what was chosen; -1: the logits are no numbers
};

// The executors that derive from it have weights and the memory of sequences, and compute runs of tokens: DecoderModel
// here, ExternalModel in Python. What is done with requests is done in this class, for all of them.
//
// Calls may come from several threads, and run one after the other. After an error that is not of an exchange among
// ranks the model is as it was before the call.
class Model {
 public:
  explicit Model(DecoderSpec spec) : spec_(std::move(spec)) {}
  virtual ~Model();

  const DecoderSpec& spec() const { return spec_; }
  virtual size_t weight_bytes() const = 0;
  virtual int threads() const = 0;
  // Called now and then by the thread that called step() or forward(); may throw, which ends the call.
  void set_interrupt_check(std::function<void()> check) { interrupt_check_ = std::move(check); }

  // --- tensor parallelism, see ParallelRanks, and stages, see Stages; names, pids and hosts of all ranks
  // `wire_dtype`: see WireFormat, of what is summed; `transport`: see start_transport(); `socket`: that all threads of
  // this rank run on, or -1. Throws std::invalid_argument too.
  virtual std::string create_segment(double timeout_s, bool anonymous = false, const std::vector<int>& hosts = {},
                                     const std::vector<std::string>& addresses = {},
                                     const std::string& wire_dtype = "f32", const std::string& transport = {},
                                     int socket = -1) = 0;
  virtual void connect(const std::vector<std::string>& names, const std::vector<int>& pids) = 0;
  virtual void unlink() = 0;
  // Rank 0's value, on every rank; all call it between steps.
  uint64_t shared(uint64_t value);

  // --- drafts
  // The model that guesses tokens for requests that ask for it; on ranks, this rank's part of it. It has the same
  // tokens, or `translation`. Null: none. Throws UsageError, also where an executor has no drafts.
  void set_draft(std::shared_ptr<Model> draft, DraftTranslation translation = {});
  // The bytes of weights that its passes read for a token, as a share of those that this model's do; nothing without
  // one.
  std::optional<double> draft_cost();
  // Whether its drafts could pay if they were all right; else there are none but where draft_always asks for them.
  bool draft_can_pay();
  // How many tokens draft models have read here, and in how many passes.
  std::pair<int64_t, int64_t> draft_work();

  // --- generation
  // One step of each request: what is not in the cache yet is processed, at most limits[i] tokens of request i (all of
  // them where that is 0, or no limits are given), then a token is chosen. Returns it; -1 for a request that had
  // finished; -2 for one whose prompt goes on in the next step, or has no answer. Throws UsageError, ModelError (logits
  // that are not numbers), OutOfCache.
  // `exact`: a request's logits have the same bits whatever else is in the step, wherever its prompt is divided, and
  // however much of it is forgotten (Request::shrink) and computed again; tokens of prompts and of answers pass apart
  // then, and where both are computed again, the answer's do so from the next step on.
  std::vector<int64_t> step(const std::vector<Request*>& requests, const std::vector<int64_t>& limits = {},
                            bool exact = false);
  // At most `most` exact steps of requests that are all in their answers. As long as another one follows, a step's
  // tokens go to `feed` with `tag`; the last ones do not. It ends early when a request has finished, when the feed says
  // so, and before a step that fails: the next call of step() tells why. Throws as step() does, of the first one.
  Steps steps(const std::vector<Request*>& requests, int64_t most, TokenFeed& feed, int64_t tag);

  // --- sequences, for callers with a loop of their own
  int create();
  int fork(int sequence, int64_t tokens);
  void truncate(int sequence, int64_t tokens);
  void destroy(int sequence);
  int64_t length(int sequence);
  // `tokens`: counts[i] new tokens of sequences[i], one after another. `logits`: [rows, vocab], of those tokens; null
  // where the executor keeps them itself.
  void forward(const std::vector<int>& sequences, const std::vector<int64_t>& counts, const int64_t* tokens,
               float* logits, const std::vector<int64_t>& rows);

  // Of a sequence's recurrent state; where it has one, fork() and truncate() go back to few places only, and throw
  // UsageError elsewhere.
  size_t cache_bytes_per_state();
  size_t cache_bytes_per_token();
  size_t cache_used_bytes();
  size_t cache_reserved_bytes();
  size_t cache_limit_bytes();
  // Returns what was counted so far, and starts counting anew or stops.
  Profile::Entries profile(bool enabled);

 protected:
  struct Work {  // new tokens of one sequence
    int sequence;
    const int64_t* tokens;
    int64_t count;
    // The sequence's length that rotary positions are of; 0: that after the call, or after each token that passes
    // apart.
    int64_t context = 0;
    // Each token passes as if it were the last one: drafts, whose results must have the same bits as without, and the
    // part of an answer that is computed again.
    bool apart = false;
    const float* inputs = nullptr;  // of a head that drafts: hidden states of these tokens
    int64_t model_inputs = 0;       // how many of them are the model's; the others are its own
    int64_t start = 0;              // the sequence's length before
    int64_t keep = 0;               // the length at which its recurrent state is kept, where the run comes there
    bool keep_anyway = false;       // however little memory there is
  };

  // --- what an executor gives; all is called with the lock held
  virtual Sequences& cache() = 0;
  virtual const Sequences& cache() const = 0;
  // Throws UsageError where steps cannot be made yet.
  virtual void check_ready() const {}
  // False in a forked child whose parent has the model's threads.
  virtual bool usable() const noexcept { return true; }
  // Throws OutOfCache or ModelError where there is no memory for all of it.
  virtual void check_room(const std::vector<Work>& work) = 0;
  virtual int64_t most_tokens() const = 0;  // of a run
  // Whether it chooses tokens itself where nothing but Pick's options is asked for.
  virtual bool picks() const { return false; }
  // Whether it keeps the promise of `exact` in step(), which drafts need; and what its passes read for a token.
  virtual bool exact() const { return false; }
  virtual Weights::Load load() const { return {}; }
  // Whether it can give a head that drafts the hidden states which that reads.
  virtual bool gives_features() const { return false; }
  // One run; the sequences have been extended. See Forward::run().
  virtual void run(const StepTokens& tokens, std::vector<Pick>& picks) = 0;
  // Where the logits of a sequence were no numbers: whoever gets its memory next must not see them.
  virtual void clear(int /*sequence*/) {}
  virtual uint64_t exchange(uint64_t value) { return value; }
  virtual void share_rows(const StepTokens& /*tokens*/) {}
  // Calls function(thread, threads) on each thread.
  virtual void on_threads(const std::function<void(int, int)>& function) { function(0, 1); }

  void check_tokens(const int64_t* tokens, int64_t count) const;
  std::unique_lock<std::mutex> lock();  // also frees the sequences of requests that have ended

  const DecoderSpec spec_;
  Profile profile_;
  std::unique_ptr<Stages> stages_;
  std::function<void()> interrupt_check_;

 private:
  friend class Request;
  struct Pass;
  struct Wanted;

  void check_sequence(int sequence) const;
  void check_reachable(int sequence, int64_t tokens) const;
  int64_t most_of_a_run(int64_t total, const Pass& pass) const;
  // What the last stage has chosen, from result.ones[begin] on, or why it could not, on all stages.
  void share_chosen(size_t begin, std::string& failure, StepResult& result);
  // Runs all tokens; `done` gets what is wanted of them, run by run. `wanted` is in the order of the tokens.
  template <class Done>
  void process(std::vector<Work>& work, const Pass& pass, const std::vector<Wanted>& wanted, Done done);
  void step_some(const std::vector<Request*>& requests, bool exact, StepResult& result);
  // Puts drafts behind the tokens of requests that are all in their answers; `step` gets what they took.
  void draft(const std::vector<Request*>& requests, DraftPace::Step& step);
  void draft_by_lookup(const std::vector<Request*>& requests, bool always);
  void draft_by_model(const std::vector<Request*>& requests, bool always, DraftPace::Step& step);
  // How many requests have not finished, where all of them are in their answers; else 0.
  static int64_t answers_only(const std::vector<Request*>& requests);
  Request* drafter_of(Request& request, int64_t most, DraftPace::Reads reads);
  void check_head(const Model& draft, const DraftTranslation& translation) const;
  Request* head_of(Request& request, int64_t most, DraftPace::Reads reads);
  Request& make_drafter(Request& request, const std::vector<int64_t>& tokens);
  bool has_head() const { return draft_ != nullptr && draft_->spec_.hidden_inputs; }
  // Which hidden states are kept of a request's tokens: for the head that drafts for it, or for such a head's next
  // step.
  std::vector<int> taps_of(const Request& request) const;
  DraftPace::Choice choose_drafts(const std::vector<Request*>& requests, int64_t most);
  DraftPace& pace_of(const Request& request);
  // Computes again what requests have lost of their recurrent states.
  void recover(const std::vector<Request*>& requests);
  std::vector<Work> work_of(const std::vector<Request*>& requests, const Pass& how);
  void pass(const std::vector<Request*>& requests, const Pass& how, StepResult& result);
  bool can_pick(const Request& request) const;
  void take_picks(const std::vector<Wanted>& rows, StepResult& result);
  void choose(const std::vector<Wanted>& rows, StepResult& result);
  [[noreturn]] void refuse_logits(Request& request, const StepResult& result);
  // Called by a request that ends, on any thread. A step may be running, so the next call frees the sequence.
  void leave(int sequence) noexcept;

  std::mutex mutex_;  // one call at a time
  std::mutex left_mutex_;
  std::vector<int> left_;  // sequences of requests that have ended

  std::shared_ptr<Model> draft_;
  DraftTranslation translation_;
  DraftPace lookup_pace_, model_pace_;
  std::weak_ptr<Model> draft_of_pace_;  // whose drafts model_pace_ is of: it may come back
  double draft_cost_ = 0;
  int64_t draft_pause_ = 0;  // steps in which ranks need not choose drafts of the draft model
  int64_t draft_read_ = 0, draft_passes_ = 0;

  StepTokens tokens_;
  std::vector<Pick> picks_;
  std::vector<float> logits_, hidden_, features_;
  std::vector<SamplingScratch> scratch_;  // of each thread
};

}  // namespace anyaccel::llm
