// SPDX-License-Identifier: Apache-2.0
#include "llm/attention/paged_attention.h"

#include <string>
#include <utility>

#include "common/parallel.h"
#include "common/team.h"
#include "llm/errors.h"

namespace anyaccel::llm {

PagedAttention::PagedAttention(std::vector<AttentionShape> layers, CacheFormat format, size_t limit_bytes, int threads)
    : shapes_(std::move(layers)),
      threads_(threads > 0 ? threads : usable_cpus()),
      cache_(shapes_, format, limit_bytes) {}

void PagedAttention::begin(const std::vector<Segment>& segments) {
  queries_.clear();
  int64_t row = 0;
  for (const Segment& segment : segments) {
    if (!cache_.exists(segment.sequence) || segment.start < 0 || segment.start > cache_.length(segment.sequence) ||
        segment.tokens < 1)
      throw UsageError("sequence " + std::to_string(segment.sequence) + " cannot go on from " +
                       std::to_string(segment.start) + " by " + std::to_string(segment.tokens) + " tokens");
    cache_.truncate(segment.sequence, segment.start);
    cache_.extend(segment.sequence, segment.tokens);
    queries_.push_back({.sequence = segment.sequence,
                        .position = segment.start,
                        .tokens = static_cast<int>(segment.tokens),
                        .row = static_cast<int>(row)});
    row += segment.tokens;
  }
}

void PagedAttention::attend(int layer, const AttentionOptions& options, const float* q, const float* k, const float* v,
                            float* out) {
  if (layer < 0 || static_cast<size_t>(layer) >= shapes_.size())
    throw UsageError("layer " + std::to_string(layer) + " of " + std::to_string(shapes_.size()));
  const AttentionShape& shape = shapes_[static_cast<size_t>(layer)];
  AttentionStep step{};
  step.cache = &cache_;
  step.layer = layer;
  step.options = options;
  step.queries = &queries_;
  step.q = q;
  step.k = k;
  step.v = v;
  step.q_stride = int64_t{shape.heads} * shape.head_dim;
  step.k_stride = int64_t{shape.kv_heads} * shape.head_dim;
  step.v_stride = int64_t{shape.kv_heads} * shape.value_dim;
  step.out = out;
  step.out_stride = int64_t{shape.heads} * shape.value_dim;
  scratch_.reserve(shape, queries_, threads_);
  const auto on_threads = [&](auto phase) {
    parallel_for(threads_, threads_, [&](int64_t thread) { phase(static_cast<int>(thread)); });
  };
  if (needs_append(step)) on_threads([&](int thread) { append(step, thread, threads_); });
  on_threads([&](int thread) { anyaccel::llm::attend(step, scratch_, thread, threads_); });
  if (needs_combine(step, threads_)) on_threads([&](int thread) { combine(step, scratch_, thread, threads_); });
}

}  // namespace anyaccel::llm
