// SPDX-License-Identifier: Apache-2.0
// Several residuals of a token, and a low-rank way beside attention: Streams and Laurel in spec/decoder.py. Ranks have
// all of it: nothing is exchanged.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "llm/forward/step_thread.h"

namespace anyaccel::llm {
namespace {

constexpr float kLeastSquare = 1e-5f;  // of a mean of squares that is divided by

float mean_square(const float* x, int64_t n) { return dot(x, x, n) / static_cast<float>(n); }

}  // namespace

float* StepThread::stream_of(int64_t t, int64_t which) const noexcept {
  return (small_ ? own_.streams : shared_.streams).get() + (t * spec_.streams + which) * hidden_stride_;
}

void StepThread::open_streams() noexcept {
  const int others = spec_.streams - 1;
  float* side = shared_.side.get();
  fresh();
  for (int i = 0; i < others; ++i) {
    const LinearWeights& linear = weights_.streams_in[static_cast<size_t>(i)];
    const Input& in = input(linear.w.shape(), residual_, hidden_stride_, tokens_);
    multiply_into(linear, in, side + i * hidden_stride_, others * hidden_stride_);
  }
  barrier(Work::embed);
  const size_t bytes = static_cast<size_t>(spec_.hidden) * sizeof(float);
  for (int64_t t = mine_.begin; t < mine_.end; ++t) {
    const float* first = residual_ + t * hidden_stride_;
    const float target = std::sqrt(mean_square(first, spec_.hidden));
    std::memcpy(stream_of(t, 0), first, bytes);
    for (int i = 0; i < others; ++i) {
      float* stream = stream_of(t, i + 1);
      std::memcpy(stream, side + (t * others + i) * hidden_stride_, bytes);
      scale(stream, target / std::sqrt(std::max(mean_square(stream, spec_.hidden), kLeastSquare)), spec_.hidden);
    }
  }
  mark(Work::embed);
}

void StepThread::route_streams(size_t index, const float* residual, float* out) noexcept {
  const LayerWeights& weights = weights_.layers[index];
  float* row = own_.row.get();
  norm(weights.stream_norm, residual, spec_.hidden, row);
  for (int i = 0; i < spec_.streams; ++i)
    out[i] =
        std::tanh(dot(weights.stream_router + i * spec_.hidden, row, spec_.hidden) / static_cast<float>(spec_.hidden));
}

void StepThread::predict_streams(size_t index) noexcept {
  const int count = spec_.streams;
  float* old = own_.old_streams.get();
  float routed[kMostStreams];
  for (int64_t t = mine_.begin; t < mine_.end; ++t) {
    route_streams(index, stream_of(t, 0), routed);
    std::memcpy(old, stream_of(t, 0), static_cast<size_t>(count * hidden_stride_) * sizeof(float));
    const float* weight = weights_.layers[index].stream_predict;
    for (int to = 0; to < count; ++to)
      for (int from = 0; from < count; ++from, weight += count)
        add(stream_of(t, to), old + from * hidden_stride_, dot(weight, routed, count), spec_.hidden);
    std::memcpy(residual_ + t * hidden_stride_, stream_of(t, 0), static_cast<size_t>(spec_.hidden) * sizeof(float));
  }
  mark(Work::norm);
}

// The residual has what the layer made of the first stream; x gets what input_gate reads.
void StepThread::correct_streams(size_t index) noexcept {
  const LayerWeights& weights = weights_.layers[index];
  float routed[kMostStreams];
  for (int64_t t = mine_.begin; t < mine_.end; ++t) {
    float* made = residual_ + t * hidden_stride_;
    float* x = x_ + t * hidden_stride_;
    route_streams(index, made, routed);
    add(made, stream_of(t, 0), -1.0f, spec_.hidden);
    for (int i = 0; i < spec_.streams; ++i)
      add(stream_of(t, i), made, 1.0f + dot(weights.stream_correct + i * spec_.streams, routed, spec_.streams),
          spec_.hidden);
    std::memcpy(x, stream_of(t, 0), static_cast<size_t>(spec_.hidden) * sizeof(float));
    if (weights.stream_scale != nullptr)
      for (int64_t i = 0; i < spec_.hidden; ++i) x[i] *= weights.stream_scale[i];
  }
  mark(Work::norm);
}

void StepThread::close_streams() noexcept {
  const int others = spec_.streams - 1;
  float* side = shared_.side.get();
  for (int i = 0; i < others; ++i) {
    const LinearWeights& linear = weights_.streams_out[static_cast<size_t>(i)];
    fresh();
    const Input& in = input(linear.w.shape(), stream_of(0, i + 1), spec_.streams * hidden_stride_, tokens_);
    multiply_into(linear, in, side + i * hidden_stride_, others * hidden_stride_);
  }
  barrier(Work::head);
  for (int64_t t = mine_.begin; t < mine_.end; ++t) {
    float* sum = residual_ + t * hidden_stride_;
    std::memcpy(sum, stream_of(t, 0), static_cast<size_t>(spec_.hidden) * sizeof(float));
    const float target = std::sqrt(mean_square(sum, spec_.hidden));
    for (int i = 0; i < others; ++i) {
      const float* row = side + (t * others + i) * hidden_stride_;
      add(sum, row, target / std::sqrt(std::max(mean_square(row, spec_.hidden), kLeastSquare)), spec_.hidden);
    }
    scale(sum, 1.0f / static_cast<float>(spec_.streams), spec_.hidden);
  }
  fresh();
  mark(Work::head);
}

// x is still the norm that attention has read; what attention gave is pending.
void StepThread::add_laurel(const LayerSpec& spec, const LayerWeights& weights) noexcept {
  for (int64_t t = mine_.begin; t < mine_.end; ++t) {
    float* row = own_.row.get();
    float* residual = residual_ + t * hidden_stride_;
    norm(weights.laurel_norm, shared_.side.get() + t * hidden_stride_, spec_.hidden, row);
    add(residual, row, 1.0f, spec_.hidden);
    add(residual, x_ + t * hidden_stride_, 1.0f, spec_.hidden);
  }
  if (divides_rows()) barrier(Work::norm);  // then other threads read these rows, and overwrite x
  advance(Norm{}, false);
  for (int64_t t = mine_.begin; t < mine_.end; ++t)
    scale(residual_ + t * hidden_stride_, spec.laurel->scale, spec_.hidden);
}

}  // namespace anyaccel::llm
