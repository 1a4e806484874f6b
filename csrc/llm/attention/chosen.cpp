// SPDX-License-Identifier: Apache-2.0
#include "llm/attention/chosen.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

#include "llm/attention/cache.h"
#include "simd/pick.h"

namespace anyaccel::llm {
namespace {

constexpr int64_t kScoreFloats = int64_t{1} << 22, kTogether = 64;
constexpr size_t kCopiedBytes = size_t{64} << 20;
constexpr int kLanesOfBlock = 16;

const ChosenKernels& kernels() noexcept {
  static const ChosenKernels& chosen = pick<ChosenKernels>(selected_isa());
  return chosen;
}

template <class T>
std::shared_ptr<T> aligned(size_t bytes) {
  void* memory = ::operator new(bytes, std::align_val_t{64});
  return {static_cast<T*>(memory), [](T* p) { ::operator delete(p, std::align_val_t{64}); }};
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// In the order of the scores.
uint32_t ordered(float score) {
  const auto bits = std::bit_cast<uint32_t>(score);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

}  // namespace

// A radix select: three histograms of a part of the bits each, the highest ones first, find the lowest score that is
// chosen, and how many that are equal to it are.
void choose_highest(const float* scores, int64_t count, int64_t top_k, uint64_t* seen) noexcept {
  constexpr int kBits[] = {11, 11, 10};
  int64_t left = top_k;  // to choose among those whose higher bits are those of `lowest`
  uint32_t lowest = 0;
  int shift = 32;
  for (const int bits : kBits) {
    int64_t counts[1 << 11] = {};
    const int above = shift;
    shift -= bits;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t value = ordered(scores[i]);
      if (above == 32 || value >> above == lowest >> above) ++counts[value >> shift & ((1u << bits) - 1)];
    }
    int64_t bucket = (1 << bits) - 1;
    for (; counts[bucket] < left; --bucket) left -= counts[bucket];
    lowest |= static_cast<uint32_t>(bucket) << shift;
  }
  for (int64_t begin = 0; begin < count; begin += kPageTokens) {
    uint64_t word = 0;
    for (int64_t i = begin; i < std::min<int64_t>(begin + kPageTokens, count); ++i) {
      const uint32_t value = ordered(scores[i]);
      const bool chosen = value > lowest || (value == lowest && left > 0);
      if (value == lowest && left > 0) --left;
      word |= uint64_t{chosen} << (i - begin);
    }
    seen[begin / kPageTokens] = word;
  }
}

void Chosen::reserve(const std::vector<Query>& queries, int64_t top_k, size_t page_bytes) {
  top_k_ = top_k;
  choosers_.clear();
  int64_t longest = 0, tokens = 0, few = 0;
  for (const Query& query : queries) {
    longest = std::max(longest, query.position + query.tokens);
    tokens = std::max<int64_t>(tokens, query.row + query.tokens);
  }
  if (longest <= top_k) return;
  words_ = divide_up(longest, kPageTokens);
  seen_.resize(std::max(seen_.size(), static_cast<size_t>(tokens * words_)));
  for (const Query& query : queries)
    for (int t = 0; t < query.tokens; ++t) {
      const int64_t position = query.position + t;
      if (position >= top_k) {
        choosers_.push_back({query.sequence, position, query.row + t});
        few += divides_context(query) ? 1 : 0;
      } else {
        std::fill_n(seen(query.row + t), words_, ~uint64_t{0});
      }
    }
  const auto count = static_cast<int64_t>(choosers_.size());
  together_ = std::clamp<int64_t>(kScoreFloats / (words_ * kPageTokens), 1, std::min(kTogether, count));
  const auto floats = static_cast<size_t>(together_ * words_ * kPageTokens);
  if (floats > score_floats_) {
    scores_ = aligned<float>(floats * sizeof(float));
    score_floats_ = floats;
  }
  copy_pages_ = divide_up(top_k, kPageTokens);
  const size_t each = static_cast<size_t>(copy_pages_) * page_bytes;
  copies_ = std::min(few, std::max<int64_t>(static_cast<int64_t>(kCopiedBytes / each), 1));
  const size_t bytes = each * static_cast<size_t>(copies_);
  if (bytes > copied_bytes_) {
    copied_ = aligned<uint8_t>(bytes);
    copied_bytes_ = bytes;
  }
  pages_.resize(static_cast<size_t>(copies_ * copy_pages_));
  for (size_t i = 0; i < pages_.size(); ++i) pages_[i] = copied_.get() + i * page_bytes;
}

void Chosen::score(const KvCache& cache, int layer, int64_t first, int64_t count, const float* q, int64_t q_stride,
                   const float* weights, int64_t weights_stride, int thread, int threads) const noexcept {
  const KvCache::Impl& impl = cache.impl();
  const auto index = static_cast<size_t>(layer);
  const auto pages_of = [&](int64_t i) { return choosers_[static_cast<size_t>(first + i)].position / kPageTokens + 1; };
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += pages_of(i);
  const int64_t begin = total * thread / threads, end = total * (thread + 1) / threads;
  int64_t before = 0;
  for (int64_t i = 0; i < count; before += pages_of(i), ++i) {
    const Chooser& chooser = choosers_[static_cast<size_t>(first + i)];
    const int64_t from = std::max<int64_t>(begin - before, 0), to = std::min(end - before, pages_of(i));
    if (from >= to) continue;
    kernels().score({&impl.layouts[index], impl.at(chooser.sequence).data.data(), impl.offsets[index],
                     q + chooser.row * q_stride, weights + chooser.row * weights_stride, impl.shapes[index].heads, from,
                     to, chooser.position + 1, scores(i)});
  }
}

void Chosen::choose(int64_t first, int64_t count, int thread, int threads) noexcept {
  for (int64_t i = count * thread / threads; i < count * (thread + 1) / threads; ++i) {
    const Chooser& chooser = choosers_[static_cast<size_t>(first + i)];
    choose_highest(scores(i), chooser.position + 1, top_k_, seen(chooser.row));
  }
}

void Chosen::copy(const KvCache& cache, int layer, const Query* queries, int64_t count, int64_t row, int thread,
                  int threads) noexcept {
  const KvCache::Impl& impl = cache.impl();
  const auto index = static_cast<size_t>(layer);
  const int64_t blocks = divide_up(top_k_, kLanesOfBlock);
  const int64_t begin = count * blocks * thread / threads, end = count * blocks * (thread + 1) / threads;
  for (int64_t i = begin / blocks; i < count && i * blocks < end; ++i) {
    const int64_t from = std::max<int64_t>(begin - i * blocks, 0), to = std::min(end - i * blocks, blocks);
    const uint64_t* const words = seen(row + queries[i].row);
    int64_t at = -1, rank = 0;  // the word, and how many are chosen before it
    uint64_t word = 0;
    const auto next = [&] {
      while (word == 0) word = words[++at];
      const int64_t position = at * kPageTokens + std::countr_zero(word);
      word &= word - 1;
      return position;
    };
    while (rank + std::popcount(words[at + 1]) <= from * kLanesOfBlock) rank += std::popcount(words[++at]);
    for (; rank < from * kLanesOfBlock; ++rank) next();
    for (int64_t block = from; block < to; ++block) {
      int64_t positions[kLanesOfBlock];
      const auto here = static_cast<int>(std::min<int64_t>(top_k_ - block * kLanesOfBlock, kLanesOfBlock));
      for (int lane = 0; lane < here; ++lane) positions[lane] = next();
      const int64_t slot = block * kLanesOfBlock;
      kernels().copy({&impl.layouts[index], impl.at(queries[i].sequence).data.data(), impl.offsets[index], positions,
                      here, pages(i)[slot / kPageTokens], static_cast<int>(slot % kPageTokens)});
    }
  }
}

}  // namespace anyaccel::llm
