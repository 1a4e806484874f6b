// SPDX-License-Identifier: Apache-2.0
// Keys and values that are made for the attention of one query, and not kept: multi-head latent attention keeps
// latents, of which a long query makes the keys and values of all heads.
#pragma once

#include <memory>
#include <vector>

#include "llm/attention/attention.h"
#include "llm/attention/kernels_attention.h"

namespace anyaccel::llm {

// Of one thread.
class ExpandedKeys {
 public:
  static size_t token_bytes(int head_dim, int value_dim, CacheFormat format);
  // Room for `tokens` tokens of `heads` heads, in float32 or bfloat16. Throws std::bad_alloc.
  void reserve(int head_dim, int value_dim, CacheFormat format, int heads, int64_t tokens);

  // `count` tokens of head `head` from `position` on: k [head_dim], v [value_dim]; strides in floats.
  void append(int head, int64_t position, int count, const float* k, const float* v, int64_t stride) noexcept;
  // What a query sees in head `head`, all of whose tokens have been appended: `q` and `out` are of its first token.
  void attend(int head, const AttentionOptions& options, const Query& query, const float* q, int64_t q_stride,
              float* out, int64_t out_stride) noexcept;

 private:
  HeadLayout layout_{};
  std::shared_ptr<uint8_t> memory_;
  std::shared_ptr<float> scratch_;
  size_t bytes_ = 0, scratch_floats_ = 0;
  std::vector<uint8_t*> pages_;
};

// The keys of `count` tokens from `first` on, as a layer with one KV head has them in the cache: [count, head_dim].
void read_keys(const KvCache& cache, int layer, int sequence, int64_t first, int64_t count, float* out,
               int64_t stride) noexcept;

}  // namespace anyaccel::llm
