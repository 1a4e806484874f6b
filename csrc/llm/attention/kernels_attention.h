// SPDX-License-Identifier: Apache-2.0
// Attention over pages as each instruction set does it.
//
// What a page holds of one layer and KV head, one after another: keys, values, scales. Both are laid out like the
// weights of a matrix product (matrix.h), so that no sum over the lanes of a vector is needed:
//   keys    blocks of 16 tokens, in a block [k][16 tokens] (bf16: [k/2][16][2]), k running over the head's values
//   values  blocks of 16 values, in a block [t][16 values] (bf16: [t/2][16][2]), t running over the page's tokens
//   scales  i8: a float for each token's key, then one for each token's value
//           i4: for each group of a key's values the scales of all tokens, then their minima, as halves; then the same
//           for the groups of a token's values
// Groups of four bits are rotated (rotate_groups.h). They lie like weights of four bits (grouped.h): keys [k/8][16
// tokens][4 bytes], values [t/8][16 values][4 bytes], byte i having numbers i and 4 + i of the eight.
#pragma once

#include <cstddef>
#include <cstdint>

#include "llm/attention/attention.h"
#include "simd/isa.h"

namespace anyaccel::llm {

struct HeadLayout {
  CacheFormat format;
  int head_dim, value_dim;
  int padded_head_dim;   // a multiple of 4, for i4 of 8: zeros follow
  int padded_value_dim;  // a multiple of 16
  size_t key_block_bytes, value_block_bytes;
  size_t values;  // offset of the values
  size_t scales;  // offset of the scales
  size_t bytes;   // of one head
  int key_groups() const { return (padded_head_dim + kCacheGroup - 1) / kCacheGroup; }
  int value_groups() const { return (padded_value_dim + kCacheGroup - 1) / kCacheGroup; }
};
constexpr size_t kGroupScaleBytes = 2 * kPageTokens * sizeof(uint16_t);  // scales and minima of a page's tokens

// Rows attended together: row r is head r % group of the query's token r / group.
struct AttendTask {
  const HeadLayout* layout;
  const AttentionOptions* options;  // alibi_slopes, sinks, bias and distances: of the KV head's first query head
  uint8_t* const* pages;            // of the sequence
  size_t offset;                    // of the layer and KV head in a page
  const float* q;                   // of the query's first token and the group's first head
  int64_t q_stride;
  int group;
  int first_row, rows;  // rows <= kTaskRows
  int64_t position;     // of the query's first token
  int64_t begin, end;   // tokens of the context to attend to; begin is a multiple of kPageTokens
  int64_t length;       // of the sequence with the query
  bool many;            // the query is a prompt, all of whose tasks are computed alike
  float* scratch;       // task_scratch_floats()
  // A whole context's result, divided by the sum (sinks included), like AttentionStep::out; or null:
  float* out;
  int64_t out_stride;
  // a part: for each of the task's rows, padded_value_dim sums, then maximum and sum of weights, then padding.
  float* partial;
};

constexpr int kTaskRows = 64;
inline int64_t partial_floats(const HeadLayout& layout) { return layout.padded_value_dim + 16; }
// Of scores by distance: rows that a task's queries and a page's keys have between them, and those of a tile and a
// page.
constexpr int kDistanceRows = kTaskRows + kPageTokens, kDistanceColumns = 112;
inline size_t task_scratch_floats(const HeadLayout& layout) {
  return static_cast<size_t>(kTaskRows) *
             static_cast<size_t>(layout.padded_head_dim + 2 * layout.padded_value_dim + 6 + 10 * layout.key_groups()) +
         static_cast<size_t>(kTaskRows) * kPageTokens + 64 + kDistanceRows * kPageTokens + 16 * kDistanceColumns;
}

struct AppendTask {
  const HeadLayout* layout;
  uint8_t* const* pages;
  size_t offset;
  const float* k;  // of the first token and the KV head
  const float* v;
  int64_t k_stride, v_stride;
  int64_t position;  // of the first token; the tokens of one pair or block are written by one thread
  int tokens;
};

struct CombineTask {
  const float* partials;  // of the first part
  int64_t part_stride;    // in floats
  int parts;
  int value_dim, padded_value_dim;
  const float* sink;  // null: none
  float* out;
};

struct AttentionKernels {
  void (*attend)(const AttendTask& task);
  void (*combine)(const CombineTask& task);
};
// Of keys and values in bfloat16, queries and weights of keys being rounded to it too. Scores by distance are not for
// it.
struct PairAttentionKernels {
  void (*attend)(const AttendTask& task);

  static constexpr bool compiled_for(const IsaRow& row) { return row.isa == Isa::avx512_bf16 || row.isa == Isa::amx; }
};
// By the kernels for the task.
void attend(const AttendTask& task) noexcept;

struct AppendKernels {
  void (*append)(const AppendTask& task);
};

}  // namespace anyaccel::llm
