// SPDX-License-Identifier: Apache-2.0
// The MLP of a layer, dense or of experts: from the normed residual to the delta.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "llm/forward/step_thread.h"

namespace anyaccel::llm {

// In small steps the activation follows at once, without a barrier: of gate and up, each thread has the same rows.
void StepThread::gate_up(const MlpWeights& mlp, const Input* input, int64_t tokens, float* gate, float* up,
                         const float* scales) noexcept {
  multiply_into(mlp.gate, *input, gate, features_stride_);
  if (!mlp.up.w.empty()) multiply_into(mlp.up, *input, up, features_stride_);
  if (mlp.cutoff) cut_gates(mlp, gate);
  if (!small_) return;
  mark(Work::gate_up);
  const Range own = rows_of(mlp.gate.w.shape());
  for (int64_t t = 0; t < tokens; ++t) activate_row(mlp, gate, up, t, own, scales);
  mark(Work::activate);
}

void StepThread::activate_own(const MlpWeights& mlp, int64_t tokens, float* gate, float* up,
                              const float* scales) noexcept {
  const Range own = part_of(tokens, thread_, threads_);
  for (int64_t t = own.begin; t < own.end; ++t) activate_row(mlp, gate, up, t, {0, mlp.gate.w.shape().rows}, scales);
  mark(Work::activate);
}

// The features `part` of row t, in the place of the gate.
void StepThread::activate_row(const MlpWeights& mlp, float* gate, float* up, int64_t t, Range part,
                              const float* scales) const noexcept {
  float* at = gate + t * features_stride_ + part.begin;
  float* other = mlp.up.w.empty() ? nullptr : up + t * features_stride_ + part.begin;
  const int64_t count = part.end - part.begin;
  if (scales != nullptr) {
    scale(at, scales[t], count);
    if (other != nullptr) scale(other, scales[t], count);
  }
  if (mlp.values != nullptr)
    xielu(XieluValues{mlp.values[0], mlp.values[1], mlp.values[2], mlp.values[3]}, at, count);
  else
    activate(mlp.activation, at, other, count, at);
}

float StepThread::cutoff_of_ranks(const MlpWeights& mlp, int64_t t) const noexcept {
  double sum = 0, squares = 0, total = 0;
  for (int rank = 0; rank < forward_.ranks_->size(); ++rank) {
    const float* from = forward_.ranks_->slot(rank, pending_turn_) + t * kSums;
    sum += static_cast<double>(from[0]);
    squares += static_cast<double>(from[1]);
    total += static_cast<double>(from[2]);
  }
  const double mean = sum / total, variance = std::max(squares / total - mean * mean, 0.0);
  return static_cast<float>(mean + static_cast<double>(*mlp.cutoff) * std::sqrt(variance));
}

void StepThread::cut_gates(const MlpWeights& mlp, float* gate) noexcept {
  const int64_t count = mlp.gate.w.shape().rows;
  const Range part = part_of(tokens_, thread_, threads_);
  barrier(Work::gate_up);
  if (forward_.ranks_ != nullptr) {
    float* sums = forward_.ranks_->slot(spec_.rank, turn_);
    for (int64_t t = part.begin; t < part.end; ++t) put_sums(gate + t * features_stride_, count, 1.0, sums + t * kSums);
    exchange(Work::activate, {kSums * tokens_, 0});
  } else {
    for (int64_t t = part.begin; t < part.end; ++t) {
      float mean, squares;
      moments(gate + t * features_stride_, count, &mean, &squares);
      shared_.cutoffs.get()[t] = mean + *mlp.cutoff * std::sqrt(squares / static_cast<float>(count));
    }
    barrier(Work::activate);
  }
  const Range tokens = small_ ? Range{0, tokens_} : part;
  const Range own = small_ ? rows_of(mlp.gate.w.shape()) : Range{0, count};
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    const float cutoff = forward_.ranks_ == nullptr ? shared_.cutoffs.get()[t] : cutoff_of_ranks(mlp, t);
    cut(gate + t * features_stride_ + own.begin, cutoff, own.end - own.begin);
  }
}

// `features_ready`: the caller has called gate_up() and the activation, and then a barrier.
void StepThread::mlp(const MlpWeights& mlp, int which, bool features_ready) noexcept {
  float* gate = shared_.gate.get();
  float* up = shared_.up.get();
  if (!features_ready) {
    const Input& in = input(mlp.gate.w.shape(), x_, hidden_stride_, tokens_);
    gate_up(mlp, &in, tokens_, gate, up);
    barrier(Work::gate_up);
    if (!small_) activate_own(mlp, tokens_, gate, up);
  }
  const float* features = gate;
  if (mlp.norm.kind != NormKind::none) features = norm_rows(mlp.norm, gate, features_stride_, mlp.gate.w.shape().rows);
  fresh();
  const Input& in = input(mlp.down.w.shape(), features, features_stride_, tokens_);
  multiply_into(mlp.down, in, delta(which), hidden_stride_);
}

// --- experts

namespace {

// As transformers' PhimoeTopKRouter: see Moe in spec/decoder.py.
void sparsemixer(const MoeSpec& moe, float* logits, int32_t* chosen, float* weight) noexcept {
  constexpr float kOut = -std::numeric_limits<float>::infinity();
  for (int k = 0; k < moe.top_k; ++k) {
    int best = -1;  // the first one at least, so that there is one even if all are NaN
    for (int e = 0; e < moe.experts; ++e)
      if (std::find(chosen, chosen + k, e) == chosen + k && (best < 0 || logits[e] > logits[best])) best = e;
    float sum = 0;
    for (int e = 0; e < moe.experts; ++e) {
      const float distance = logits[best] - logits[e];
      if (distance / std::max(std::fabs(logits[e]), logits[best]) > 2 * moe.jitter) continue;
      sum += std::exp(-distance);
    }
    chosen[k] = best;
    weight[k] = moe.scale / sum;
    logits[best] = kOut;
  }
}

}  // namespace

// Chooses the experts of each token as the routers of transformers do: DeepseekV3TopkRouter, MixtralSparseMoeBlock,
// GptOssTopKRouter and others.
void StepThread::route(const MoeSpec& moe, const LayerWeights& weights, Range tokens, Routing& routing) noexcept {
  const int64_t stride = padded_stride(forward_.widths_.router);
  for (int64_t t = tokens.begin; t < tokens.end; ++t)
    choose(moe, weights, shared_.router.get() + t * stride, routing.chosen.data() + t * moe.top_k,
           routing.weights.data() + t * moe.top_k);
}

void StepThread::choose(const MoeSpec& moe, const LayerWeights& weights, const float* logits, int32_t* chosen,
                        float* weight) noexcept {
  const int experts = moe.experts, members = experts / moe.groups;
  float* scores = own_.routing.scores.data();
  float* choice = scores + experts;  // what experts are chosen by
  float* groups = choice + experts;
  constexpr float kOut = -std::numeric_limits<float>::infinity();
  std::memcpy(scores, logits, static_cast<size_t>(experts) * sizeof(float));
  if (moe.logit_scale != 1.0f) scale(scores, moe.logit_scale, experts);
  if (moe.scoring == MoeSpec::Scoring::sparsemixer) {
    sparsemixer(moe, scores, chosen, weight);
    return;
  }
  if (moe.scoring == MoeSpec::Scoring::softmax) softmax(scores, experts);
  if (moe.scoring == MoeSpec::Scoring::sigmoid)
    for (int e = 0; e < experts; ++e) scores[e] = sigmoid(scores[e]);
  for (int e = 0; e < experts; ++e)
    choice[e] = scores[e] + (weights.choice_bias == nullptr ? 0.0f : weights.choice_bias[e]);
  if (moe.top_groups < moe.groups) {
    for (int g = 0; g < moe.groups; ++g) {
      float first = kOut, second = kOut;
      for (int e = g * members; e < (g + 1) * members; ++e) {
        second = std::max(second, std::min(first, choice[e]));
        first = std::max(first, choice[e]);
      }
      groups[g] = moe.group_score == MoeSpec::GroupScore::max || members == 1 ? first : first + second;
    }
    for (int g = 0; g < moe.groups; ++g) {
      int better = 0;
      for (int other = 0; other < moe.groups; ++other)
        better += groups[other] > groups[g] || (groups[other] == groups[g] && other < g) ? 1 : 0;
      if (better >= moe.top_groups) std::fill(choice + g * members, choice + (g + 1) * members, kOut);
    }
  }
  for (int k = 0; k < moe.top_k; ++k) {
    int best = -1;  // the first one at least, so that there is one even if all are NaN
    for (int e = 0; e < experts; ++e) {
      if (std::find(chosen, chosen + k, e) != chosen + k) continue;
      if (best < 0 || choice[e] > choice[best]) best = e;
    }
    chosen[k] = best;
    weight[k] = scores[best];
  }
  if (moe.softmax_after) softmax(weight, moe.top_k);
  float sum = 0;
  for (int k = 0; k < moe.top_k; ++k) sum += weight[k];
  const float factor = moe.normalise ? moe.scale / (sum + 1e-20f) : moe.scale;
  for (int k = 0; k < moe.top_k; ++k)
    weight[k] *= weights.expert_scale == nullptr ? factor : factor * weights.expert_scale[chosen[k]];
}

void Routing::sort(int64_t tokens, const MoeSpec& moe) noexcept {
  const int64_t count = tokens * moe.top_k;
  std::fill(begin.begin(), begin.end(), 0);
  for (int64_t i = 0; i < count; ++i) ++begin[static_cast<size_t>(chosen[static_cast<size_t>(i)])];
  int32_t sum = 0;
  for (int e = 0; e < moe.experts; ++e) sum += std::exchange(begin[static_cast<size_t>(e)], sum);
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(begin[static_cast<size_t>(chosen[static_cast<size_t>(i)])]++);
    rows[at] = static_cast<int32_t>(i / moe.top_k);
    row_weights[at] = weights[static_cast<size_t>(i)];
  }
  // Each entry is the end of its expert now, which is the begin of the next.
  for (int e = moe.experts; e > 0; --e) begin[static_cast<size_t>(e)] = begin[static_cast<size_t>(e - 1)];
  begin[0] = 0;
}

float StepThread::shared_weight(const MoeSpec& moe, int64_t t) const noexcept {
  if (!moe.shared_gate) return moe.shared_scale;
  return moe.shared_scale * sigmoid(shared_.router.get()[t * padded_stride(forward_.widths_.router) + moe.experts]);
}

void StepThread::experts(size_t index, float* delta) noexcept {
  const MoeSpec& moe = *spec_.layers[index].moe;
  const LayerWeights& weights = weights_.layers[index];
  const int64_t stride = padded_stride(forward_.widths_.router);
  float* router = shared_.router.get();
  float* second = small_ ? own_.second_x.get() : shared_.second_x.get();
  if (moe.router_norm) {
    for (int64_t t = mine_.begin; t < mine_.end; ++t)
      norm(weights.router_norm, residual_ + t * hidden_stride_, spec_.hidden, second + t * hidden_stride_);
    fresh();
  }
  const float* of_router = moe.router_norm ? second : x_;
  multiply_into(weights.router, input(weights.router.w.shape(), of_router, hidden_stride_, tokens_), router, stride);
  if (moe.router_norm) fresh();
  if (moe.shared_gate)
    multiply_into(weights.shared_gate, input(weights.shared_gate.w.shape(), x_, hidden_stride_, tokens_),
                  router + moe.experts, stride);
  if (small_)
    experts_small(index, delta);
  else
    experts_large(index, delta);
}

void StepThread::fetch_experts(size_t index, const Routing& routing) noexcept {
  if (weights_.experts == nullptr) return;
  if (thread_ == 0) weights_.experts->need(index, routing.begin.data());
  barrier(Work::route);
  if (thread_ == 0 && small_) read_ahead(index);
}

// What a layer adds to the residual is small beside it, so that the next layer's router says much the same of the
// residual before. The disk then has work while this layer is computed.
void StepThread::read_ahead(size_t index) noexcept {
  const size_t next = forward_.next_experts_[index];
  if (next == 0) return;
  const MoeSpec& moe = *spec_.layers[next].moe;
  const LayerWeights& weights = weights_.layers[next];
  const Norm& norm_of_router = moe.router_norm               ? weights.router_norm
                               : spec_.layers[next].parallel ? weights.attn_norm
                                                             : weights.mlp_norm;
  Routing& routing = own_.likely;
  float* row = own_.row.get();
  float* logits = forward_.likely_logits_.data();
  const LinearWeights& router = weights.router;
  for (int64_t t = 0; t < tokens_; ++t) {
    norm(norm_of_router, residual_ + t * hidden_stride_, spec_.hidden, row);
    fresh();
    const Input& in = input(router.w.shape(), row, hidden_stride_, 1);
    multiply(router.w, in, Output{logits, static_cast<int64_t>(forward_.likely_logits_.size()), router.bias}, 0, 1);
    choose(moe, weights, logits, routing.chosen.data() + t * moe.top_k, routing.weights.data() + t * moe.top_k);
  }
  fresh();
  weights_.experts->read_ahead(next, routing.chosen.data(), tokens_, moe.top_k);
  mark(Work::route);
}

// All chosen experts in two phases: every thread a part of the rows of each, so that each weight is read once.
const float* StepThread::experts_input(const MoeSpec& moe, const LayerWeights& weights) noexcept {
  if (!moe.experts_norm) return x_;
  float* second = small_ ? own_.second_x.get() : shared_.second_x.get();
  for (int64_t t = mine_.begin; t < mine_.end; ++t)
    norm(weights.experts_norm, residual_ + t * hidden_stride_, spec_.hidden, second + t * hidden_stride_);
  fresh();
  return second;
}

void StepThread::experts_small(size_t index, float* delta) noexcept {
  const MoeSpec& moe = *spec_.layers[index].moe;
  const LayerWeights& weights = weights_.layers[index];
  float* gate = shared_.gate.get();
  float* up = shared_.up.get();
  const int64_t shared_row = tokens_ * moe.top_k;  // the shared expert's first row, behind the others
  const auto at = [&](float* buffer, int64_t row) {
    return buffer == nullptr ? nullptr : buffer + row * features_stride_;
  };
  if (moe.shared) {
    const Input& in = input(weights.shared.gate.w.shape(), x_, hidden_stride_, tokens_);
    gate_up(weights.shared, &in, tokens_, at(gate, shared_row), at(up, shared_row));
  }
  const float* x = experts_input(moe, weights);
  barrier(Work::route);
  Routing& routing = own_.routing;
  route(moe, weights, {0, tokens_}, routing);
  routing.sort(tokens_, moe);
  mark(Work::route);
  fetch_experts(index, routing);
  const auto each = [&](auto body) {
    for (int e = 0; e < moe.experts; ++e) {
      const int64_t begin = routing.begin[static_cast<size_t>(e)], end = routing.begin[static_cast<size_t>(e) + 1];
      if (end > begin) body(weights.experts[static_cast<size_t>(e)], begin, end - begin);
    }
  };
  const auto features = [&](const MlpWeights& expert, int64_t begin, int64_t count) {
    if (tokens_ > 1) fresh();
    const Input& in = input(expert.gate.w.shape(), x, hidden_stride_, count, routing.rows.data() + begin);
    gate_up(expert, &in, count, at(gate, begin), at(up, begin),
            moe.scale_input ? routing.row_weights.data() + begin : nullptr);
  };
  ExpertCache* cache = weights_.experts.get();
  if (cache == nullptr) {
    each(features);
  } else {
    // Those that are being read come last. The order does not change the result: each has features of its own.
    auto& late = own_.late;
    late.clear();
    each([&](const MlpWeights& expert, int64_t begin, int64_t count) {
      const auto e = static_cast<size_t>(&expert - weights.experts.data());
      if (!cache->is_ready(index, e)) return late.push_back(static_cast<int32_t>(e));
      features(expert, begin, count);
    });
    for (const int32_t each_late : late) {
      const auto e = static_cast<size_t>(each_late);
      cache->wait(index, e, thread_ == 0);
      features(weights.experts[e], routing.begin[e], routing.begin[e + 1] - routing.begin[e]);
    }
  }
  barrier(Work::gate_up);
  const Range own = rows_of(Shape{Format::f32, spec_.hidden, 1});
  const size_t own_bytes = static_cast<size_t>(own.end - own.begin) * sizeof(float);
  float* of_shared = moe.shared_post_norm ? this->delta(1) : delta;
  for (int64_t t = 0; t < tokens_; ++t) {
    std::memset(delta + t * hidden_stride_ + own.begin, 0, own_bytes);
    if (of_shared != delta) std::memset(of_shared + t * hidden_stride_ + own.begin, 0, own_bytes);
  }
  // Every product's rows are the same part of this thread: no barrier between them.
  float* out = shared_.expert_out.get();
  const auto down = [&](const MlpWeights& expert, float* to, int64_t begin, int64_t count, auto token, auto weight) {
    fresh();
    multiply_into(expert.down, input(expert.down.w.shape(), at(gate, begin), features_stride_, count), out,
                  hidden_stride_);
    for (int64_t i = 0; i < count; ++i)
      add(to + token(i) * hidden_stride_ + own.begin, out + i * hidden_stride_ + own.begin, weight(i),
          own.end - own.begin);
  };
  each([&](const MlpWeights& expert, int64_t begin, int64_t count) {
    down(
        expert, delta, begin, count, [&](int64_t i) { return routing.rows[static_cast<size_t>(begin + i)]; },
        [&](int64_t i) { return moe.scale_input ? 1.0f : routing.row_weights[static_cast<size_t>(begin + i)]; });
  });
  if (moe.shared)
    down(
        weights.shared, of_shared, shared_row, tokens_, [](int64_t i) { return i; },
        [&](int64_t i) { return shared_weight(moe, i); });
}

// One expert after the other, all threads together.
void StepThread::experts_large(size_t index, float* delta) noexcept {
  const MoeSpec& moe = *spec_.layers[index].moe;
  const LayerWeights& weights = weights_.layers[index];
  const Range own = part_of(tokens_, thread_, threads_);
  Routing& routing = shared_.routing;
  barrier(Work::route);
  route(moe, weights, own, routing);
  barrier(Work::route);
  if (thread_ == 0) routing.sort(tokens_, moe);
  float* of_shared = moe.shared_post_norm ? this->delta(1) : delta;
  for (int64_t t = own.begin; t < own.end; ++t) {
    std::memset(delta + t * hidden_stride_, 0, static_cast<size_t>(spec_.hidden) * sizeof(float));
    if (of_shared != delta)
      std::memset(of_shared + t * hidden_stride_, 0, static_cast<size_t>(spec_.hidden) * sizeof(float));
  }
  const float* x = experts_input(moe, weights);
  barrier(Work::route);
  fetch_experts(index, routing);
  float* gate = shared_.gate.get();
  float* up = shared_.up.get();
  float* out = shared_.expert_out.get();
  const auto whole = [&](const MlpWeights& expert, const float* x_of, float* to, int64_t count, const int32_t* rows,
                         const float* scales, auto token, auto weight) {
    fresh();
    const Input& in = input(expert.gate.w.shape(), x_of, hidden_stride_, count, rows);
    gate_up(expert, &in, count, gate, up);
    barrier(Work::gate_up);
    activate_own(expert, count, gate, up, scales);
    fresh();
    multiply_into(expert.down, input(expert.down.w.shape(), gate, features_stride_, count), out, hidden_stride_);
    barrier(Work::down);
    const Range part = part_of(count, thread_, threads_);
    for (int64_t i = part.begin; i < part.end; ++i)
      add(to + token(i) * hidden_stride_, out + i * hidden_stride_, weight(i), spec_.hidden);
  };
  for (int e = 0; e < moe.experts; ++e) {
    const auto begin = static_cast<size_t>(routing.begin[static_cast<size_t>(e)]);
    const int64_t count = routing.begin[static_cast<size_t>(e) + 1] - static_cast<int64_t>(begin);
    if (count == 0) continue;
    if (weights_.experts != nullptr) weights_.experts->wait(index, static_cast<size_t>(e), thread_ == 0);
    whole(
        weights.experts[static_cast<size_t>(e)], x, delta, count, routing.rows.data() + begin,
        moe.scale_input ? routing.row_weights.data() + begin : nullptr,
        [&](int64_t i) { return routing.rows[begin + static_cast<size_t>(i)]; },
        [&](int64_t i) { return moe.scale_input ? 1.0f : routing.row_weights[begin + static_cast<size_t>(i)]; });
  }
  if (moe.shared)
    whole(
        weights.shared, x_, of_shared, tokens_, nullptr, nullptr, [](int64_t i) { return i; },
        [&](int64_t i) { return shared_weight(moe, i); });
}

}  // namespace anyaccel::llm
