// SPDX-License-Identifier: Apache-2.0
#include "llm/decoder/workspace.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace anyaccel::llm {

Buffer::Buffer(int64_t count) {
  const size_t bytes = (static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(float) + 63) / 64 * 64;
  auto* memory = static_cast<float*>(std::aligned_alloc(64, bytes));
  if (memory == nullptr) throw std::bad_alloc();
  memory_.reset(memory);
}

void Buffer::Free::operator()(float* memory) const noexcept { std::free(memory); }

void Inputs::reserve(const std::vector<Shape>& shapes, int64_t tokens) {
  for (const Shape& shape : shapes) {
    auto slot = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) { return same(s.shape, shape); });
    if (slot == slots_.end()) {
      slots_.push_back({shape, Input()});
      slot = slots_.end() - 1;
    }
    slot->input.reserve(shape, tokens);
  }
}

void Routing::reserve(int64_t tokens, const MoeSpec& moe) {
  const auto grow = [](auto& values, int64_t count) {
    values.resize(std::max(values.size(), static_cast<size_t>(count)));
  };
  grow(chosen, tokens * moe.top_k);
  grow(weights, tokens * moe.top_k);
  grow(rows, tokens * moe.top_k);
  grow(row_weights, tokens * moe.top_k);
  grow(begin, moe.experts + 1);
  grow(scores, 2 * static_cast<int64_t>(moe.experts) + moe.groups);
}

Widths::Widths(const DecoderSpec& spec) : hidden(spec.hidden) {
  const auto most = [](int64_t& width, int64_t value) { width = std::max(width, value); };
  for (const LayerSpec& layer : spec.layers) {
    if (layer.attention) {
      const AttentionSpec& a = *layer.attention;
      most(qkv, qkv_rows(a));
      most(out, static_cast<int64_t>(a.heads) * a.value_dim);
      if (a.out_norm) most(normed, static_cast<int64_t>(a.heads) * a.value_dim);
      if (a.mla) {
        most(latent, std::max<int64_t>(a.mla->q_rank, a.mla->kv_rank + a.mla->rope_dim));
        most(keys, int64_t{a.mla->kv_rank} + a.mla->rope_dim);
        most(absorbed, a.heads * (int64_t{a.mla->kv_rank} + a.mla->rope_dim));
        most(latent_out, int64_t{a.heads} * a.mla->kv_rank);
        most(expanded, int64_t{a.head_dim} + a.value_dim);
      }
      if (a.indexer) {
        most(index_q, int64_t{a.indexer->heads} * a.indexer->head_dim);
        most(index_key, a.indexer->head_dim);
        most(index_weights, a.indexer->heads);
      }
    }
    if (layer.short_conv) {
      most(mixed, layer.short_conv->channels);
      two_gates = true;
    }
    if (layer.linear_attention) {
      const LinearAttentionSpec& a = *layer.linear_attention;
      most(mixed, in_rows(a));
      most(steps, step_rows(a));
      most(mixer_out, result_width(a));
      if (a.decay_rank > 0) most(mixed, std::max(result_width(a), int64_t{a.heads} * a.key_dim));
      two_gates = two_gates || a.decay_rank > 0;
      most(key_dim, a.key_dim);
      own_norm = own_norm || (a.norm && !a.norm_in_head());
    }
    if (layer.scan) {
      most(mixed, layer.scan->channels);
      most(steps, layer.scan->channels);
      most(mixer_out, select_rows(*layer.scan));
      two_gates = true;
    }
    if (layer.lru) {
      most(mixed, channels_of(*layer.lru));
      most(steps, 2 * channels_of(*layer.lru));
      two_gates = true;
    }
    const auto mlp = [&](const MlpSpec& m) {
      most(features, m.features);
      gated = gated || m.gated;
      if (m.norm) most(normed, m.features);
      cutoffs = cutoffs || m.cutoff;
    };
    if (layer.mlp) mlp(*layer.mlp);
    if (layer.moe) {
      mlp(layer.moe->expert);
      if (layer.moe->shared) mlp(*layer.moe->shared);
      most(router, layer.moe->experts + 1);
      top_k = std::max(top_k, layer.moe->top_k + 1);
      two_norms = two_norms || layer.moe->router_norm || layer.moe->experts_norm;
    }
    two_norms = two_norms || (layer.parallel && layer.mlp_norm.has_value());
    if (layer.input_gate) most(features, layer.input_gate->mlp.features);
    if (layer.laurel) most(laurel, layer.laurel->rank);
    if (layer.side_block) {
      side_blocks = true;
      most(fused, 2 * hidden);
    }
  }
  if (spec.layer_inputs) layer_inputs = spec.layer_inputs->layers * spec.layer_inputs->features;
  streams = spec.streams;
  if (spec.hidden_inputs) fused = hidden + spec.hidden_inputs->beside(hidden);
  if (spec.hidden_inputs) draft_vocab = spec.hidden_inputs->draft_vocab;
}

int64_t Widths::token_floats() const {
  return 4 * hidden + (two_norms ? hidden : 0) + qkv + 2 * latent + keys + index_q + index_key + index_weights + out +
         (gated ? 2 : 1) * features + router + (top_k > 0 ? hidden : 0) + layer_inputs + (two_gates ? 3 : 1) * mixed +
         steps + mixer_out + fused + draft_vocab + laurel +
         (streams > 1   ? 2 * streams - 1
          : laurel > 0  ? 1
          : side_blocks ? 2
                        : 0) *
             hidden;
}

void Workspace::reserve(const Widths& widths, const DecoderSpec& spec, const std::vector<Shape>& shapes, int64_t wanted,
                        int threads) {
  wanted = std::max<int64_t>(wanted, kGemvTokens);
  if (wanted <= tokens && own.size() == static_cast<size_t>(threads)) return;
  Workspace next;
  const auto rows = [](int64_t count, int64_t width) {
    return width > 0 ? Buffer(count * padded_stride(width)) : Buffer();
  };
  // Small steps keep all experts' features at once.
  const int64_t feature_rows = std::max<int64_t>(wanted, kGemvTokens * std::max(widths.top_k, 1));
  next.residual = rows(wanted, widths.hidden);
  next.x = rows(wanted, widths.hidden);
  if (widths.two_norms) next.second_x = rows(wanted, widths.hidden);
  next.qkv = rows(wanted, widths.qkv);
  next.latent = rows(wanted, widths.latent);
  next.second_latent = rows(wanted, widths.latent);
  next.keys = rows(wanted, widths.keys);
  next.index_q = rows(wanted, widths.index_q);
  next.index_key = rows(wanted, widths.index_key);
  next.index_weights = rows(wanted, widths.index_weights);
  next.absorbed = rows(kLatentTokens, widths.absorbed);
  next.latent_out = rows(kLatentTokens, widths.latent_out);
  next.latent_tile = rows(kLatentTile, widths.keys);
  next.out = rows(wanted, widths.out);
  next.mixed = rows(wanted, widths.mixed);
  if (widths.two_gates)
    for (Buffer& buffer : next.mix_gates) buffer = rows(wanted, widths.mixed);
  next.steps = rows(wanted, widths.steps);
  next.mixer_out = rows(wanted, widths.mixer_out);
  next.gate = rows(feature_rows, widths.features);
  if (widths.gated) next.up = rows(feature_rows, widths.features);
  next.router = rows(wanted, widths.router);
  if (widths.top_k > 0) next.expert_out = rows(wanted, widths.hidden);
  next.layer_inputs = rows(wanted, widths.layer_inputs);
  next.fused = rows(wanted, widths.fused);
  next.draft_logits = rows(wanted, widths.draft_vocab);
  if (widths.cutoffs) next.cutoffs = Buffer(wanted);
  const int64_t stream = padded_stride(widths.hidden);
  if (widths.streams > 1) next.streams = Buffer(wanted * widths.streams * stream);
  if (widths.streams > 1 || widths.laurel > 0 || widths.side_blocks)
    next.side = Buffer(wanted * std::max(widths.streams - 1, 1) * stream);
  if (widths.side_blocks) next.embedded = rows(wanted, widths.hidden);
  next.laurel = rows(wanted, widths.laurel);
  for (Buffer& buffer : next.delta) buffer = rows(wanted, widths.hidden);
  next.inputs.reserve(shapes, wanted);
  next.own.resize(static_cast<size_t>(threads));
  for (Own& one : next.own) {
    one.residual = rows(kGemvTokens, widths.hidden);
    one.x = rows(kGemvTokens, widths.hidden);
    if (widths.two_norms) one.second_x = rows(kGemvTokens, widths.hidden);
    one.heads = rows(kGemvTokens, widths.qkv);
    one.latent = rows(kGemvTokens, widths.latent);
    one.fused = rows(kGemvTokens, widths.fused);
    if (widths.side_blocks) one.embedded = rows(kGemvTokens, widths.hidden);
    if (widths.streams > 1) {
      one.streams = Buffer(kGemvTokens * widths.streams * stream);
      one.old_streams = Buffer(widths.streams * stream);
    }
    // With the rows' distance in the shared buffer, which may be that of a wider one.
    if (widths.normed > 0) one.normed = rows(kGemvTokens, std::max(widths.out, widths.features));
    one.expanded_rows = rows(kLatentTile, widths.expanded);
    one.row = rows(1, std::max({widths.hidden, widths.latent, widths.layer_inputs}));
    if (widths.key_dim > 0) one.head_keys = Buffer(kHeadTokens * head_scratch(widths.key_dim));
    if (widths.own_norm) one.mixer_out = rows(kGemvTokens, widths.mixer_out);
    one.inputs.reserve(shapes, kGemvTokens);
  }
  for (const LayerSpec& layer : spec.layers) {
    if (!layer.moe) continue;
    next.routing.reserve(wanted, *layer.moe);
    for (Own& one : next.own) {
      one.routing.reserve(wanted, *layer.moe);
      one.likely.reserve(kGemvTokens, *layer.moe);
      one.late.reserve(static_cast<size_t>(layer.moe->experts));
    }
  }
  next.tokens = wanted;
  *this = std::move(next);
}

}  // namespace anyaccel::llm
