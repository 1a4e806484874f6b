// SPDX-License-Identifier: Apache-2.0
// What a decoder computes, as data: the fields of src/anyaccel/inference/spec/decoder.py, which explains them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "llm/attention/attention.h"
#include "llm/kernels/ops.h"
#include "llm/pack/matrix.h"

namespace anyaccel::llm {

struct NormSpec {
  NormKind kind = NormKind::rms;
  float eps = 1e-5f;
  bool weight = true;
  bool bias = false;
};

struct RopeSpec {
  std::vector<double> inv_freq;
  double scale = 1;
  bool interleaved = false;
  int first = 0;
  std::vector<double> long_inv_freq;
  double long_scale = 1;
  int64_t long_from = 0;
  double dynamic_base = 0;
  double dynamic_factor = 1;
  int64_t dynamic_from = 0;
};

struct QkNormSpec {
  NormSpec norm;
  bool across = false;
  bool own_weights = false;
  bool after_rope = false;
};

struct MlaSpec {
  int q_rank = 0;
  int kv_rank = 0;
  int nope_dim = 0;
  int rope_dim = 0;
  std::optional<NormSpec> q_norm;
  NormSpec kv_norm;
};

struct IndexerSpec {
  int top_k = 0;
  int heads = 0;
  int head_dim = 0;
  NormSpec norm;
  int rope = -1;
  bool own = true;
};

struct AttentionSpec {
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int value_dim = 0;
  float scale = 1;
  int rope = -1;
  int window = 0;
  int chunk = 0;
  float softcap = 0;
  std::vector<float> alibi;
  bool sinks = false;
  float clip = 0;
  bool qkv_bias = false;
  bool out_bias = false;
  std::optional<QkNormSpec> qk_norm;
  std::optional<MlaSpec> mla;
  int kv_copies = 1;
  float growth = 0;
  int64_t growth_from = 0;
  int64_t growth_first = 0;
  std::optional<NormSpec> value_norm;
  int kv_layer = -1;
  bool gated = false;
  bool bidirectional = false;
  bool fused_input = false;
  std::optional<NormSpec> out_norm;
  std::optional<IndexerSpec> indexer;

  bool own_keys() const { return kv_layer < 0; }
};

struct ShortConvSpec {
  int64_t channels = 0;
  int kernel = 0;
  bool bias = false;
};

struct LinearAttentionSpec {
  enum class Strength : uint8_t { step, sigmoid };
  enum class Gate : uint8_t { silu, sigmoid };

  int heads = 0;
  int key_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  float scale = 1;
  int kernel = 0;
  bool conv_bias = false;
  bool delta = false;
  Strength strength = Strength::step;
  float strength_scale = 1;
  float step_min = 0;
  float step_max = 0;
  bool l2_norm = false;
  bool skip = false;
  bool gate = true;
  std::optional<NormSpec> norm;
  int64_t norm_width = 0;
  bool norm_shared = false;
  bool norm_first = false;
  bool in_bias = false;
  bool out_bias = false;
  int key_copies = 1;
  bool tiled = false;
  std::vector<float> slopes;
  bool silu = false;
  int decay_rank = 0;
  int gate_rank = 0;
  Gate gate_activation = Gate::silu;

  // Whether each head's result has a norm of its own, which needs nothing of the others.
  bool norm_in_head() const { return norm_first && norm_width == value_dim; }
};

struct SelectiveScanSpec {
  int64_t channels = 0;
  int state_dim = 0;
  int kernel = 0;
  int64_t step_rank = 0;
  bool conv_bias = false;
  bool in_bias = false;
  bool out_bias = false;
  std::optional<NormSpec> norm;
};

struct GatedLruSpec {
  int heads = 0;
  int head_dim = 0;
  int kernel = 0;
  Activation activation = Activation::gelu_tanh;
};

struct MlpSpec {
  int64_t features = 0;
  Activation activation = Activation::silu;
  bool gated = true;
  bool bias = false;
  bool out_bias = false;
  std::optional<NormSpec> norm;
  std::optional<float> cutoff;
};

struct MoeSpec {
  enum class Scoring : uint8_t { none, softmax, sigmoid, sparsemixer };
  enum class GroupScore : uint8_t { max, top2 };

  int experts = 0;
  int top_k = 0;
  MlpSpec expert;
  Scoring scoring = Scoring::softmax;
  bool normalise = true;
  bool softmax_after = false;
  float scale = 1;
  int groups = 1;
  int top_groups = 1;
  GroupScore group_score = GroupScore::max;
  bool router_bias = false;
  bool choice_bias = false;
  std::optional<MlpSpec> shared;
  bool shared_gate = false;
  float shared_scale = 1;
  bool scale_input = false;
  float jitter = 0;
  std::optional<NormSpec> router_norm;
  std::optional<NormSpec> experts_norm;
  float logit_scale = 1;
  bool expert_scale = false;
  std::optional<NormSpec> post_norm;
  std::optional<NormSpec> shared_post_norm;
};

struct LayerInputsSpec {
  int layers = 0;
  int64_t features = 0;
  int64_t vocab = 0;
  float embed_scale = 1;
  float projection_scale = 1;
  float scale = 1;
  NormSpec norm;
};

struct RelativeBiasSpec {
  int buckets = 0;
  int max_distance = 0;
  int heads = 0;
};

struct DistancesSpec {
  int span = 0;
  int max_distance = 0;
  bool logarithmic = true;
  bool keys = true;
  bool queries = true;
  std::optional<NormSpec> norm;
};

struct HiddenInputsSpec {
  int64_t width = 0;
  std::vector<int> taps;
  int own_tap = -1;
  std::optional<NormSpec> embed_norm;
  std::optional<NormSpec> hidden_norm;
  bool hidden_first = false;
  bool reduced = false;
  bool fused = true;
  bool normed_residual = false;
  int64_t draft_vocab = 0;

  // Of the hidden states beside the embedding.
  int64_t beside(int64_t hidden) const { return reduced ? hidden : width; }
};

struct InputGateSpec {
  MlpSpec mlp;
  NormSpec norm;
};

struct LaurelSpec {
  int64_t rank = 0;
  NormSpec norm;
  float scale = 1;
};

struct StreamsSpec {
  int count = 0;
  NormSpec norm;
  bool scaled = false;
};

struct SideBlockSpec {
  NormSpec norm;
  int layer = 0;
};

struct LayerSpec {
  std::optional<AttentionSpec> attention;
  std::optional<MlpSpec> mlp;  // at most one of the two
  std::optional<MoeSpec> moe;
  std::optional<NormSpec> attn_norm;
  std::optional<NormSpec> attn_post_norm;
  std::optional<NormSpec> mlp_norm;
  std::optional<NormSpec> mlp_post_norm;
  bool parallel = false;
  float residual_scale = 1;
  bool residual_from_norm = false;
  std::optional<InputGateSpec> input_gate;
  bool scaled = false;
  std::optional<ShortConvSpec> short_conv;  // at most one of these: Python's `recurrent`
  std::optional<LinearAttentionSpec> linear_attention;
  std::optional<SelectiveScanSpec> scan;
  std::optional<GatedLruSpec> lru;
  std::vector<float> weight_factors;  // which the weights that come here have been multiplied by
  std::optional<LaurelSpec> laurel;
  std::optional<StreamsSpec> streams;
  std::optional<SideBlockSpec> side_block;

  bool has_mlp() const { return mlp.has_value() || moe.has_value(); }
  bool is_recurrent() const { return short_conv || linear_attention || scan || lru; }
};

struct DecoderSpec {
  int64_t vocab = 0;
  int64_t hidden = 0;
  std::vector<LayerSpec> layers;
  std::optional<NormSpec> final_norm;
  std::vector<RopeSpec> ropes;
  float embedding_scale = 1;
  std::optional<NormSpec> embedding_norm;
  int64_t positions = 0;
  int64_t position_offset = 0;
  bool tied = false;
  bool head_bias = false;
  float logits_scale = 1;
  float logits_softcap = 0;
  int64_t max_tokens = 0;
  int rank = 0;
  int size = 1;
  int64_t vocab_first = 0;
  int64_t vocab_count = 0;
  int stage = 0;
  int stages = 1;
  int first_layer = 0;
  std::optional<LayerInputsSpec> layer_inputs;
  int64_t token_types = 0;
  std::optional<RelativeBiasSpec> relative_bias;
  std::optional<DistancesSpec> distances;
  std::optional<HiddenInputsSpec> hidden_inputs;
  int streams = 1;

  // Whether tokens see those behind them: whole sequences are computed, and nothing of them is kept.
  bool is_encoder() const {
    return !layers.empty() && layers.front().attention && layers.front().attention->bidirectional;
  }
  bool is_first_stage() const { return stage == 0; }
  bool is_last_stage() const { return stage == stages - 1; }
  int64_t own_vocab() const { return vocab_count > 0 ? vocab_count : vocab; }
  // Whether sequences have a state beside their keys and values.
  bool is_recurrent() const {
    for (const LayerSpec& layer : layers)
      if (layer.is_recurrent()) return true;
    return false;
  }
};

// Throws UsageError for sizes that do not fit together; what passes is safe to compute with.
void check(const DecoderSpec& spec);

// Of sizes that are not checked yet: larger than memory can be, and still far from overflow.
constexpr int64_t kMostSize = int64_t{1} << 60;

inline int64_t product(int64_t a, int64_t b) {
  int64_t result;
  return __builtin_mul_overflow(a, b, &result) || result > kMostSize ? kMostSize : result;
}

// Width of a token's raw queries, keys, values and gates (MLA: of the queries only).
inline int64_t qkv_rows(const AttentionSpec& a) {
  return product(a.heads, a.head_dim) + (a.own_keys() ? product(a.kv_heads, int64_t{a.head_dim} + a.value_dim) : 0) +
         (a.gated ? product(a.heads, a.value_dim) : 0);
}

// What the cache has of a layer: with latent attention the latent and the rotated part of keys, once for all heads.
inline AttentionShape cache_shape(const AttentionSpec& a) {
  if (a.mla) return {a.heads, 1, a.mla->kv_rank + a.mla->rope_dim, a.mla->kv_rank};
  return {a.heads, a.kv_heads, a.head_dim, a.value_dim};
}

// And of its indexer: keys without values.
inline AttentionShape cache_shape(const IndexerSpec& a) { return {a.heads, 1, a.head_dim, 0}; }

inline int64_t result_width(const LinearAttentionSpec& a) { return product(a.heads, a.value_dim); }
// Channels of queries, keys and values; the gate's rows follow them.
inline int64_t conv_channels(const LinearAttentionSpec& a) {
  return product(2, product(a.key_heads, a.key_dim)) + result_width(a);
}
inline int64_t in_rows(const LinearAttentionSpec& a) {
  return conv_channels(a) + (a.gate && a.gate_rank == 0 ? result_width(a) : 0);
}
// The inputs of steps, then those of strengths; where channels have decays of their own, the latents of these, inputs
// of strengths, and the latents of gates.
inline int64_t step_rows(const LinearAttentionSpec& a) {
  if (!a.slopes.empty()) return 0;
  if (a.decay_rank > 0) return int64_t{a.decay_rank} + a.heads + a.gate_rank;
  return product(a.strength == LinearAttentionSpec::Strength::sigmoid ? 2 : 1, a.heads);
}

inline int64_t channels_of(const GatedLruSpec& lru) { return product(lru.heads, lru.head_dim); }

// Of a token: the input of its steps, then b and c.
inline int64_t select_rows(const SelectiveScanSpec& scan) { return scan.step_rank + 2 * int64_t{scan.state_dim}; }

}  // namespace anyaccel::llm
