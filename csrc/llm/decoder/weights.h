// SPDX-License-Identifier: Apache-2.0
// A decoder's weights: one block with every packed matrix and every vector, by name. In front is what every token
// needs, behind it the matrices of experts, expert by expert, which may stay in a file (ExpertCache).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/team.h"
#include "llm/decoder/expert_cache.h"
#include "llm/decoder/spec.h"
#include "llm/decoder/weight_file.h"
#include "llm/kernels/ops.h"
#include "llm/pack/matrix.h"

namespace anyaccel::llm {

// What a decoder wants: a matrix [rows, cols], or a vector of `rows` values, whose `cols` is 0.
struct WantedWeight {
  std::string name;
  int64_t rows, cols;
};
// Of a stage, its own ones; the numbers of its layers begin at first_layer.
// The weights beside those of layers, and those of one layer without its "layers.N.". Of a layer's experts, which are
// alike, only the first one's: a damaged configuration may speak of any number. Neither asks whether the sizes are
// sensible; those that are larger than any memory come out as kMostSize.
std::vector<WantedWeight> outer_weights(const DecoderSpec& spec);
std::vector<WantedWeight> layer_weights(const LayerSpec& layer, int64_t hidden);

// As spec/decoder.py's MatrixShape and VectorShape. A layer's `v` may be listed: it has the last rows of its `qkv`.
struct MatrixEntry {
  std::string name;
  int64_t rows, cols;
  Format format;
  int group;
  bool minimum;
  ScaleKind scales = ScaleKind::halves;
};
struct VectorEntry {
  std::string name;
  int64_t count;
};

struct LinearWeights {
  Matrix w;
  const float* bias = nullptr;
};

// Gates and ups are two matrices, so that a thread's part of both has the same rows. Not gated: `up` is empty.
struct MlpWeights {
  LinearWeights gate, up, down;
  Activation activation = Activation::silu;
  const float* values = nullptr;  // of an activation that has learned ones: XieluValues
  Norm norm;                      // of the features
  std::optional<float> cutoff;    // see MlpSpec
};

// What multi-head latent attention multiplies with, of one head: parts of kv_b, and its keys' part transposed.
struct LatentHead {
  Matrix absorb;  // [kv_rank, nope_dim]
  Matrix keys;    // [nope_dim, kv_rank]
  Matrix values;  // [value_dim, kv_rank]
};

struct LayerWeights {
  Norm attn_norm, attn_post_norm, mlp_norm, mlp_post_norm;
  LinearWeights qkv, o;
  LinearWeights v;                     // of values in another format than queries and keys; else they are in qkv
  LinearWeights q_a, q_b, kv_a, kv_b;  // MLA; queries without a latent have no q_a
  LinearWeights index_q, index_k, index_weights;  // of an indexer
  Norm q_norm, k_norm, q_a_norm, kv_a_norm, index_norm;
  std::vector<LatentHead> latent_heads;
  const float* sinks = nullptr;
  // Recurrent mixers. `mix_in` of a short convolution is x, `mix_gates` b and c; of linear attention it is queries,
  // keys, values and the gate. `taps`: the convolution's weights [kernel, channels], from those that are listed.
  LinearWeights mix_in, mix_gates[2], mix_steps, mix_out, mix_gate_up;
  const float* conv = nullptr;  // [channels, kernel]
  const float* conv_bias = nullptr;
  std::vector<float> taps;
  int64_t conv_channels = 0;
  int kernel = 0;
  const float* rate = nullptr;       // [heads]: log of the decay's rate
  const float* step_bias = nullptr;  // [heads]
  const float* skip = nullptr;       // [heads], or [channels]
  Norm mix_norm;
  // The selective scan: `rate` is [channels, state_dim], `scan_rates` what a step reads, [state_dim, channels].
  LinearWeights mix_select, mix_step_up;
  Norm step_norm, b_norm, c_norm;
  std::vector<float> scan_rates;
  // The gated linear recurrent unit: of each head the input's gates, then of each the decays'; `rate` is [channels].
  std::vector<LinearWeights> head_gates;
  MlpWeights mlp;
  LinearWeights router;
  const float* choice_bias = nullptr;
  std::vector<MlpWeights> experts;
  MlpWeights shared;
  LinearWeights shared_gate;
  LinearWeights input_gate, input_down;
  Norm v_norm, input_norm, out_norm;
  Norm router_norm, experts_norm, experts_post_norm, shared_post_norm;
  const float* expert_scale = nullptr;
  const float* layer_scale = nullptr;
  LinearWeights laurel_down, laurel_up, side;
  Norm laurel_norm, side_norm;
  Norm stream_norm;
  const float* stream_router = nullptr;   // [streams, hidden]
  const float* stream_predict = nullptr;  // [streams, streams, streams]: predicted, of which, router
  const float* stream_correct = nullptr;  // [streams, streams]: corrected, router
  const float* stream_scale = nullptr;    // [hidden]
};

class Weights {
 public:
  // `memory`: bytes that the weights may take; 0: all. Experts that do not fit stay in a file. Throws UsageError when
  // the lists are not what `spec` needs (outer_weights() and layer_weights()), or the rest does not fit either,
  // std::bad_alloc.
  Weights(const DecoderSpec& spec, const std::vector<MatrixEntry>& matrices, const std::vector<VectorEntry>& vectors,
          size_t memory = 0);

  size_t bytes() const { return bytes_; }
  // Those in memory.
  size_t resident_bytes() const { return experts == nullptr ? bytes_ : bytes_ - expert_bytes() + experts->bytes(); }

  // --- through a file, in the order of pieces(): what is in front, then each expert; see weight_file.h
  // Before the first weight is set, where experts stay in a file: each goes there once it is complete.
  void stream_to(int fd, int64_t offset);
  // What has gone there already is not written again. Returns the checksum of each piece.
  std::vector<uint64_t> write(int fd, int64_t offset, int threads, const FileProgress& progress);
  // Whether what is read has these checksums; experts that stay in the file are checked when they are read. After it
  // every weight is set.
  bool read(int fd, int64_t offset, const std::vector<uint64_t>& checksums, int threads, const FileProgress& progress);

  // See Matrix. Divided among the team. Throw UsageError (unknown name, rows outside), std::invalid_argument.
  void set_rows(Team& team, const std::string& name, int64_t first, int64_t count, const Source& source,
                const int64_t* order);
  void set_quantised_rows(Team& team, const std::string& name, int64_t first, int64_t count, const uint8_t* q,
                          const float* scales, const float* minima);
  void set_vector(const std::string& name, int64_t first, int64_t count, const void* data, SourceType type,
                  int64_t stride, float plus);
  // Throws ModelError when something was not set.
  void finish(const DecoderSpec& spec, Team& team);

  // Of a head that drafts: embedding and head are those of `model`.
  // `tokens`: those of its own head, if it has one.
  void borrow(const Weights& model, const std::vector<int32_t>& tokens);

  // What a pass over one token takes: the bytes of matrices that it reads, and how many products of two numbers. Of
  // experts as many as a token has. 1 at least.
  struct Load {
    double bytes = 1, products = 1;
  };
  Load load(const DecoderSpec& spec) const;

  Matrix embed, positions, token_types, layer_embed;
  const float* relative_bias = nullptr;  // [buckets, heads]
  Matrix distances;                      // [rows, hidden]
  Norm distances_norm;
  LinearWeights layer_projection;
  Norm layer_projection_norm;
  std::vector<LinearWeights> streams_in, streams_out;  // of all streams but the first
  LinearWeights reduce, fuse;                          // of hidden_inputs
  Norm fuse_embed_norm, fuse_hidden_norm;
  LinearWeights head;
  Norm embed_norm, final_norm;
  std::vector<int32_t> head_tokens;  // that the rows of a head stand for, where it has not all of them
  std::vector<LayerWeights> layers;
  std::unique_ptr<ExpertCache> experts;  // null: all are in memory

 private:
  struct Slot {
    std::vector<Matrix> parts;  // of equal size, one after another
    float* vector = nullptr;
    int64_t rows;  // of all parts, or values
    int64_t cols = 0;
    std::vector<bool> set;  // by row; empty when all are
    int64_t missing;
    int64_t expert = -1;  // whose matrix it is
  };
  class Builder;

  size_t expert_bytes() const { return places_.empty() ? 0 : bytes_ - places_.front().offset; }
  std::vector<size_t> pieces() const;
  void begin_rows(const Slot& slot);
  void end_rows(const Slot& slot, int64_t marked);

  static void order_taps(LayerWeights& layer);
  static void order_rates(LayerWeights& layer);
  static void divide_heads(const AttentionSpec& spec, LayerWeights& layer, Team& team);
  Slot& find(const std::string& name, bool matrix, int64_t first, int64_t count);
  void mark(Slot& slot, int64_t first, int64_t count);
  template <class Fn>
  void for_rows(Team& team, Slot& slot, int64_t first, int64_t count, const Fn& fn);

  size_t bytes_ = 0;
  std::shared_ptr<void> memory_;
  std::vector<ExpertPlace> places_;  // of all layers' experts
  std::unordered_map<std::string, Slot> slots_;
  // While experts go to a file: which, the one in the making, how many rows it lacks, and what is known of those
  // before.
  int stream_ = -1;
  int64_t stream_offset_ = 0;
  int64_t making_ = -1, lacking_ = 0;
  std::vector<uint64_t> streamed_;
  bool finished_ = false;
};

}  // namespace anyaccel::llm
