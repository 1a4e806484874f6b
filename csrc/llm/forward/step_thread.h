// SPDX-License-Identifier: Apache-2.0
// One thread's way through a step. All threads run the whole step, in phases with barriers in between.
//
// Small steps (up to kGemvTokens tokens): every thread has the whole residual and makes norms and inputs for itself,
// which costs less than a barrier; it computes its rows of each product, and may go on with those without a barrier.
// Large steps: threads divide the tokens between products, and share the residual and the inputs.
//
// What attention and MLP add to the residual ("delta") is added by the next norm, in the same pass over memory; with
// tensor parallelism the deltas of all ranks are, in the same order on each, so that all have the same residual.
#pragma once

#include <cstdint>

#include "llm/forward/forward.h"
#include "llm/kernels/mixers.h"

namespace anyaccel::llm {

class StepThread {
 public:
  StepThread(Forward& forward, const StepTokens& step, int thread);
  void run() noexcept;
  unsigned turn() const { return turn_; }
  uint64_t calls() const { return calls_; }

 private:
  // --- forward.cpp
  void embed() noexcept;
  void check_signatures() noexcept;
  // Between stages: the residual with all that has been added to it.
  void take_residual() noexcept;
  void pass_residual() noexcept;
  void embed_for_layers(const LayerInputsSpec& spec) noexcept;
  void fuse(const HiddenInputsSpec& spec) noexcept;
  void give_features(int tap) noexcept;
  void layer(size_t index) noexcept;
  void side_block(size_t index) noexcept;
  void finish_layer(size_t index) noexcept;
  // Attention, the recurrent mixer, or both; returns how many deltas there are.
  int mix(size_t index) noexcept;
  void recurrent(size_t index, int which) noexcept;
  void head() noexcept;
  void logits_of(const Matrix& w, const float* x, int64_t first, int64_t count) noexcept;
  void spread_logits(const float* from, int64_t first, int64_t count) noexcept;
  void finish_logits(float* logits, int64_t stride, int64_t tokens, int64_t begin, int64_t end) noexcept;
  // Brings what advance(t, ...) will read into the cache.
  void fetch_pending(int64_t t) const noexcept;
  // Adds the pending deltas to the residual of token t, and writes the norm of the sum.
  void advance(int64_t t, const Norm& norm, float* out) noexcept;
  // The same for all of this thread's tokens; the norms go to x.
  void advance(const Norm& norm, bool residual_from_norm) noexcept;

  // --- streams.cpp: see Streams and Laurel in spec/decoder.py
  static constexpr int kMostStreams = 16;
  void open_streams() noexcept;
  void predict_streams(size_t index) noexcept;
  void correct_streams(size_t index) noexcept;
  void close_streams() noexcept;
  // What the router says of a token's residual.
  void route_streams(size_t index, const float* residual, float* out) noexcept;
  float* stream_of(int64_t t, int64_t which) const noexcept;
  void add_laurel(const LayerSpec& spec, const LayerWeights& weights) noexcept;

  // Norms of values that ranks divide: each rank's sum, sum of squares and number of them are in its slot.
  static constexpr int64_t kSums = 4;  // floats; the last one is not used
  static void put_sums(const float* x, int64_t count, double share, float* out) noexcept;
  void norm_of_ranks(const Norm& norm, int64_t place, const float* x, int64_t count, float* out) const noexcept;
  // Rows of `count` values that all threads have made, each normed, with those of other ranks; in small steps every
  // thread has a copy of its own. Nothing else may be in this rank's slot.
  const float* norm_rows(const Norm& norm, float* x, int64_t stride, int64_t count) noexcept;

  // out[t, head] = matrix_of(head) x[t, head] for `tokens` tokens, few at a time: threads divide the heads, and if
  // there are more threads, each head's rows.
  template <class MatrixOf>
  void multiply_heads(int heads, int64_t tokens, const float* x, int64_t x_stride, int64_t x_head, float* out,
                      int64_t out_stride, int64_t out_head, const MatrixOf& matrix_of) noexcept;

  // --- attention_layer.cpp
  void project(const AttentionSpec& spec, const LayerWeights& weights) noexcept;
  void attention(size_t index) noexcept;
  void gate_attention(size_t index) noexcept;
  void rotate_standard(size_t index, AttentionStep& step) noexcept;
  void norm_queries_keys(size_t index, float* q, float* k, int64_t t) noexcept;
  void sums_of_squares(size_t index, const float* heads, int64_t stride, Range tokens) noexcept;
  void attend_standard(size_t index, AttentionStep& step) noexcept;
  // Queries of a token whose spec has a growth are multiplied by it: see Attention in spec/decoder.py.
  static float growth_at(const AttentionSpec& spec, int64_t position) noexcept;

  // --- latent_attention.cpp
  using LatentRun = Forward::LatentRun;
  void project_latent(const AttentionSpec& spec, const LayerWeights& weights) noexcept;
  void rotate_latent(const AttentionSpec& spec, const LayerWeights& weights) noexcept;
  void attend_queries(const AttentionStep& step) noexcept;
  // Of the few tokens of a run, and of one long query.
  void attend_latents(const AttentionSpec& spec, const LayerWeights& weights, const AttentionStep& step,
                      const LatentRun& run) noexcept;
  void attend_expanded(const AttentionSpec& spec, const LayerWeights& weights, const AttentionStep& step,
                       const Query& query) noexcept;
  void attend_latent(size_t index, AttentionStep& step) noexcept;
  // Of an indexer: see Indexer in spec/decoder.py.
  void rotate_index(const IndexerSpec& spec, const LayerWeights& weights) noexcept;
  void append_index(size_t index, AttentionStep step) noexcept;
  void choose_tokens(size_t index) noexcept;

  // --- recurrent_layer.cpp; `which`: the delta that it makes
  Range channels_of(const Shape& in, int64_t channels) const noexcept;
  void convolve_own(size_t index, Convolution conv, float* x, int64_t stride, Range channels) noexcept;
  void short_conv(size_t index, int which) noexcept;
  LinearHead prepare_head(size_t index, int64_t head, int64_t row, int tokens) noexcept;
  void attend_heads(size_t index) noexcept;
  const float* norm_mixed(size_t index) noexcept;
  const float* gates_of(const LinearAttentionSpec& spec) const noexcept;
  void gate_mixed(const LinearAttentionSpec& spec, const float* gates, float* out, int64_t count) const noexcept;
  void linear_attention(size_t index, int which) noexcept;
  void select(size_t index) noexcept;
  void selective_scan(size_t index, int which) noexcept;
  void gated_lru(size_t index, int which) noexcept;

  // --- mlp.cpp
  // `scales`: of the rows of gate and up, before the activation; null: none.
  void gate_up(const MlpWeights& mlp, const Input* input, int64_t tokens, float* gate, float* up,
               const float* scales = nullptr) noexcept;
  void activate_own(const MlpWeights& mlp, int64_t tokens, float* gate, float* up,
                    const float* scales = nullptr) noexcept;
  void activate_row(const MlpWeights& mlp, float* gate, float* up, int64_t t, Range part,
                    const float* scales) const noexcept;
  void mlp(const MlpWeights& mlp, int which, bool features_ready) noexcept;
  // Leaves of the gates what is above their mean by the cutoff's number of standard deviations.
  void cut_gates(const MlpWeights& mlp, float* gate) noexcept;
  float cutoff_of_ranks(const MlpWeights& mlp, int64_t t) const noexcept;
  void experts(size_t index, float* delta) noexcept;
  void experts_small(size_t index, float* delta) noexcept;
  void experts_large(size_t index, float* delta) noexcept;
  // What the experts read: x, or a norm of their own, which takes the place of the router's.
  const float* experts_input(const MoeSpec& moe, const LayerWeights& weights) noexcept;
  // Adds what experts and shared MLP gave, each normed, to the residual.
  void add_normed(const LayerWeights& weights, float scale) noexcept;
  // Which experts the tokens go to; and a token of which the router has said `logits`.
  void route(const MoeSpec& moe, const LayerWeights& weights, Range tokens, Routing& routing) noexcept;
  void choose(const MoeSpec& moe, const LayerWeights& weights, const float* logits, int32_t* chosen,
              float* weight) noexcept;
  // Where experts stay in a file: sees to those that this run needs, and those that the next layer probably does.
  void fetch_experts(size_t index, const Routing& routing) noexcept;
  void read_ahead(size_t index) noexcept;
  float shared_weight(const MoeSpec& moe, int64_t t) const noexcept;

  // --- common, and deltas.cpp
  void barrier(Work kind) noexcept {
    mark(kind);
    forward_.team_.barrier(thread_);
    mark(Work::wait);
  }
  // Waits for all threads, then exchanges deltas among ranks: after it, the deltas of all of them can be read.
  void exchange(Work kind, const ParallelRanks::Parts& parts) noexcept;
  void await_ranks(unsigned turn, const ParallelRanks::Parts& parts) noexcept;
  void mark(Work kind) noexcept {
    if (thread_ == 0) forward_.profile_.mark(kind);
  }
  // Says that x has changed, so that inputs which were prepared before are not used again.
  void fresh() noexcept { ++stamp_; }
  // `x` prepared for matrices like `shape`.
  const Input& input(const Shape& shape, const float* x, int64_t stride, int64_t tokens, const int32_t* rows = nullptr,
                     bool of_head = false) noexcept;
  void multiply_into(const LinearWeights& linear, const Input& input, float* out, int64_t stride) noexcept;
  Range rows_of(const Shape& shape) const noexcept;
  float* delta(int which) noexcept;
  float* embedded() const noexcept { return small_ ? own_.embedded.get() : shared_.embedded.get(); }
  int pending_rows() const noexcept;
  const float* pending_row(int index, int64_t t) const noexcept;
  const float* normed_pending(int64_t t) noexcept;
  void add_pending(int64_t t, float* row, int count) noexcept;
  bool divides_rows() const noexcept;
  float* row_of(int rank, int64_t t) const noexcept;
  // The rows that the rank of this place on this socket adds for all.
  Range rows_added_by(int place, int socket) const noexcept;
  const float* added_row(int64_t t) const noexcept;
  void add_rows_for_all() noexcept;
  void pend(int count, const Norm& post, float scale) noexcept;

  Forward& forward_;
  const DecoderSpec& spec_;
  const Weights& weights_;
  const StepTokens& step_;
  Workspace& shared_;
  Workspace::Own& own_;
  const int thread_, threads_;
  const int64_t tokens_;
  const bool small_;
  const Range mine_;  // tokens whose rows of the residual this thread keeps
  const int64_t hidden_stride_, features_stride_, qkv_stride_;
  float* const residual_;
  float* const x_;

  uint64_t calls_;  // products, the same number on all threads
  unsigned turn_;   // of the ranks' slots
  uint64_t stamp_ = 1;
  uint64_t stamps_[Inputs::kMost] = {};  // the stamp of x when each input was prepared
  // Deltas that have not been added to the residual yet.
  int pending_ = 0;  // deltas a rank: 0 (none), 1 or 2
  unsigned pending_turn_ = 0;
  bool sockets_summed_ = false;  // instead of deltas there is one sum a socket
  Norm pending_post_;
  float pending_scale_ = 1;
};

template <class MatrixOf>
void StepThread::multiply_heads(int heads, int64_t tokens, const float* x, int64_t x_stride, int64_t x_head, float* out,
                                int64_t out_stride, int64_t out_head, const MatrixOf& matrix_of) noexcept {
  const int pieces = std::max(threads_ / heads, 1);
  const Range own = part_of(static_cast<int64_t>(heads) * pieces, thread_, threads_);
  for (int64_t item = own.begin; item < own.end; ++item) {
    const int64_t head = item / pieces;
    const Matrix& w = matrix_of(static_cast<size_t>(head));
    Input& input = own_.inputs.at(own_.inputs.index(w.shape()));
    for (int64_t first = 0; first < tokens; first += kGemvTokens) {
      const int count = static_cast<int>(std::min<int64_t>(tokens - first, kGemvTokens));
      input.prepare(w.shape(), x + first * x_stride + head * x_head, x_stride, nullptr, count, 0, 1);
      multiply(w, input, Output{out + first * out_stride + head * out_head, out_stride},
               static_cast<int>(item % pieces), pieces);
    }
  }
  fresh();
}

}  // namespace anyaccel::llm
