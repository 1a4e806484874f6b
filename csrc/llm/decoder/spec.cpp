// SPDX-License-Identifier: Apache-2.0
#include "llm/decoder/spec.h"

#include <cmath>

#include "llm/errors.h"
#include "llm/kernels/mixers.h"

namespace anyaccel::llm {
namespace {

constexpr int64_t kMost = int64_t{1} << 24;  // of any width or count: products of two stay far from overflow

[[noreturn]] void fail(const std::string& where, const std::string& what) {
  throw UsageError("decoder spec: " + where + what);
}

void in_range(const std::string& where, const char* name, int64_t value, int64_t least, int64_t most = kMost) {
  if (value < least || value > most)
    fail(where, std::string(name) + " is " + std::to_string(value) + ", must be " + std::to_string(least) + " to " +
                    std::to_string(most));
}

// The tokens that a layer has chosen are kept as long as its run: a layer without an indexer of its own is in the same
// stage as the one before it that has one.
void check_indexer(const std::string& where, const AttentionSpec& a, const DecoderSpec& spec) {
  const IndexerSpec& indexer = *a.indexer;
  if (!a.mla || a.mla->q_rank < 1 || a.window > 0 || a.chunk > 0)
    fail(where, "an indexer goes with mla that has a latent of queries, and with neither window nor chunk");
  in_range(where, "indexer.top_k", indexer.top_k, 1, INT32_MAX);
  in_range(where, "indexer.heads", indexer.heads, 1, 1 << 16);
  in_range(where, "indexer.head_dim", indexer.head_dim, 1, 4096);
  in_range(where, "indexer.rope", indexer.rope, -1, static_cast<int64_t>(spec.ropes.size()) - 1);
  if (indexer.rope >= 0) {
    const RopeSpec& rope = spec.ropes[static_cast<size_t>(indexer.rope)];
    if (rope.first < 0 || rope.first + 2 * static_cast<int64_t>(rope.inv_freq.size()) > indexer.head_dim)
      fail(where, "the indexer's rope rotates more than its heads have");
  }
  if (indexer.own) return;
  for (const LayerSpec& layer : spec.layers) {
    if (layer.attention && &*layer.attention == &a) break;
    if (layer.attention && layer.attention->indexer && layer.attention->indexer->own) return;
  }
  fail(where, "no layer before it has an indexer");
}

void check_attention(const std::string& where, const AttentionSpec& a, const DecoderSpec& spec, bool of_side_block) {
  in_range(where, "heads", a.heads, 1, 1 << 16);
  in_range(where, "kv_heads", a.kv_heads, 1, a.heads);
  in_range(where, "kv_copies", a.kv_copies, 1, spec.size);
  in_range(where, "head_dim", a.head_dim, 1, 1 << 14);
  in_range(where, "value_dim", a.value_dim, 1, 1 << 14);
  if (a.heads % a.kv_heads != 0)
    fail(where, std::to_string(a.heads) + " heads are not a multiple of " + std::to_string(a.kv_heads) + " kv_heads");
  in_range(where, "rope", a.rope, -1, static_cast<int64_t>(spec.ropes.size()) - 1);
  in_range(where, "window", a.window, 0, INT32_MAX);
  in_range(where, "chunk", a.chunk, 0, INT32_MAX);
  in_range(where, "growth_from", a.growth_from, a.growth == 0 ? 0 : 1, INT32_MAX);
  in_range(where, "growth_first", a.growth_first, 0, INT32_MAX);
  if (a.rope >= 0) {
    const RopeSpec& rope = spec.ropes[static_cast<size_t>(a.rope)];
    const int64_t rotated = 2 * static_cast<int64_t>(rope.inv_freq.size());
    if (rope.first < 0 || rope.first + rotated > a.head_dim)
      fail(where, "rope rotates " + std::to_string(rotated) + " values from " + std::to_string(rope.first) +
                      " on, of heads of " + std::to_string(a.head_dim));
  }
  if (!a.alibi.empty() && a.alibi.size() != static_cast<size_t>(a.heads))
    fail(where, std::to_string(a.alibi.size()) + " alibi slopes for " + std::to_string(a.heads) + " heads");
  if (!a.own_keys()) {
    // The cache's places are this stage's, and other ranks' keys are not summed up here.
    in_range(where, "kv_layer", a.kv_layer, spec.first_layer,
             spec.first_layer + static_cast<int64_t>(spec.layers.size()) - 1);
    const std::optional<AttentionSpec>& of = spec.layers[static_cast<size_t>(a.kv_layer - spec.first_layer)].attention;
    if (!of || !of->own_keys() || &*of >= &a || of->kv_heads != a.kv_heads || of->head_dim != a.head_dim ||
        of->value_dim != a.value_dim)
      fail(where, "kv_layer " + std::to_string(a.kv_layer) + " is not an earlier layer with such keys and values");
    if (a.mla || a.clip > 0 || a.value_norm || (a.qk_norm && (a.qk_norm->across || a.qk_norm->after_rope)))
      fail(where, "kv_layer does not go with mla, clip, value_norm and such a qk_norm");
  }
  if (a.mla && a.value_norm) fail(where, "mla has no value_norm");
  if (a.mla) {
    in_range(where, "mla.q_rank", a.mla->q_rank, 0);
    in_range(where, "mla.kv_rank", a.mla->kv_rank, 1);
    in_range(where, "mla.nope_dim", a.mla->nope_dim, 1, a.head_dim);
    in_range(where, "mla.rope_dim", a.mla->rope_dim, 0, a.head_dim);
    if (a.mla->nope_dim + a.mla->rope_dim != a.head_dim || a.kv_heads != a.heads)
      fail(where, "mla needs head_dim = nope_dim + rope_dim and as many kv_heads as heads");
    if (a.qk_norm || a.gated) fail(where, "mla has no qk_norm and no gate");
  }
  if (a.indexer) check_indexer(where, a, spec);
  if (a.fused_input && a.mla) fail(where, "mla reads one input");
  if (a.fused_input && !of_side_block &&
      (!spec.hidden_inputs || spec.hidden_inputs->fused || &a != &*spec.layers[0].attention))
    fail(where, "only the first layer's attention reads hidden_inputs, where they are not fused");
}

void check_short_conv(const std::string& where, const ShortConvSpec& conv) {
  in_range(where, "channels", conv.channels, 1);
  in_range(where, "kernel", conv.kernel, 1, kMostTaps);
}

void check_linear_attention(const std::string& where, const LinearAttentionSpec& a, const DecoderSpec& spec) {
  in_range(where, "heads", a.heads, 1, 1 << 16);
  in_range(where, "key_heads", a.key_heads, 1, a.heads);
  in_range(where, "key_copies", a.key_copies, 1, spec.size);
  in_range(where, "key_dim", a.key_dim, 1, 1 << 14);
  in_range(where, "value_dim", a.value_dim, 1, 1 << 14);
  in_range(where, "kernel", a.kernel, 0, kMostTaps);
  if (a.heads % a.key_heads != 0)
    fail(where, std::to_string(a.heads) + " heads are not a multiple of " + std::to_string(a.key_heads) + " key_heads");
  if (!a.slopes.empty() && a.slopes.size() != static_cast<size_t>(a.heads))
    fail(where, std::to_string(a.slopes.size()) + " slopes for " + std::to_string(a.heads) + " heads");
  in_range(where, "decay_rank", a.decay_rank, 0, 1 << 14);
  in_range(where, "gate_rank", a.gate_rank, 0, a.decay_rank > 0 && a.gate ? 1 << 14 : 0);
  if (a.decay_rank > 0 &&
      (!a.slopes.empty() || a.strength != LinearAttentionSpec::Strength::sigmoid || a.step_min > 0 || a.step_max > 0))
    fail(where, "decay_rank goes with strengths of their own, without slopes and limits of steps");
  if (a.silu && a.kernel > 0) fail(where, "silu is of a mixer without a convolution");
  if (!a.norm) return;
  in_range(where, "norm_width", a.norm_width, 1);
  const int64_t own = result_width(a);
  if (own % a.norm_width != 0 && (spec.size == 1 || own > a.norm_width))
    fail(where, "norm_width " + std::to_string(a.norm_width) + " does not divide " + std::to_string(own) + " values");
  if (a.norm->kind != NormKind::rms || a.norm->bias) fail(where, "the norm is an RMS norm without bias");
}

void check_scan(const std::string& where, const SelectiveScanSpec& scan, const DecoderSpec& spec) {
  in_range(where, "channels", scan.channels, 1);
  in_range(where, "state_dim", scan.state_dim, 1, 1 << 10);
  in_range(where, "kernel", scan.kernel, 1, kMostTaps);
  in_range(where, "step_rank", scan.step_rank, 1, 1 << 20);
  if (scan.norm && (scan.norm->kind != NormKind::rms || scan.norm->bias))
    fail(where, "the norm is an RMS norm without bias");
  if (spec.size > 1 && select_rows(scan) > spec.hidden)
    fail(where, "ranks have no room for the sums of " + std::to_string(select_rows(scan)) + " values");
}

void check_lru(const std::string& where, const GatedLruSpec& lru) {
  in_range(where, "heads", lru.heads, 1, 1 << 16);
  in_range(where, "head_dim", lru.head_dim, 1, 1 << 14);
  in_range(where, "kernel", lru.kernel, 1, kMostTaps);
}

void check_mlp(const std::string& where, const MlpSpec& mlp) {
  in_range(where, "features", mlp.features, 1);
  if (mlp.activation == Activation::xielu && mlp.gated) fail(where, "xielu is of an mlp without gates");
  if (mlp.cutoff && !mlp.gated) fail(where, "cutoff is of gates");
}

// One of experts, or beside them, or of input_gate.
void check_simple_mlp(const std::string& where, const MlpSpec& mlp) {
  check_mlp(where, mlp);
  if (mlp.norm || mlp.cutoff || mlp.activation == Activation::xielu)
    fail(where, "norm, cutoff and xielu are of a layer's only mlp");
}

void check_layer(const std::string& where, const LayerSpec& layer, const DecoderSpec& spec) {
  if (layer.attention) check_attention(where, *layer.attention, spec, layer.side_block.has_value());
  if (layer.short_conv) check_short_conv(where, *layer.short_conv);
  if (layer.linear_attention) check_linear_attention(where, *layer.linear_attention, spec);
  if (layer.scan) check_scan(where, *layer.scan, spec);
  if (layer.lru) check_lru(where, *layer.lru);
  if (spec.size > 1 && layer.is_recurrent() && layer.attention &&
      (layer.attention->out_norm || (layer.attention->qk_norm && layer.attention->qk_norm->across)))
    fail(where, "beside a recurrent mixer, ranks have no norm over all heads");
  if (layer.mlp && layer.moe) fail(where, "has an mlp and a moe");
  if (!layer.attention && !layer.is_recurrent() && !layer.has_mlp()) fail(where, "has neither a mixer nor an mlp");
  if (layer.mlp) check_mlp(where, *layer.mlp);
  if (layer.moe) {
    const MoeSpec& moe = *layer.moe;
    in_range(where, "experts", moe.experts, 1, 1 << 16);
    in_range(where, "top_k", moe.top_k, 1, moe.experts);
    in_range(where, "groups", moe.groups, 1, moe.experts);
    in_range(where, "top_groups", moe.top_groups, 1, moe.groups);
    if (moe.experts % moe.groups != 0) fail(where, "experts are not a multiple of groups");
    if (moe.experts / moe.groups * moe.top_groups < moe.top_k) fail(where, "top_groups have fewer than top_k experts");
    check_simple_mlp(where, moe.expert);
    if (moe.shared) check_simple_mlp(where, *moe.shared);
    if (moe.shared_gate && !moe.shared) fail(where, "shared_gate without shared");
    if (moe.post_norm.has_value() != moe.shared_post_norm.has_value() || (moe.post_norm && !moe.shared))
      fail(where, "post_norm and shared_post_norm need each other, and a shared mlp");
    if (layer.parallel && (moe.post_norm || moe.router_norm || moe.experts_norm))
      fail(where, "parallel layers with experts have one norm");
    if (moe.expert_scale && moe.scoring == MoeSpec::Scoring::sparsemixer) fail(where, "expert_scale with sparsemixer");
    if (moe.scale_input && moe.expert.bias) fail(where, "scale_input with experts that have biases");
  }
  if (layer.parallel && (layer.attn_post_norm || layer.mlp_post_norm || layer.residual_from_norm))
    fail(where, "parallel layers have no post norms and no residual_from_norm");
  if (layer.parallel && layer.mlp && (layer.mlp->norm || layer.mlp->cutoff))
    fail(where, "parallel layers have no norm and no cutoff in their mlp");
  if (layer.input_gate) check_simple_mlp(where, layer.input_gate->mlp);
  if (layer.laurel) {
    in_range(where, "laurel.rank", layer.laurel->rank, 1);
    if (layer.parallel || layer.residual_from_norm || !layer.attention || layer.is_recurrent())
      fail(where, "laurel is beside attention alone, in a layer that is not parallel");
  }
  if (layer.side_block) {
    in_range(where, "side_block.layer", layer.side_block->layer, 0, 1 << 16);
    if (!layer.attention || !layer.attention->fused_input || !layer.is_recurrent() || !layer.mlp || layer.streams ||
        layer.input_gate || layer.residual_from_norm)
      fail(where, "side_block needs attention with fused_input, an mlp and a recurrent mixer, and nothing else");
    if (spec.stages > 1 || spec.hidden_inputs)
      fail(where, "side_block needs the embedding, which one of several stages has");
  }
  const int streams = layer.streams ? layer.streams->count : 1;
  if (streams != spec.streams || (layer.streams && streams < 2))
    fail(where, "streams are " + std::to_string(streams) + ", the decoder's are " + std::to_string(spec.streams));
  if (layer.streams && layer.residual_from_norm) fail(where, "streams and residual_from_norm");
  if (layer.input_gate && (!spec.layer_inputs || spec.layer_inputs->features != layer.input_gate->mlp.features))
    fail(where, "input_gate without layer_inputs of as many features");
  if (layer.parallel && layer.moe && layer.mlp_norm) fail(where, "parallel layers with experts have one norm");
  if (layer.parallel && (!layer.attention || layer.is_recurrent() || !layer.has_mlp()))
    fail(where, "parallel layers have attention and an mlp");
  if (layer.residual_from_norm && (!(layer.attention || layer.is_recurrent()) || !layer.has_mlp()))
    fail(where, "residual_from_norm needs a mixer and an mlp");
}

// What tokens see each other by is for whole sequences, whose keys and values all layers have in one place.
void check_encoder(const DecoderSpec& spec) {
  const bool encoder = spec.is_encoder();
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const std::string where = "layer " + std::to_string(i) + ": ";
    const LayerSpec& layer = spec.layers[i];
    if ((layer.attention && layer.attention->bidirectional) != encoder)
      fail(where, "all layers are bidirectional, or none");
    if (!encoder) continue;
    const AttentionSpec& a = *layer.attention;
    const AttentionSpec& first = *spec.layers.front().attention;
    if (a.heads != first.heads || a.kv_heads != first.kv_heads || a.head_dim != first.head_dim ||
        a.value_dim != first.value_dim)
      fail(where, "bidirectional layers have the same heads");
    if (!a.own_keys() || a.mla || a.chunk > 0 || layer.is_recurrent())
      fail(where, "bidirectional attention goes with neither kv_layer, mla, chunk nor a recurrent mixer");
  }
  if (encoder && (spec.size > 1 || spec.stages > 1)) fail("", "bidirectional attention is for one rank");
  if (!encoder && (spec.token_types > 0 || spec.relative_bias || spec.distances))
    fail("", "token_types, relative_bias and distances are of bidirectional attention");
  if (spec.distances) {
    const DistancesSpec& distances = *spec.distances;
    in_range("", "distances.span", distances.span, 2, 1 << 16);
    const int least = distances.logarithmic ? distances.span / 2 + 2 : 1;
    in_range("", "distances.max_distance", distances.max_distance, least, 1 << 20);
    for (const LayerSpec& layer : spec.layers) {
      const AttentionSpec& a = *layer.attention;
      if (a.heads != a.kv_heads || a.rope >= 0 || a.qk_norm || a.clip > 0 || a.growth != 0)
        fail("", "distances go with as many KV heads, and queries and keys that nothing changes");
    }
  }
  if (!spec.relative_bias) return;
  in_range("", "relative_bias.buckets", spec.relative_bias->buckets, 4, 1 << 16);
  in_range("", "relative_bias.max_distance", spec.relative_bias->max_distance, spec.relative_bias->buckets / 4 + 1);
  if (spec.relative_bias->heads != spec.layers.front().attention->heads)
    fail("", "relative_bias is of " + std::to_string(spec.relative_bias->heads) + " heads, the layers have others");
}

// A head that drafts: one rank's or stage's embedding and head are another model's, whose hidden states it reads.
void check_hidden_inputs(const DecoderSpec& spec) {
  const HiddenInputsSpec& inputs = *spec.hidden_inputs;
  in_range("", "hidden_inputs.width", inputs.width, 1);
  in_range("", "hidden_inputs.taps", static_cast<int64_t>(inputs.taps.size()), 1, 1 << 8);
  for (const int tap : inputs.taps) in_range("", "hidden_inputs.taps", tap, -1, 1 << 16);
  in_range("", "hidden_inputs.draft_vocab", inputs.draft_vocab, 0, spec.vocab);
  const AttentionSpec* first = spec.layers.front().attention ? &*spec.layers.front().attention : nullptr;
  if (!inputs.fused && (inputs.beside(spec.hidden) != spec.hidden || first == nullptr || !first->fused_input))
    fail("", "hidden_inputs that are not fused are of the hidden width, and the first layer's attention reads them");
  in_range("", "hidden_inputs.own_tap", inputs.own_tap, -1, static_cast<int64_t>(spec.layers.size()));
  if (spec.stages > 1 || spec.positions > 0 || spec.layer_inputs || spec.is_recurrent() || spec.is_encoder() ||
      spec.tied || spec.head_bias)
    fail("", "hidden_inputs are of one stage with attention, rotary positions, and the head of another model");
}

}  // namespace

void check(const DecoderSpec& spec) {
  in_range("", "vocab", spec.vocab, 1, INT32_MAX);
  in_range("", "hidden", spec.hidden, 1);
  in_range("", "layers", static_cast<int64_t>(spec.layers.size()), 1, 1 << 16);
  in_range("", "positions", spec.positions, 0, INT32_MAX);
  in_range("", "position_offset", spec.position_offset, 0, INT32_MAX);
  in_range("", "max_tokens", spec.max_tokens, 0, INT32_MAX);
  in_range("", "size", spec.size, 1, 1024);
  in_range("", "rank", spec.rank, 0, spec.size - 1);
  in_range("", "stages", spec.stages, 1, 1024);
  in_range("", "stage", spec.stage, 0, spec.stages - 1);
  in_range("", "first_layer", spec.first_layer, spec.stage, spec.is_first_stage() ? 0 : 1 << 16);
  if (spec.vocab_count < 0 || spec.vocab_first < 0 || spec.vocab_first + spec.vocab_count > spec.vocab)
    fail("", "rows " + std::to_string(spec.vocab_first) + " + " + std::to_string(spec.vocab_count) +
                 " of a vocabulary of " + std::to_string(spec.vocab));
  if (spec.size == 1 && spec.own_vocab() != spec.vocab) fail("", "one rank has the whole vocabulary");
  if (spec.positions > 0 && (spec.max_tokens == 0 || spec.max_tokens + spec.position_offset > spec.positions))
    fail("",
         "max_tokens is " + std::to_string(spec.max_tokens) + " with " + std::to_string(spec.positions) + " positions");
  if (spec.layer_inputs) {
    const LayerInputsSpec& inputs = *spec.layer_inputs;
    in_range("", "layer_inputs.layers", inputs.layers, static_cast<int64_t>(spec.layers.size()), 1 << 16);
    in_range("", "layer_inputs.features", inputs.features, 1, 1 << 16);
    in_range("", "layer_inputs.vocab", inputs.vocab, 1, INT32_MAX);
    if (spec.stages > 1) fail("", "layer_inputs need the embedding, which one of several stages has");
  }
  in_range("", "token_types", spec.token_types, 0, 1 << 16);
  in_range("", "streams", spec.streams, 1, 16);
  if (spec.streams > 1 && (spec.stages > 1 || spec.hidden_inputs || spec.is_encoder()))
    fail("", "streams are of one stage, and not of encoders and heads that draft");
  check_encoder(spec);
  if (spec.hidden_inputs) check_hidden_inputs(spec);
  for (const RopeSpec& rope : spec.ropes) {
    in_range("", "inv_freq", static_cast<int64_t>(rope.inv_freq.size()), 1, 1 << 13);
    if (!rope.long_inv_freq.empty() && rope.long_inv_freq.size() != rope.inv_freq.size())
      fail("", "long_inv_freq and inv_freq have different sizes");
  }
  const AttentionSpec* latent = nullptr;
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const std::string where = "layer " + std::to_string(i) + ": ";
    check_layer(where, spec.layers[i], spec);
    if (!spec.layers[i].attention || !spec.layers[i].attention->mla) continue;
    const AttentionSpec& a = *spec.layers[i].attention;
    if (latent == nullptr) latent = &a;
    if (a.heads != latent->heads || a.head_dim != latent->head_dim || a.value_dim != latent->value_dim)
      fail(where, "mla has other heads than a layer before");
    if (a.indexer.has_value() != latent->indexer.has_value() ||
        (a.indexer && a.indexer->top_k != latent->indexer->top_k))
      fail(where, "all layers with mla have an indexer of one top_k, or none of them has one");
  }
}

}  // namespace anyaccel::llm
