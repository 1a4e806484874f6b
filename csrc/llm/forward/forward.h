// SPDX-License-Identifier: Apache-2.0
// One pass of tokens through the decoder.
#pragma once

#include <cstdint>
#include <exception>
#include <vector>

#include "common/team.h"
#include "llm/attention/attention.h"
#include "llm/attention/chosen.h"
#include "llm/attention/distances.h"
#include "llm/attention/expanded_keys.h"
#include "llm/decoder/profile.h"
#include "llm/decoder/rope.h"
#include "llm/decoder/spec.h"
#include "llm/decoder/state.h"
#include "llm/decoder/weights.h"
#include "llm/decoder/workspace.h"
#include "llm/ranks/parallel_ranks.h"
#include "llm/ranks/stages.h"

namespace anyaccel::llm {

// Tokens that pass together: of one sequence or of many.
struct StepTokens {
  std::vector<Query> queries;
  // The length of each query's sequence at the end of the whole call: rotary positions may depend on it.
  std::vector<int64_t> contexts;
  std::vector<int32_t> tokens;
  std::vector<int32_t> types;          // of the tokens; empty: all are 0
  std::vector<int32_t> wanted;         // rows of tokens whose logits are wanted, ascending
  std::vector<int32_t> hidden_wanted;  // rows of other tokens whose hidden states after the last norm are
  float* logits = nullptr;             // [wanted, vocab]
  int64_t logits_stride = 0;
  float* hidden = nullptr;  // [hidden_wanted, hidden]
  // Of a head that drafts (hidden_inputs): what it reads of its model's hidden states, [tokens, width].
  std::vector<float> inputs;
  std::vector<bool> own_inputs;  // of each token: they are the head's own hidden states, the first ones of the width
  // Rows of tokens, ascending, whose hidden states such a head will read, and where: of each of `taps` `hidden` floats,
  // one after another. A tap is a number of layers, or -1 for what the last norm gives.
  std::vector<int32_t> features_wanted;
  std::vector<int> taps;
  float* features = nullptr;
  // exact: results have the same bits whatever else is in the run. How a product sums depends on whether its tokens are
  // few (gemv) or many (gemm), so this is fixed: tokens of prompts (`prompt`) always count as many; of other tokens the
  // caller puts only few into a run; and logits are made as those of few tokens.
  bool exact = false, prompt = false;

  void clear() {
    queries.clear();
    contexts.clear();
    tokens.clear();
    types.clear();
    wanted.clear();
    hidden_wanted.clear();
    inputs.clear();
    own_inputs.clear();
    features_wanted.clear();
  }
};

class Forward {
 public:
  // All arguments belong to the model and live as long as it does.
  Forward(const DecoderSpec& spec, const Weights& weights, KvCache& cache, Team& team, Profile& profile);

  // The most tokens of a run.
  int64_t most_tokens() const { return most_tokens_; }
  // The most floats that a rank writes in one exchange.
  size_t slot_floats() const;
  void set_ranks(ParallelRanks* ranks, Stages* stages) {
    ranks_ = ranks;
    stages_ = stages;
  }

  // Once the weights are complete, of encoders with distances: the queries and keys that each layer makes of them.
  // Throws UsageError for a cache of fewer bits, std::bad_alloc.
  void add_distances();
  // Of a head that drafts, once its weights have been borrowed.
  void add_head();
  // Once the weights are complete: what is made of those of latent attention.
  void add_latent_heads();

  // The caller has made room in the cache for every query (KvCache::extend). Throws std::bad_alloc, comm::CommError and
  // what the ranks' interrupt check throws; the new tokens in the cache and the logits are then undefined.
  void run(const StepTokens& step);
  // The rows of logits and hidden states that the last stage has made in the run of `step`, on all stages.
  void share_rows(const StepTokens& step);
  // Rank 0's value, on every rank; all call it. Throws as run() does.
  uint64_t shared(uint64_t value);

 private:
  friend class StepThread;
  // Tokens of one sequence that follow each other in a run, and its recurrent state.
  struct Span {
    int64_t row, tokens;
    float* state;
    bool opens;  // they are the sequence's first ones
  };

  // Queries of few tokens whose rows follow each other, at most kLatentTokens in all; their rows count from `row`.
  struct LatentRun {
    int64_t row, tokens;
    std::vector<Query> queries;
    // Of one token each, which sees copies of what it has chosen: in groups for which there is room at once.
    std::vector<std::vector<Query>> choosing;
  };

  void prepare(const StepTokens& step);
  // Divides the queries by how latent attention computes them.
  void prepare_latent(const StepTokens& step);
  void prepare_chosen(const StepTokens& step);
  void find_spans(const StepTokens& step);
  // Room for sequences of `length` tokens in distances_.
  void spread_bias(int64_t length);
  void run_all(const StepTokens& step);

  const DecoderSpec& spec_;
  const Weights& weights_;
  KvCache& cache_;
  Team& team_;
  Profile& profile_;
  ParallelRanks* ranks_ = nullptr;
  Stages* stages_ = nullptr;

  Widths widths_;
  std::vector<Shape> shapes_;  // one of each kind of matrix and number of columns
  int64_t most_tokens_;
  Workspace workspace_;
  AttentionScratch scratch_;
  Inputs latent_inputs_;                // of latents, for the weights of heads
  std::vector<ExpandedKeys> expanded_;  // of each thread
  int expanded_heads_ = 1;              // that each thread makes keys of at once
  std::vector<RopeTable> ropes_;
  const StateLayout states_;
  std::vector<int> cache_layers_;  // of each layer with attention: its number in the cache
  std::vector<int> index_layers_;  // and that of its indexer's keys
  int64_t top_k_ = 0;              // of indexers; 0: there are none
  Chosen chosen_;                  // by the indexers
  // Of encoders with relative_bias: for each head one value for each distance of a key and a query, from -length on.
  std::vector<float> distances_;
  int64_t distances_length_ = 0;
  std::vector<int32_t> distance_rows_;         // of encoders with distances, see DistanceRows
  std::vector<DistanceTerms> distance_terms_;  // of each layer

  // State of the current run.
  std::vector<int64_t> positions_;                    // of each token
  std::vector<std::vector<Rotation>> rotations_;      // [rope][token]
  std::vector<Query> latent_queries_, long_queries_;  // of latent attention: all, and long ones
  std::vector<LatentRun> latent_runs_;                // and the others
  std::vector<Span> spans_;                           // where there are recurrent mixers
  std::vector<size_t> next_experts_;                  // of each layer, the next layer with experts; 0: none
  std::vector<float> likely_logits_;                  // where experts stay in a file: of a later layer's router
  SharedItems items_;                                 // of products that threads compute together
  uint64_t calls_ = 1;                                // products, from run to run
  unsigned turn_ = 0;                                 // of the ranks' slots, from run to run
  std::exception_ptr failure_;                        // of an exchange
};

}  // namespace anyaccel::llm
