// SPDX-License-Identifier: Apache-2.0
// A decoder: weights, cache, threads, and the steps of generation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/team.h"
#include "llm/attention/attention.h"
#include "llm/decoder/profile.h"
#include "llm/decoder/spec.h"
#include "llm/decoder/weight_file.h"
#include "llm/decoder/weights.h"
#include "llm/draft/pace.h"
#include "llm/forward/forward.h"
#include "llm/model/sampling.h"
#include "llm/ranks/parallel_ranks.h"
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

// Calls may come from several threads, and run one after the other. After an error that is not of an exchange among
// ranks the model is as it was before the call.
class Model {
 public:
  // `threads`: 0 for as many as this process may use CPUs. Throws UsageError, std::bad_alloc, std::system_error.
  Model(DecoderSpec spec, const std::vector<MatrixEntry>& matrices, const std::vector<VectorEntry>& vectors,
        int threads, CacheFormat cache_format, size_t cache_limit_bytes);
  ~Model();

  const DecoderSpec& spec() const { return spec_; }
  size_t weight_bytes() const { return weights_.bytes(); }
  int threads() const { return team_.size(); }
  const KvCache& cache() const { return cache_; }
  // Called now and then by the thread that called step() or forward(); may throw, which ends the call.
  void set_interrupt_check(std::function<void()> check) { interrupt_check_ = std::move(check); }

  // --- weights, see Weights
  void set_rows(const std::string& name, int64_t first, int64_t count, const Source& source, const int64_t* order);
  void set_quantised_rows(const std::string& name, int64_t first, int64_t count, const uint8_t* q, const float* scales,
                          const float* minima);
  void set_vector(const std::string& name, int64_t first, int64_t count, const void* data, SourceType type,
                  int64_t stride, float plus);
  // See weight_file.h.
  uint64_t write(int fd, int64_t offset, const FileProgress& progress);
  uint64_t read(int fd, int64_t offset, const FileProgress& progress);
  // After the last weight. Throws ModelError.
  void finish();

  // --- tensor parallelism, see ParallelRanks, and stages, see Stages; names, pids and hosts of all ranks
  // `wire_dtype`: see WireFormat, of what is summed; `transport`: see start_transport(). Throws std::invalid_argument
  // too.
  std::string create_segment(double timeout_s, bool anonymous = false, const std::vector<int>& hosts = {},
                             const std::vector<std::string>& addresses = {}, const std::string& wire_dtype = "f32",
                             const std::string& transport = {});
  void connect(const std::vector<std::string>& names, const std::vector<int>& pids);
  void unlink();
  // Rank 0's value, on every rank; all call it between steps.
  uint64_t shared(uint64_t value);

  // --- drafts
  // The model that guesses tokens for requests that ask for it; on ranks, this rank's part of it. It has the same
  // tokens, or `translation`. Null: none. Throws UsageError.
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
  // `tokens`: counts[i] new tokens of sequences[i], one after another. `logits`: [rows, vocab], of those tokens.
  void forward(const std::vector<int>& sequences, const std::vector<int64_t>& counts, const int64_t* tokens,
               float* logits, const std::vector<int64_t>& rows);

  int64_t cache_bytes_per_token() const;
  size_t cache_used_bytes();
  size_t cache_reserved_bytes();
  // Returns what was counted so far, and starts counting anew or stops.
  Profile::Entries profile(bool enabled);

 private:
  friend class Request;
  struct Work;  // the new tokens of one sequence
  struct Pass;
  struct Wanted;

  std::unique_lock<std::mutex> lock();  // also frees the sequences of requests that have ended
  void check_ready() const;
  void check_tokens(const int64_t* tokens, int64_t count) const;
  void check_sequence(int sequence) const;
  void check_room(const std::vector<Work>& work) const;
  int64_t most_of_a_run(int64_t total, const Pass& pass) const;
  // What the last stage has chosen, from result.ones[begin] on, or why it could not, on all stages.
  void share_chosen(size_t begin, std::string& failure, StepResult& result);
  // Runs all tokens. kind(i) says whether the logits or the hidden state of token i are wanted; `done` is told where
  // they are, run by run.
  template <class Kind, class Done>
  void process(std::vector<Work>& work, const Pass& pass, Kind kind, Done done);
  void step_some(const std::vector<Request*>& requests, bool exact, StepResult& result);
  // Puts drafts behind the tokens of requests that are all in their answers; `step` gets what they took.
  void draft(const std::vector<Request*>& requests, DraftPace::Step& step);
  void draft_by_text(const std::vector<Request*>& requests, bool always);
  void draft_by_model(const std::vector<Request*>& requests, bool always, DraftPace::Step& step);
  // How many requests have not finished, where all of them are in their answers; else 0.
  static int64_t answers_only(const std::vector<Request*>& requests);
  Request* drafter_of(Request& request, int64_t most, DraftPace::Reads reads);
  DraftPace::Choice choose_drafts(const std::vector<Request*>& requests, int64_t most);
  DraftPace& pace_of(const Request& request);
  std::vector<Work> work_of(const std::vector<Request*>& requests, const Pass& how);
  void pass(const std::vector<Request*>& requests, const Pass& how, StepResult& result);
  void choose(const std::vector<Wanted>& rows, size_t first, size_t count, StepResult& result);
  // Called by a request that ends, on any thread. A step may be running, so the next call frees the sequence.
  void leave(int sequence) noexcept;

  DecoderSpec spec_;
  Team team_;
  Weights weights_;
  KvCache cache_;
  Profile profile_;
  std::unique_ptr<ParallelRanks> ranks_;
  std::unique_ptr<Stages> stages_;
  Forward forward_;
  std::function<void()> interrupt_check_;
  std::string transport_;
  bool finished_ = false;

  std::mutex mutex_;  // one call at a time
  std::mutex left_mutex_;
  std::vector<int> left_;  // sequences of requests that have ended

  std::shared_ptr<Model> draft_;
  DraftTranslation translation_;
  DraftPace text_pace_, model_pace_;
  std::weak_ptr<Model> draft_of_pace_;  // whose drafts model_pace_ is of: it may come back
  double draft_cost_ = 0;
  int64_t draft_pause_ = 0;  // steps in which ranks need not choose drafts of the draft model
  int64_t draft_read_ = 0, draft_passes_ = 0;

  StepTokens tokens_;
  std::vector<float> logits_, hidden_;
  std::vector<SamplingScratch> scratch_;  // of each thread
};

}  // namespace anyaccel::llm
