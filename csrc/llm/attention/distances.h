// SPDX-License-Identifier: Apache-2.0
// Scores by how far query and key are apart, of queries and keys made for each distance (DeBERTa, He et al., 2021).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "llm/attention/attention.h"

namespace anyaccel::llm {

// The rows of an embedding of distances: row i is of the key that is i - span before the query. With `logarithmic`,
// distances beyond span / 2 share rows, and those from max_distance on have the first or the last one.
struct DistanceRows {
  int64_t span, max_distance;
  bool logarithmic;
  int64_t count() const { return 2 * span; }
  // Of the distances from -max_distance to max_distance: what is farther apart has the row of these.
  std::vector<int32_t> rows() const;
};

// One layer's, of all heads.
class DistanceTerms {
 public:
  // Throws std::bad_alloc. `format`: of the cache, f32 or bf16.
  DistanceTerms(int64_t rows, int heads, int head_dim, CacheFormat format);

  // The key and the query of one row: [heads, head_dim]. A null pointer: the scores have no such term.
  void set_key(int64_t row, const float* key) noexcept;
  // `scale`: of the scores.
  void set_query(int64_t row, const float* query, float scale) noexcept;
  // What AttentionOptions want, beside the rows of distances.
  DistanceScores scores() const noexcept;

 private:
  int heads_, head_dim_, padded_head_dim_;
  bool f32_, has_keys_ = false, has_queries_ = false;
  size_t block_bytes_, head_bytes_;
  int64_t head_floats_;
  std::shared_ptr<uint8_t> keys_;
  std::shared_ptr<float> queries_;
};

}  // namespace anyaccel::llm
