// SPDX-License-Identifier: Apache-2.0
// The key/value cache and attention over it.
//
// Keys and values live in pages of kPageTokens tokens of one layer-independent pool: a page holds the keys and values
// of its tokens for all layers and KV heads. A sequence is a list of pages; sequences that share a prefix share pages,
// which are copied when one of them writes (copy on write). What is inside a page is said in cache.h and
// kernels_attention.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "llm/attention/sequences.h"

namespace anyaccel::llm {

constexpr int kPageTokens = 64;

// i8: a scale for each token and head; i4: a scale and a minimum for each token, head and kCacheGroup values.
enum class CacheFormat : uint8_t { f32, bf16, i8, i4 };
constexpr int kCacheGroup = 32;

// The heads of one layer that this rank has.
struct AttentionShape {
  int heads;  // query heads, a multiple of kv_heads
  int kv_heads;
  int head_dim;      // of queries and keys
  int value_dim;     // of values and of the result; 0: the cache has keys only
  int same_as = -1;  // an earlier layer whose keys and values these are; -1: they have a place of their own
  bool operator==(const AttentionShape&) const = default;
};

// Scores by the distance of a query and a key, see distances.h: that of the query and a key of the distance, and that
// of a query of the distance and the key. Either may be null.
struct DistanceScores {
  const uint8_t* keys;  // of the first head: rows packed like the keys of a page
  size_t head_bytes;
  const float* queries;  // of the first head, with the scale of the scores
  int64_t head_floats;
  const int32_t* rows;  // of the distances (query position - key position) from -max_distance on
  int64_t max_distance;
  int32_t row(int64_t distance) const {
    return rows[(distance < -max_distance  ? -max_distance
                 : distance > max_distance ? max_distance
                                           : distance) +
                max_distance];
  }
};

struct AttentionOptions {
  float scale;
  float softcap = 0;  // > 0: scores become softcap * tanh(score / softcap)
  int window = 0;     // > 0: a token sees itself and the window - 1 tokens before it
  int chunk = 0;      // > 0: a token sees the tokens of its own chunk of that many positions (Llama 4)
  const float* alibi_slopes = nullptr;  // [heads]: score += slope * (key position - query position)
  const float* sinks = nullptr;         // [heads]: a logit that takes part in the softmax and has no value (GPT-OSS)
  // A token also sees those behind it (encoders), with a window as many as before it. A query has a whole sequence.
  bool bidirectional = false;
  const float* bias = nullptr;  // score += bias[head * bias_head + key position - query position]; 16 more can be read
  int64_t bias_head = 0;
  const DistanceScores* distances = nullptr;  // of layers with as many KV heads; f32 and bf16 only
  const uint64_t* seen = nullptr;  // of each of the query's tokens a bit for each token that it sees, a word a page
  int64_t seen_stride = 0;         // in words
};

// A step's keys and values do not fit the cache.
struct OutOfCache : std::runtime_error {
  OutOfCache(size_t needed_bytes, size_t free_bytes, size_t limit_bytes);
  size_t needed, free, limit;  // bytes: wanted now; left below the limit; the limit
};

// Pages of one model's cache, and recurrent states. A state counts as so many pages that they have room for it; states
// that sequences share are copied when one of them goes on. Calls for one cache may not run at the same time, and none
// while a step runs.
class KvCache final : public Sequences {
 public:
  // One shape a layer with attention. `limit_bytes`: extend() fails rather than use more; `state_floats`: of a
  // sequence's recurrent state. Throws std::invalid_argument.
  KvCache(std::vector<AttentionShape> layers, CacheFormat format, size_t limit_bytes, int64_t state_floats = 0);
  ~KvCache() override;

  int create() override;
  void destroy(int sequence) override;
  int fork(int sequence, int64_t tokens) override;
  void truncate(int sequence, int64_t tokens) override;
  bool exists(int sequence) const override;
  int64_t length(int sequence) const override;
  void extend(int sequence, int64_t tokens) override;
  int64_t reachable(int sequence, int64_t tokens) const override;
  void keep(int sequence, bool anyway) override;
  void checkpoint(int sequence, bool take) override;
  bool can_checkpoint(int64_t sequences) const override;
  std::vector<uint8_t*> pages(int sequence, int64_t first, int64_t count) const override;
  // The recurrent state, which a step changes: of a sequence that has been extended.
  float* state(int sequence) const;
  // Bytes that extend() would take: pages, and the copies of a page and a state that are shared.
  size_t extend_bytes(int sequence, int64_t tokens) const;
  size_t sequences() const;

  size_t token_bytes() const override { return page_bytes() / kPageTokens; }
  size_t page_bytes() const;
  size_t state_bytes() const override { return state_pages() * page_bytes(); }
  // As how many pages a state counts: on ranks, which have unequal parts of it, the same number.
  size_t state_pages() const;
  void set_state_pages(size_t pages);
  size_t used_bytes() const override;
  size_t reserved_bytes() const override;
  size_t limit_bytes() const override;
  // Lowers the limit; one that is lower already stays.
  void set_limit_pages(size_t pages);

  CacheFormat format() const;

  // Kernels below.
  struct Impl;
  Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

// The tokens that a step adds to one sequence.
struct Query {
  int sequence;
  int64_t position;  // of the first one: the sequence's length before extend()
  int tokens;
  int row;              // of the first one among the step's tokens
  bool whole = false;   // however few they are, the context is not divided: as a part of a long prompt
  bool shared = false;  // another query of the step sees these tokens, so they are in the cache before any attends
  uint8_t* const* pages = nullptr;  // attend() sees these, of this layer alone, in place of those of the cache
};

// Whether threads divide the query's context among them: it has few tokens, and is no part of a long prompt.
bool divides_context(const Query& query) noexcept;

// One layer's part of a step, shared by the threads of a team. Vectors are sized before the threads start.
struct AttentionStep {
  KvCache* cache;
  int layer;
  AttentionOptions options;
  const std::vector<Query>* queries;
  // Rows of the step's tokens: q [heads, head_dim], k [kv_heads, head_dim], v [kv_heads, value_dim], all already
  // normed and rotated; result [heads, value_dim]. Strides in floats from token to token. k is null where another
  // layer's keys and values are seen, which are in the cache already.
  const float* q;
  const float* k;
  const float* v;
  int64_t q_stride, k_stride, v_stride;
  float* out;
  int64_t out_stride;
};

// Scratch memory of attention for a step of that size (partial results of divided contexts, packed queries).
struct AttentionScratch {
  void reserve(const AttentionShape& shape, const std::vector<Query>& queries, int threads);
  std::shared_ptr<void> memory;
  size_t bytes = 0;
};

// Call these on every thread of the team. Between each two a barrier is needed, and one after the last.
// Writes the new keys and values into the cache, but for queries of one token that no other query sees: attend() does
// that for those, so that decoding needs no barrier. Nothing to do when needs_append() is false.
bool needs_append(const AttentionStep& step) noexcept;
void append(const AttentionStep& step, int thread, int threads) noexcept;
// Attention of every query; long contexts are divided among threads (Flash-Decoding, Dao et al., 2023), so that one
// sequence with few KV heads uses them all. Results do not depend on which other sequences are in the step.
void attend(const AttentionStep& step, AttentionScratch& scratch, int thread, int threads) noexcept;
// Puts the parts of divided contexts together. Nothing to do when none was divided: needs_combine() says so.
bool needs_combine(const AttentionStep& step, int threads) noexcept;
void combine(const AttentionStep& step, AttentionScratch& scratch, int thread, int threads) noexcept;

}  // namespace anyaccel::llm
