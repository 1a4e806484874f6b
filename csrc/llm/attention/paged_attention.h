// SPDX-License-Identifier: Apache-2.0
// Attention over a cache in pages for models whose other code is not ours: keys and values of all sequences of a run
// come layer by layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "llm/attention/attention.h"

namespace anyaccel::llm {

// One caller at a time.
class PagedAttention {
 public:
  // `threads`: 0 for as many as this process may use CPUs. Throws std::invalid_argument.
  PagedAttention(std::vector<AttentionShape> layers, CacheFormat format, size_t limit_bytes, int threads);

  KvCache& cache() { return cache_; }

  struct Segment {
    int sequence;
    int64_t start, tokens;
  };
  // The tokens of a run, of each sequence once; what a sequence has beyond `start` is forgotten. Throws UsageError,
  // OutOfCache.
  void begin(const std::vector<Segment>& segments);
  // Of a layer, float32, dense: q [tokens, heads, head_dim], k and v [tokens, kv_heads, ...], out [tokens, heads,
  // value_dim], of all segments one after another. Throws UsageError.
  void attend(int layer, const AttentionOptions& options, const float* q, const float* k, const float* v, float* out);

 private:
  const std::vector<AttentionShape> shapes_;
  const int threads_;
  KvCache cache_;
  std::vector<Query> queries_;
  AttentionScratch scratch_;
};

}  // namespace anyaccel::llm
