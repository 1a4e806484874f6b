// SPDX-License-Identifier: Apache-2.0
// The attention of a layer: from the normed residual to the delta.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "llm/forward/step_thread.h"

namespace anyaccel::llm {
namespace {

// Up to so many floats every thread turns all heads for itself: less than what a barrier costs.
constexpr int64_t kPrivateFloats = 8192;

}  // namespace

float StepThread::growth_at(const AttentionSpec& spec, int64_t position) noexcept {
  const auto times = static_cast<float>((position + spec.growth_first) / spec.growth_from);
  return 1.0f + spec.growth * std::log1p(times);
}

void StepThread::project(const AttentionSpec& spec, const LayerWeights& weights) noexcept {
  const float* fused = small_ ? own_.fused.get() : shared_.fused.get();
  const float* x = spec.fused_input ? fused : x_;
  const int64_t stride = spec.fused_input ? padded_stride(forward_.widths_.fused) : hidden_stride_;
  const Input& in = input(weights.qkv.w.shape(), x, stride, tokens_);
  multiply_into(weights.qkv, in, shared_.qkv.get(), qkv_stride_);
  if (weights.v.w.empty()) return;
  const Input& in_of_values = input(weights.v.w.shape(), x, stride, tokens_);
  multiply_into(weights.v, in_of_values, shared_.qkv.get() + weights.qkv.w.shape().rows, qkv_stride_);
}

// One norm over all heads, which other ranks have a part of: sums of squares (and of values, for layer norms) first.
void StepThread::sums_of_squares(size_t index, const float* heads, int64_t stride, Range tokens) noexcept {
  const AttentionSpec& spec = *spec_.layers[index].attention;
  const int64_t q_count = static_cast<int64_t>(spec.heads) * spec.head_dim;
  const int64_t k_count = static_cast<int64_t>(spec.kv_heads) * spec.head_dim;
  float* out = forward_.ranks_->slot(spec_.rank, turn_);
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    const float* q = heads + t * stride;
    put_sums(q, q_count, 1.0, out + 2 * t * kSums);
    // Ranks with the same KV heads count as one.
    put_sums(q + q_count, k_count, 1.0 / spec.kv_copies, out + (2 * t + 1) * kSums);
  }
}

void StepThread::norm_queries_keys(size_t index, float* q, float* k, int64_t t) noexcept {
  const AttentionSpec& spec = *spec_.layers[index].attention;
  const LayerWeights& weights = weights_.layers[index];
  const int64_t q_count = static_cast<int64_t>(spec.heads) * spec.head_dim;
  const int64_t k_count = static_cast<int64_t>(spec.kv_heads) * spec.head_dim;
  if (!spec.qk_norm->across) {
    norm_heads(weights.q_norm, q, spec.heads, spec.head_dim, spec.qk_norm->own_weights);
    if (spec.own_keys()) norm_heads(weights.k_norm, k, spec.kv_heads, spec.head_dim, spec.qk_norm->own_weights);
    return;
  }
  if (forward_.ranks_ == nullptr) {
    norm(weights.q_norm, q, q_count, q);
    norm(weights.k_norm, k, k_count, k);
    return;
  }
  norm_of_ranks(weights.q_norm, 2 * t, q, q_count, q);
  norm_of_ranks(weights.k_norm, 2 * t + 1, k, k_count, k);
}

// Clips, norms and rotates heads: in place, every thread a part of the tokens, or all for itself when they are few.
void StepThread::rotate_standard(size_t index, AttentionStep& step) noexcept {
  const AttentionSpec& spec = *spec_.layers[index].attention;
  const int64_t q_count = static_cast<int64_t>(spec.heads) * spec.head_dim;
  const int kv_heads = spec.own_keys() ? spec.kv_heads : 0;
  const int64_t k_count = static_cast<int64_t>(kv_heads) * spec.head_dim;
  const int64_t v_count = static_cast<int64_t>(kv_heads) * spec.value_dim;
  step.q = shared_.qkv.get();
  step.k = spec.own_keys() ? step.q + q_count : nullptr;
  step.v = step.q + q_count + k_count;
  step.q_stride = step.k_stride = step.v_stride = qkv_stride_;
  const bool across = spec.qk_norm && spec.qk_norm->across && forward_.ranks_ != nullptr;
  if (spec.rope < 0 && !spec.qk_norm && spec.clip <= 0 && spec.growth == 0 && !spec.value_norm) return;
  const bool alone = small_ && tokens_ * (q_count + k_count) <= kPrivateFloats && !across && threads_ > 1;
  const Range tokens = alone ? Range{0, tokens_} : part_of(tokens_, thread_, threads_);
  float* heads = alone ? own_.heads.get() : shared_.qkv.get();
  const RopeSpec* rope_spec = spec.rope < 0 ? nullptr : &spec_.ropes[static_cast<size_t>(spec.rope)];
  if (alone) {
    // Values are copied only when they change.
    const bool changed = spec.clip > 0 || spec.value_norm;
    const int64_t copied = q_count + k_count + (changed ? v_count : 0);
    for (int64_t t = 0; t < tokens_; ++t)
      std::memcpy(heads + t * qkv_stride_, shared_.qkv.get() + t * qkv_stride_,
                  static_cast<size_t>(copied) * sizeof(float));
    step.q = heads;
    if (spec.own_keys()) step.k = heads + q_count;
    if (changed) step.v = heads + q_count + k_count;
  }
  if (spec.clip > 0)
    for (int64_t t = tokens.begin; t < tokens.end; ++t)
      clamp(heads + t * qkv_stride_, spec.clip, q_count + k_count + v_count);
  const auto rotate_token = [&](int64_t t) {
    if (rope_spec == nullptr) return;
    const Rotation& rotation = forward_.rotations_[static_cast<size_t>(spec.rope)][static_cast<size_t>(t)];
    rope(heads + t * qkv_stride_ + rope_spec->first, spec.heads + kv_heads, spec.head_dim, rotation.cosine,
         rotation.sine, static_cast<int>(rope_spec->inv_freq.size()), rope_spec->interleaved);
  };
  const bool after = spec.qk_norm && spec.qk_norm->after_rope;
  if (after)
    for (int64_t t = tokens.begin; t < tokens.end; ++t) rotate_token(t);
  if (across) {
    sums_of_squares(index, heads, qkv_stride_, tokens);
    exchange(Work::heads, {2 * kSums * tokens_, 0});
  }
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    float* q = heads + t * qkv_stride_;
    if (spec.qk_norm) norm_queries_keys(index, q, q + q_count, t);
    if (spec.value_norm)
      norm_heads(weights_.layers[index].v_norm, q + q_count + k_count, kv_heads, spec.value_dim, false);
    if (!after) rotate_token(t);
    if (spec.growth != 0) scale(q, growth_at(spec, forward_.positions_[static_cast<size_t>(t)]), q_count);
  }
  if (alone)
    mark(Work::heads);
  else
    barrier(Work::heads);
}

void StepThread::attend_standard(size_t index, AttentionStep& step) noexcept {
  rotate_standard(index, step);
  if (needs_append(step)) {
    append(step, thread_, threads_);
    barrier(Work::append);
  }
  attend(step, forward_.scratch_, thread_, threads_);
  barrier(Work::attend);
  if (!needs_combine(step, threads_)) return;
  combine(step, forward_.scratch_, thread_, threads_);
  barrier(Work::attend);
}

// The gates are behind the values, in the product that has them all.
void StepThread::gate_attention(size_t index) noexcept {
  const AttentionSpec& spec = *spec_.layers[index].attention;
  const int64_t count = static_cast<int64_t>(spec.heads) * spec.value_dim, stride = padded_stride(forward_.widths_.out);
  const float* gates = shared_.qkv.get() + qkv_rows(spec) - count;
  const Range tokens = part_of(tokens_, thread_, threads_);
  for (int64_t t = tokens.begin; t < tokens.end; ++t)
    multiply_by_sigmoid(shared_.out.get() + t * stride, gates + t * qkv_stride_, count);
  barrier(Work::attend);
}

void StepThread::attention(size_t index) noexcept {
  const LayerSpec& layer = spec_.layers[index];
  const AttentionSpec& spec = *layer.attention;
  const LayerWeights& weights = weights_.layers[index];
  const float* mlp_x = x_;
  if (layer.parallel && layer.mlp_norm) {
    float* second = small_ ? own_.second_x.get() : shared_.second_x.get();
    for (int64_t t = mine_.begin; t < mine_.end; ++t)
      norm(weights.mlp_norm, residual_ + t * hidden_stride_, spec_.hidden, second + t * hidden_stride_);
    mlp_x = second;
  }
  if (layer.parallel && layer.mlp) {
    // First, while x is what the inputs are of: after the latents of MLA it is not.
    if (mlp_x != x_) fresh();
    const Input& in = input(weights.mlp.gate.w.shape(), mlp_x, hidden_stride_, tokens_);
    gate_up(weights.mlp, &in, tokens_, shared_.gate.get(), shared_.up.get());
    if (mlp_x != x_) fresh();
  }
  if (spec.mla)
    project_latent(spec, weights);
  else
    project(spec, weights);
  barrier(Work::qkv);
  if (layer.parallel && layer.mlp && !small_) activate_own(weights.mlp, tokens_, shared_.gate.get(), shared_.up.get());

  AttentionStep step{};
  step.cache = &forward_.cache_;
  step.layer = forward_.cache_layers_[index];
  step.options = AttentionOptions{
      spec.scale,    spec.softcap,      spec.window, spec.chunk, spec.alibi.empty() ? nullptr : spec.alibi.data(),
      weights.sinks, spec.bidirectional};
  if (spec_.relative_bias) {
    const int64_t length = forward_.distances_length_;
    step.options.bias = forward_.distances_.data() + length;
    step.options.bias_head = 2 * length + kPageTokens;
  }
  DistanceScores distances{};
  if (spec_.distances) {
    distances = forward_.distance_terms_[index].scores();
    distances.rows = forward_.distance_rows_.data();
    distances.max_distance = spec_.distances->max_distance;
    step.options.distances = &distances;
  }
  step.queries = &step_.queries;
  step.out = shared_.out.get();
  step.out_stride = padded_stride(forward_.widths_.out);
  if (spec.mla)
    attend_latent(index, step);
  else
    attend_standard(index, step);
  if (spec.gated) gate_attention(index);
  const float* seen = step.out;
  if (spec.out_norm)
    seen = norm_rows(weights.out_norm, step.out, step.out_stride, int64_t{spec.heads} * spec.value_dim);
  fresh();
  const Input& in = input(weights.o.w.shape(), seen, step.out_stride, tokens_);
  multiply_into(weights.o, in, delta(0), hidden_stride_);
  if (layer.parallel) {
    mark(Work::out);
    if (layer.moe) {
      fresh();
      experts(index, delta(1));
    } else {
      mlp(weights.mlp, 1, true);
    }
  }
}

}  // namespace anyaccel::llm
