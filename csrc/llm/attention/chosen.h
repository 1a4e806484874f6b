// SPDX-License-Identifier: Apache-2.0
// Attention to chosen tokens (DeepSeek Sparse Attention, DeepSeek-V3.2, 2025): scores by the keys that an indexer has
// in the cache, the choice, and what the cache has of the chosen ones, side by side. See Indexer in spec/decoder.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "llm/attention/attention.h"
#include "llm/attention/kernels_attention.h"

namespace anyaccel::llm {

// A token that sees chosen ones.
struct Chooser {
  int sequence;
  int64_t position;
  int row;  // among those of the step
};

// Scores of the tokens in pages [begin, end) for one token: score[t] = sum over heads of weight * max(q k, 0).
struct ScoreTask {
  const HeadLayout* layout;  // of keys without values
  uint8_t* const* pages;
  size_t offset;         // of the layer in a page
  const float* q;        // [heads, head_dim]
  const float* weights;  // [heads]
  int heads;
  int64_t begin, end;
  int64_t tokens;  // of the context, the last of which may be in a page that is not full
  float* scores;   // of the context's first token; whole pages are written
};

// Copies what a page has of each of `count` tokens, at most 16, to `lane` and the following of another one.
struct CopyTask {
  const HeadLayout* layout;
  uint8_t* const* pages;
  size_t offset;
  const int64_t* positions;
  int count;
  uint8_t* to;  // a page of this layer alone
  int lane;     // of the first, a multiple of 16
};

struct ChosenKernels {
  void (*score)(const ScoreTask& task);
  void (*copy)(const CopyTask& task);
};

// Sets the bits of the `top_k` of `count` scores that are highest, of equal ones the first; top_k < count.
void choose_highest(const float* scores, int64_t count, int64_t top_k, uint64_t* seen) noexcept;

// The chosen tokens of a step, and room for what choosing and seeing them takes.
class Chosen {
 public:
  // Before a step: of its tokens, those whose context has more than `top_k` choose. `page_bytes`: of a layer's page, at
  // most. Throws std::bad_alloc.
  void reserve(const std::vector<Query>& queries, int64_t top_k, size_t page_bytes);

  const std::vector<Chooser>& choosers() const { return choosers_; }
  // Choosers whose scores are made together.
  int64_t together() const { return together_; }
  float* scores(int64_t place) const { return scores_.get() + place * words_ * kPageTokens; }
  // Of a token of the step: of a word a page.
  uint64_t* seen(int64_t row) { return seen_.data() + row * words_; }
  int64_t stride() const { return words_; }
  // Tokens that see copies at the same time, and the pages of one of them.
  int64_t copies() const { return copies_; }
  uint8_t* const* pages(int64_t place) const { return pages_.data() + place * copy_pages_; }

  // A thread's part of the scores of choosers [first, first + count); `q` and `weights` are of the step's first token.
  void score(const KvCache& cache, int layer, int64_t first, int64_t count, const float* q, int64_t q_stride,
             const float* weights, int64_t weights_stride, int thread, int threads) const noexcept;
  void choose(int64_t first, int64_t count, int thread, int threads) noexcept;
  // Copies what `queries` see, each of one token of the step from `row` on, to the pages of its place among them.
  void copy(const KvCache& cache, int layer, const Query* queries, int64_t count, int64_t row, int thread,
            int threads) noexcept;

 private:
  std::vector<Chooser> choosers_;
  std::vector<uint64_t> seen_;
  std::vector<uint8_t*> pages_;
  std::shared_ptr<float> scores_;
  std::shared_ptr<uint8_t> copied_;
  size_t score_floats_ = 0, copied_bytes_ = 0;
  int64_t top_k_ = 0, words_ = 0, together_ = 0, copies_ = 0, copy_pages_ = 0;
};

}  // namespace anyaccel::llm
