// SPDX-License-Identifier: Apache-2.0
// The recurrent mixers of a layer: from the normed residual to the delta.
#include <algorithm>
#include <cmath>

#include "llm/forward/step_thread.h"
#include "llm/kernels/mixers.h"

namespace anyaccel::llm {
namespace {

constexpr float kL2Eps = 1e-6f;
constexpr int64_t kChannelUnit = 16;

}  // namespace

// The channels that this thread takes through the convolution: in small steps those whose inputs it has computed
// itself, so that nobody waits.
Range StepThread::channels_of(const Shape& in, int64_t channels) const noexcept {
  Range own = rows_of(in);
  if (!small_) {
    const Range units = part_of((channels + kChannelUnit - 1) / kChannelUnit, thread_, threads_);
    own = {units.begin * kChannelUnit, units.end * kChannelUnit};
  }
  return {std::min(own.begin, channels), std::min(own.end, channels)};
}

void StepThread::convolve_own(size_t index, Convolution conv, float* x, int64_t stride, Range channels) noexcept {
  const LayerWeights& weights = weights_.layers[index];
  const int64_t count = channels.end - channels.begin, all = weights.conv_channels;
  conv.kernel = weights.kernel;
  conv.taps = weights.taps.data() + channels.begin;
  conv.tap_stride = all;
  conv.bias = weights.conv_bias == nullptr ? nullptr : weights.conv_bias + channels.begin;
  for (const Forward::Span& span : forward_.spans_) {
    const int64_t at = span.row * stride + channels.begin;
    Convolution here = conv;
    if (conv.in_gate != nullptr) here.in_gate = conv.in_gate + at;
    if (conv.out_gate != nullptr) here.out_gate = conv.out_gate + at;
    float* state = span.state + forward_.states_.layers[index].window + channels.begin;
    convolve(here, x + at, stride, span.tokens, count, state, all);
  }
}

void StepThread::short_conv(size_t index, int which) noexcept {
  const LayerWeights& weights = weights_.layers[index];
  const int64_t stride = padded_stride(forward_.widths_.mixed);
  const Input& in = input(weights.mix_in.w.shape(), x_, hidden_stride_, tokens_);
  float* const mixed = shared_.mixed.get();
  Convolution conv{};
  for (const int which : {0, 1}) multiply_into(weights.mix_gates[which], in, shared_.mix_gates[which].get(), stride);
  multiply_into(weights.mix_in, in, mixed, stride);
  conv.in_gate = shared_.mix_gates[0].get();
  conv.out_gate = shared_.mix_gates[1].get();
  if (!small_) barrier(Work::mix_in);
  convolve_own(index, conv, mixed, stride, channels_of(weights.mix_in.w.shape(), weights.conv_channels));
  barrier(Work::mix);
  fresh();
  multiply_into(weights.mix_out, input(weights.mix_out.w.shape(), mixed, stride, tokens_), delta(which),
                hidden_stride_);
}

// Queries and keys of some tokens of a head, ready to use, with their decays and strengths.
LinearHead StepThread::prepare_head(size_t index, int64_t head, int64_t row, int tokens) noexcept {
  const LinearAttentionSpec& spec = *spec_.layers[index].linear_attention;
  const LayerWeights& weights = weights_.layers[index];
  const int64_t stride = padded_stride(forward_.widths_.mixed), steps_stride = padded_stride(forward_.widths_.steps);
  const int64_t key_stride = padded_stride(forward_.widths_.key_dim);
  const int64_t keys = int64_t{spec.key_heads} * spec.key_dim;
  const int64_t key_head = spec.tiled ? head % spec.key_heads : head / (spec.heads / spec.key_heads);
  float* const q = own_.head_keys.get();
  float* const k = q + kHeadTokens * key_stride;
  float* const decay = k + kHeadTokens * key_stride;
  float* const strength = decay + kHeadTokens;
  float* const channels = strength + kHeadTokens;  // decays of each channel of the keys
  const float* const mixed = shared_.mixed.get() + row * stride;
  const bool steps = spec.slopes.empty();
  const float rate = steps ? std::exp(weights.rate[head]) : 0.0f;
  const float step_bias = steps && spec.decay_rank == 0 ? weights.step_bias[head] : 0.0f;
  const float constant = steps ? 1.0f : std::exp(-spec.slopes[static_cast<size_t>(head)]);
  for (int t = 0; t < tokens; ++t) {
    const float* from = mixed + t * stride + key_head * spec.key_dim;
    for (const bool key : {false, true}) {
      float* const to = (key ? k : q) + t * key_stride;
      const float factor = key ? 1.0f : spec.scale;
      const float* const raw = from + (key ? keys : 0);
      if (spec.l2_norm) {
        l2_norm(raw, spec.key_dim, kL2Eps, factor, to);
      } else {
        std::copy(raw, raw + spec.key_dim, to);
        if (factor != 1.0f) scale(to, factor, spec.key_dim);
      }
    }
    decay[t] = constant;
    strength[t] = 1.0f;
    if (!steps) continue;
    if (spec.decay_rank > 0) {
      const int64_t first = head * spec.key_dim;
      decays(shared_.mix_gates[1].get() + (row + t) * stride + first, weights.step_bias + first, rate, spec.key_dim,
             channels + t * key_stride);
      strength[t] =
          spec.strength_scale * sigmoid(shared_.steps.get()[(row + t) * steps_stride + spec.decay_rank + head]);
      continue;
    }
    const float* inputs = shared_.steps.get() + (row + t) * steps_stride + head;
    float step = std::max(softplus(inputs[0] + step_bias), spec.step_min);
    if (spec.step_max > 0) step = std::min(step, spec.step_max);
    decay[t] = std::exp(-rate * step);
    strength[t] =
        spec.strength == LinearAttentionSpec::Strength::step ? step : spec.strength_scale * sigmoid(inputs[spec.heads]);
  }
  LinearHead result{};
  result.key_dim = spec.key_dim;
  result.value_dim = spec.value_dim;
  result.delta = spec.delta;
  result.tokens = tokens;
  result.q = q;
  result.k = k;
  result.key_stride = key_stride;
  result.v = mixed + 2 * keys + head * spec.value_dim;
  result.value_stride = stride;
  result.decay = decay;
  result.decays = spec.decay_rank > 0 ? channels : nullptr;
  result.strength = strength;
  result.skip = weights.skip == nullptr ? 0.0f : weights.skip[head];
  result.out_stride = padded_stride(forward_.widths_.mixer_out);
  result.out = shared_.mixer_out.get() + row * result.out_stride + head * spec.value_dim;
  return result;
}

// Of the first token, with the stride of what the mixer makes of its input.
const float* StepThread::gates_of(const LinearAttentionSpec& spec) const noexcept {
  return spec.gate_rank > 0 ? shared_.mix_gates[0].get() : shared_.mixed.get() + conv_channels(spec);
}

// All heads of all sequences, every thread some of them; a head's gate too, and its norm where that is its own.
void StepThread::attend_heads(size_t index) noexcept {
  const LinearAttentionSpec& spec = *spec_.layers[index].linear_attention;
  const LayerWeights& weights = weights_.layers[index];
  const int64_t stride = padded_stride(forward_.widths_.mixed);
  const float* const gates = gates_of(spec);
  const auto& spans = forward_.spans_;
  const Range own = part_of(static_cast<int64_t>(spans.size()) * spec.heads, thread_, threads_);
  for (int64_t item = own.begin; item < own.end; ++item) {
    const Forward::Span& span = spans[static_cast<size_t>(item / spec.heads)];
    const int64_t head = item % spec.heads, first = head * spec.value_dim;
    float* const state = span.state + forward_.states_.layers[index].matrices + head * spec.key_dim * spec.value_dim;
    Norm of_head = weights.mix_norm;
    if (of_head.weight != nullptr && !spec.norm_shared) of_head.weight += first;
    for (int64_t done = 0; done < span.tokens; done += kHeadTokens) {
      const int tokens = static_cast<int>(std::min<int64_t>(kHeadTokens, span.tokens - done));
      LinearHead part = prepare_head(index, head, span.row + done, tokens);
      part.state = state;
      attend_linearly(part);
      for (int t = 0; t < tokens; ++t) {
        float* const out = part.out + t * part.out_stride;
        if (spec.norm_in_head()) norm(of_head, out, spec.value_dim, out);
        if (spec.gate && (!spec.norm_first || spec.norm_in_head()))
          gate_mixed(spec, gates + (span.row + done + t) * stride + first, out, spec.value_dim);
      }
    }
  }
}

void StepThread::gate_mixed(const LinearAttentionSpec& spec, const float* gates, float* out,
                            int64_t count) const noexcept {
  if (spec.gate_activation == LinearAttentionSpec::Gate::sigmoid)
    multiply_by_sigmoid(out, gates, count);
  else
    activate(Activation::silu, gates, out, count, out);
}

// The norm over several heads: in small steps every thread norms all tokens for itself.
const float* StepThread::norm_mixed(size_t index) noexcept {
  const LinearAttentionSpec& spec = *spec_.layers[index].linear_attention;
  const Norm& whole = weights_.layers[index].mix_norm;
  const int64_t stride = padded_stride(forward_.widths_.mixer_out), width = result_width(spec);
  float* const from = shared_.mixer_out.get();
  float* const to = small_ ? own_.mixer_out.get() : from;
  const bool across = spec.norm_width > width;  // other ranks have a part of it
  const bool gated = spec.gate && spec.norm_first;
  const int64_t mixed_stride = padded_stride(forward_.widths_.mixed);
  const float* const gates = gates_of(spec);
  if (across) {
    const Range part = part_of(tokens_, thread_, threads_);
    float* const sums = forward_.ranks_->slot(spec_.rank, turn_);
    for (int64_t t = part.begin; t < part.end; ++t) {
      double squares = 0;
      for (int64_t i = 0; i < width; ++i)
        squares += static_cast<double>(from[t * stride + i]) * static_cast<double>(from[t * stride + i]);
      sums[t] = static_cast<float>(squares);
    }
    exchange(Work::mix, {tokens_, 0});
  }
  for (int64_t t = mine_.begin; t < mine_.end; ++t) {
    const float* const x = from + t * stride;
    float* const y = to + t * stride;
    if (across) {
      double squares = 0;
      for (int rank = 0; rank < forward_.ranks_->size(); ++rank)
        squares += static_cast<double>(forward_.ranks_->slot(rank, pending_turn_)[t]);
      const double mean = squares / static_cast<double>(spec.norm_width);
      const auto factor = static_cast<float>(1.0 / std::sqrt(mean + static_cast<double>(whole.eps)));
      for (int64_t i = 0; i < width; ++i) y[i] = x[i] * factor * (whole.weight == nullptr ? 1.0f : whole.weight[i]);
      if (gated) gate_mixed(spec, gates + t * mixed_stride, y, width);
      continue;
    }
    for (int64_t first = 0; first < width; first += spec.norm_width) {
      Norm part = whole;
      if (part.weight != nullptr && !spec.norm_shared) part.weight += first;
      norm(part, x + first, spec.norm_width, y + first);
    }
    if (gated) gate_mixed(spec, gates + t * mixed_stride, y, width);
  }
  return to;
}

void StepThread::linear_attention(size_t index, int which) noexcept {
  const LinearAttentionSpec& spec = *spec_.layers[index].linear_attention;
  const LayerWeights& weights = weights_.layers[index];
  const int64_t stride = padded_stride(forward_.widths_.mixed);
  float* const mixed = shared_.mixed.get();
  const Shape& shape = weights.mix_in.w.shape();
  multiply_into(weights.mix_in, input(shape, x_, hidden_stride_, tokens_), mixed, stride);
  if (!weights.mix_steps.w.empty())
    multiply_into(weights.mix_steps, input(weights.mix_steps.w.shape(), x_, hidden_stride_, tokens_),
                  shared_.steps.get(), padded_stride(forward_.widths_.steps));
  if (spec.decay_rank > 0) {
    const int64_t steps_stride = padded_stride(forward_.widths_.steps);
    const float* const latents = shared_.steps.get();
    barrier(Work::mix_in);
    fresh();
    const Input& of_decays = input(weights.mix_step_up.w.shape(), latents, steps_stride, tokens_);
    multiply_into(weights.mix_step_up, of_decays, shared_.mix_gates[1].get(), stride);
    if (spec.gate_rank > 0) {
      fresh();
      const float* const of_gates = latents + spec.decay_rank + spec.heads;
      const Input& in = input(weights.mix_gate_up.w.shape(), of_gates, steps_stride, tokens_);
      multiply_into(weights.mix_gate_up, in, shared_.mix_gates[0].get(), stride);
    }
  }
  if (spec.silu) {
    if (!small_) barrier(Work::mix_in);
    const Range own = channels_of(shape, conv_channels(spec));
    for (int64_t t = 0; t < tokens_; ++t) {
      float* const at = mixed + t * stride + own.begin;
      activate(Activation::silu, at, nullptr, own.end - own.begin, at);
    }
  }
  if (spec.kernel > 0) {
    if (!small_) barrier(Work::mix_in);
    Convolution conv{};
    conv.silu = true;
    convolve_own(index, conv, mixed, stride, channels_of(shape, weights.conv_channels));
  }
  barrier(Work::mix_in);
  attend_heads(index);
  barrier(Work::mix);
  const float* result = shared_.mixer_out.get();
  if (spec.norm && !spec.norm_in_head()) result = norm_mixed(index);
  fresh();
  const int64_t result_stride = padded_stride(forward_.widths_.mixer_out);
  multiply_into(weights.mix_out, input(weights.mix_out.w.shape(), result, result_stride, tokens_), delta(which),
                hidden_stride_);
}

// The inputs of steps, b and c of all tokens, to mixer_out: sums of what ranks make of their channels, normed.
void StepThread::select(size_t index) noexcept {
  const SelectiveScanSpec& spec = *spec_.layers[index].scan;
  const LayerWeights& weights = weights_.layers[index];
  const int64_t stride = padded_stride(forward_.widths_.mixer_out), width = select_rows(spec);
  const bool divided = forward_.ranks_ != nullptr;
  float* const to = shared_.mixer_out.get();
  float* const own = divided ? forward_.ranks_->slot(spec_.rank, turn_) : to;
  const int64_t own_stride = divided ? hidden_stride_ : stride;
  const float* const mixed = shared_.mixed.get();
  fresh();
  multiply_into(weights.mix_select,
                input(weights.mix_select.w.shape(), mixed, padded_stride(forward_.widths_.mixed), tokens_), own,
                own_stride);
  exchange(Work::mix, {tokens_ * own_stride, 0});
  const Range part = part_of(tokens_, thread_, threads_);
  for (int64_t t = part.begin; t < part.end; ++t) {
    float* const row = to + t * stride;
    for (int rank = 0; divided && rank < forward_.ranks_->size(); ++rank) {
      const float* const from = forward_.ranks_->slot(rank, pending_turn_) + t * own_stride;
      if (rank == 0)
        std::copy(from, from + width, row);
      else
        add(row, from, 1.0f, width);
    }
    norm(weights.step_norm, row, spec.step_rank, row);
    norm(weights.b_norm, row + spec.step_rank, spec.state_dim, row + spec.step_rank);
    norm(weights.c_norm, row + spec.step_rank + spec.state_dim, spec.state_dim, row + spec.step_rank + spec.state_dim);
  }
  barrier(Work::mix);
}

void StepThread::selective_scan(size_t index, int which) noexcept {
  const SelectiveScanSpec& spec = *spec_.layers[index].scan;
  const LayerWeights& weights = weights_.layers[index];
  const int64_t stride = padded_stride(forward_.widths_.mixed), steps_stride = padded_stride(forward_.widths_.steps);
  const int64_t selected_stride = padded_stride(forward_.widths_.mixer_out);
  float* const mixed = shared_.mixed.get();
  const Input& in = input(weights.mix_in.w.shape(), x_, hidden_stride_, tokens_);
  multiply_into(weights.mix_gates[0], in, shared_.mix_gates[0].get(), stride);
  multiply_into(weights.mix_in, in, mixed, stride);
  if (!small_) barrier(Work::mix_in);
  Convolution conv{};
  conv.silu = true;
  convolve_own(index, conv, mixed, stride, channels_of(weights.mix_in.w.shape(), spec.channels));
  barrier(Work::mix);
  select(index);
  fresh();
  const Shape& up = weights.mix_step_up.w.shape();
  multiply_into(weights.mix_step_up, input(up, shared_.mixer_out.get(), selected_stride, tokens_), shared_.steps.get(),
                steps_stride);
  if (!small_) barrier(Work::mix_in);
  const Range channels = channels_of(up, spec.channels);
  for (const Forward::Span& span : forward_.spans_) {
    const float* const selected = shared_.mixer_out.get() + span.row * selected_stride + spec.step_rank;
    const int64_t at = span.row * stride + channels.begin;
    SelectiveScan scan{};
    scan.state_dim = spec.state_dim;
    scan.rates = weights.scan_rates.data() + channels.begin;
    scan.rate_stride = spec.channels;
    scan.skip = weights.skip + channels.begin;
    scan.steps = shared_.steps.get() + span.row * steps_stride + channels.begin;
    scan.steps_stride = steps_stride;
    scan.gates = shared_.mix_gates[0].get() + at;
    scan.b = selected;
    scan.c = selected + spec.state_dim;
    scan.key_stride = selected_stride;
    float* const state = span.state + forward_.states_.layers[index].matrices + channels.begin;
    anyaccel::llm::scan(scan, mixed + at, stride, span.tokens, channels.end - channels.begin, state, spec.channels);
  }
  barrier(Work::mix);
  fresh();
  multiply_into(weights.mix_out, input(weights.mix_out.w.shape(), mixed, stride, tokens_), delta(which),
                hidden_stride_);
}

void StepThread::gated_lru(size_t index, int which) noexcept {
  const GatedLruSpec& spec = *spec_.layers[index].lru;
  const LayerWeights& weights = weights_.layers[index];
  const int64_t stride = padded_stride(forward_.widths_.mixed), gates_stride = padded_stride(forward_.widths_.steps);
  const int64_t all = weights.conv_channels;
  float* const mixed = shared_.mixed.get();
  float* const gates = shared_.steps.get();
  const Input& in = input(weights.mix_in.w.shape(), x_, hidden_stride_, tokens_);
  multiply_into(weights.mix_gates[0], in, shared_.mix_gates[0].get(), stride);
  multiply_into(weights.mix_in, in, mixed, stride);
  if (!small_) barrier(Work::mix_in);
  convolve_own(index, {}, mixed, stride, channels_of(weights.mix_in.w.shape(), all));
  barrier(Work::mix);
  for (const int kind : {0, 1})
    multiply_heads(spec.heads, tokens_, mixed, stride, spec.head_dim, gates + kind * all, gates_stride, spec.head_dim,
                   [&](size_t head) -> const Matrix& {
                     return weights.head_gates[static_cast<size_t>(kind * spec.heads) + head].w;
                   });
  barrier(Work::mix_in);
  const Range units = part_of((all + kChannelUnit - 1) / kChannelUnit, thread_, threads_);
  const int64_t first = units.begin * kChannelUnit, count = std::min(units.end * kChannelUnit, all) - first;
  const float* const bias = weights.head_gates.front().bias + first;
  for (const Forward::Span& span : forward_.spans_) {
    const float* const own = gates + span.row * gates_stride + first;
    const int64_t at = span.row * stride + first;
    recur({weights.rate + first, own, own + all, gates_stride, bias, bias + all, span.opens}, mixed + at, stride,
          span.tokens, count, span.state + forward_.states_.layers[index].matrices + first);
  }
  for (int64_t t = 0; t < tokens_ && count > 0; ++t) {
    float* const x = mixed + t * stride + first;
    activate(spec.activation, shared_.mix_gates[0].get() + t * stride + first, x, count, x);
  }
  barrier(Work::mix);
  fresh();
  multiply_into(weights.mix_out, input(weights.mix_out.w.shape(), mixed, stride, tokens_), delta(which),
                hidden_stride_);
}

}  // namespace anyaccel::llm
