// SPDX-License-Identifier: Apache-2.0
// Attention of a task's rows to the pages of a context, page by page with running sums (Dao et al., "FlashAttention",
// 2022), for the kernel files.
#pragma once

#include <cstring>
#include <optional>
#include <type_traits>

#include "llm/attention/attention_nibbles.h"
#include "llm/attention/attention_product.h"
#include "simd/simd.h"

namespace anyaccel::llm {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504088896341f;

// --- softmax of the scores of a tile's rows in one page. Scores are in units of log 2: 2^x costs less than e^x.

// What is known of a task's rows. Arrays are read in whole vectors.
struct Rows {
  int64_t position[kTaskRows];
  int64_t first_seen[kTaskRows];
  int64_t end[kTaskRows];           // behind the last one seen
  const float* bias[kTaskRows];     // of the key at position 0; or null
  const uint64_t* seen[kTaskRows];  // a word a page; or null
  float slope[kTaskRows];
  float largest[kTaskRows + kLanes];  // score so far
  float total[kTaskRows][kLanes];     // of 2^(score - largest), by lanes
};

// 0 for each set bit, -infinity for the others.
void hidden_by(uint64_t seen, float* out) {
  for (int j = 0; j < kPageTokens; ++j) out[j] = seen >> j & 1 ? 0.0f : -kInfinity;
}

// Scores of rows [first, first + count) become weights, with pairs bfloat16 at each row's begin; factors are what their
// earlier sums are to be multiplied by. Without branches on the scores, in loops over rows that do not wait for each
// other.
template <class B, bool kChanged>
void weigh(Rows& rows, int first, int count, float* scores, int columns, int64_t page_begin, const float* scales,
           float cap, float* factors) {
  constexpr bool kScaled = std::is_same_v<B, I8>;
  float found[kRowsOf<B> + kLanes], shift[kRowsOf<B> + kLanes];
  for (int r = 0; r < count; ++r) {
    float* const s = scores + r * kPageTokens;
    const int64_t position = rows.position[first + r];
    const int64_t low = rows.first_seen[first + r] - page_begin, high = rows.end[first + r] - page_begin;
    Vec top = broadcast(-kInfinity);
    const uint64_t* const words = rows.seen[first + r];
    const uint64_t seen = words == nullptr ? ~uint64_t{0} : words[page_begin / kPageTokens];
    float hidden[kPageTokens];
    if (~seen != 0) hidden_by(seen, hidden);
    if (!kScaled && !kChanged && low <= 0 && high >= columns && ~seen == 0) {
      for (int j = 0; j < columns; j += kLanes) top = max(load(s + j), top);
      found[r] = largest(top);
      continue;
    }
    for (int j = 0; j < columns; j += kLanes) {
      Vec v = load(s + j);
      if (kScaled) v = mul(v, load(scales + j));
      if (kChanged) {
        if (cap > 0) v = mul(broadcast(cap), tanh(mul(v, broadcast(1.0f / cap))));
        v = fma(broadcast(rows.slope[first + r]), add(iota(), broadcast(static_cast<float>(page_begin + j - position))),
                v);
        if (rows.bias[first + r] != nullptr) v = add(v, load(rows.bias[first + r] + page_begin + j));
        v = mul(v, broadcast(kLog2E));
      }
      if (j < low || j + kLanes > high) {
        const Vec index = add(iota(), broadcast(static_cast<float>(j)));
        v = select(less(index, broadcast(static_cast<float>(low))), broadcast(-kInfinity), v);
        v = select(less(index, broadcast(static_cast<float>(high))), v, broadcast(-kInfinity));
      }
      if (~seen != 0) v = add(v, load(hidden + j));
      store(s + j, v);
      top = max(v, top);
    }
    found[r] = largest(top);
  }
  for (int r = 0; r < count; r += kLanes) {
    const int n = count - r < kLanes ? count - r : kLanes;
    const Vec before = load_n(rows.largest + first + r, n, broadcast(0.0f));
    const Vec now = max(load_n(found + r, n, broadcast(0.0f)), before);
    const Mask none = equal(now, broadcast(-kInfinity));  // nothing seen yet
    store_n(rows.largest + first + r, n, now);
    store_n(shift + r, n, select(none, broadcast(0.0f), now));
    store_n(factors + r, n, select(none, broadcast(1.0f), exp2(sub(before, now))));
  }
  for (int r = 0; r < count; ++r) {
    float* const s = scores + r * kPageTokens;
    const Vec subtract = broadcast(shift[r]);
    Vec total = mul(load(rows.total[first + r]), broadcast(factors[r]));
#pragma GCC unroll 4
    for (int j = 0; j < columns; j += kLanes) {
      Vec v = exp2(sub(load(s + j), subtract));
      total = add(total, v);
      if (kScaled) v = select(equal(v, broadcast(0.0f)), v, mul(v, load(scales + kPageTokens + j)));
      if constexpr (kPaired<B>)
        B::store_row(reinterpret_cast<uint16_t*>(s) + j, v);
      else
        store(s + j, v);
    }
    store(rows.total[first + r], total);
  }
}

int64_t first_seen(const AttentionOptions& options, int64_t position) {
  int64_t first = 0;
  if (options.window > 0 && position - options.window + 1 > first) first = position - options.window + 1;
  if (options.chunk > 0 && position / options.chunk * options.chunk > first)
    first = position / options.chunk * options.chunk;
  return first;
}

int64_t end_of_seen(const AttentionOptions& options, int64_t position, int64_t length) {
  if (!options.bidirectional) return position + 1;
  return options.window > 0 && position + options.window < length ? position + options.window : length;
}

float exp2_of(float x) {
  float result[kLanes];
  store(result, exp2(broadcast(x)));
  return result[0];
}

void copy_scaled(const float* from, float factor, int n, float* to) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, mul(load(from + i), broadcast(factor)));
  if (i < n) store_n(to + i, n - i, mul(load_n(from + i, n - i, broadcast(0.0f)), broadcast(factor)));
}

// 1 / (sum of weights), where a sink's weight is part of the sum; `total` is of 2^(score - largest).
float normaliser(float largest_score, float total, const float* sink) {
  if (sink == nullptr) return 1.0f / total;
  const float score = *sink * kLog2E;
  if (score <= largest_score) return 1.0f / (total + exp2_of(score - largest_score));
  const float shrink = exp2_of(largest_score - score);
  return shrink / (total * shrink + 1.0f);
}

// What distances add to the scores of one page, whose heads have a query head each.
template <class B>
class PageDistances {
 public:
  PageDistances(const AttendTask& task, const uint8_t* page, int64_t page_begin, int tokens, float* scratch)
      : layout_(*task.layout),
        scores_(*task.options->distances),
        page_begin_(page_begin),
        tokens_(tokens),
        of_keys_(scratch),
        of_queries_(scratch + 16 * kDistanceColumns) {
    if (scores_.queries == nullptr) return;
    const int64_t from = task.position + task.first_row, to = from + task.rows - 1;
    first_row_ = scores_.row(from - (page_begin + tokens - 1));
    const int k = layout_.padded_head_dim, count = scores_.row(to - page_begin) - first_row_ + 1;
    for (int row = 0; row < count; row += kTileRows)
      multiply<B>({scores_.queries + static_cast<int64_t>(first_row_ + row) * k, k, page, layout_.key_block_bytes, k,
                   of_queries_ + row * kPageTokens, kPageTokens, nullptr, nullptr},
                  count - row < kTileRows ? count - row : kTileRows, (tokens + 15) / 16);
  }

  // `position`: of the first of a tile's rows `q`.
  void add(const float* q, int64_t position, int count, float* scores) const {
    const int k = layout_.padded_head_dim;
    int first = 0;
    if (scores_.keys != nullptr) {
      const int block = scores_.row(position - (page_begin_ + tokens_ - 1)) / 16;
      const int last = scores_.row(position + count - 1 - page_begin_) / 16;
      first = 16 * block;
      multiply<B>({q, k, scores_.keys + static_cast<size_t>(block) * layout_.key_block_bytes, layout_.key_block_bytes,
                   k, of_keys_, kDistanceColumns, nullptr, nullptr},
                  count, last - block + 1);
    }
    for (int r = 0; r < count; ++r) {
      int32_t rows[kPageTokens];
      float* const to = scores + r * kPageTokens;
      for (int j = 0; j < tokens_; ++j) rows[j] = scores_.row(position + r - page_begin_ - j);
      if (scores_.keys != nullptr) {
        const float* const from = of_keys_ + r * kDistanceColumns;
        for (int j = 0; j < tokens_; ++j) to[j] += from[rows[j] - first];
      }
      if (scores_.queries != nullptr)
        for (int j = 0; j < tokens_; ++j) to[j] += of_queries_[(rows[j] - first_row_) * kPageTokens + j];
    }
  }

 private:
  const HeadLayout& layout_;
  const DistanceScores& scores_;
  const int64_t page_begin_;
  const int tokens_;
  float *of_keys_, *of_queries_;  // [rows of q][kDistanceColumns]; [kDistanceRows][keys]
  int32_t first_row_ = 0;         // of of_queries_
};

// The values of a page with zeros behind its first `tokens`, where what was there may be no numbers.
const uint8_t* cut_values(const HeadLayout& layout, const uint8_t* values, int64_t tokens, float* copy) {
  auto* const to = reinterpret_cast<uint8_t*>(copy);
  const size_t block = layout.value_block_bytes, kept = static_cast<size_t>(tokens / 2) * 64;
  for (size_t at = 0; at < static_cast<size_t>(layout.padded_value_dim / 16) * block; at += block) {
    std::memcpy(to + at, values + at, kept);
    std::memset(to + at + kept, 0, block - kept);
    for (size_t value = 0; tokens % 2 != 0 && value < 16; ++value)
      std::memcpy(to + at + kept + 4 * value, values + at + kept + 4 * value, 2);
  }
  return to;
}

// A query's row as pairs of bfloat16, k of them.
template <class B>
void copy_pairs(const float* from, float factor, int n, int k, float* to) {
  auto* pairs = reinterpret_cast<uint16_t*>(to);
  for (int i = 0; i < k; i += kLanes) {
    const Vec v = i + kLanes <= n ? load(from + i) : i < n ? load_n(from + i, n - i, broadcast(0.0f)) : broadcast(0.0f);
    B::store_row(pairs + i, mul(v, broadcast(factor)));  // beyond k: of the next row, which comes later
  }
}

template <class B>
void attend_rows(const AttendTask& task) {
  constexpr bool kNibbles = std::is_same_v<B, I4>;
  constexpr bool kMeasured = std::is_same_v<B, F32> || std::is_same_v<B, BF16>;  // distances
  constexpr int kRows = kRowsOf<B>;
  const HeadLayout& layout = *task.layout;
  const AttentionOptions& options = *task.options;
  const int k = layout.padded_head_dim, width = layout.padded_value_dim;
  const int q_row = kPaired<B> ? k / 2 : k;  // floats
  float* const q = task.scratch;
  float* const sums = q + kTaskRows * k;
  float* const scores = sums + kTaskRows * width;
  [[maybe_unused]] RoundedQueries rounded(layout, scores + kTaskRows * kPageTokens);
  const bool changed = options.softcap > 0 || options.alibi_slopes != nullptr || options.bias != nullptr;
  const float scale = changed ? options.scale : options.scale * kLog2E;
  Rows rows;
  const auto token_of = [&](int r) { return (task.first_row + r) / task.group; };
  const auto head_of = [&](int r) { return (task.first_row + r) % task.group; };
  const auto query = [&](int r) { return task.q + token_of(r) * task.q_stride + head_of(r) * layout.head_dim; };
  for (int r = 0; r < task.rows; ++r)  // far apart in memory, and written by other cores
    for (int i = 0; i < layout.head_dim; i += 16) __builtin_prefetch(query(r) + i);
  for (int r = 0; r < task.rows; ++r) {
    if constexpr (kPaired<B>) {
      copy_pairs<B>(query(r), scale, layout.head_dim, k, q + r * q_row);
    } else {
      copy_scaled(query(r), scale, layout.head_dim, q + r * k);
      for (int i = layout.head_dim; i < k; ++i) q[r * k + i] = 0;
    }
    if constexpr (kNibbles) rounded.set(r, q + r * k, layout.head_dim, k);
    for (int i = 0; i < width; i += kLanes) store(sums + r * width + i, broadcast(0.0f));
    rows.position[r] = task.position + token_of(r);
    rows.first_seen[r] = first_seen(options, rows.position[r]);
    rows.end[r] = end_of_seen(options, rows.position[r], task.length);
    rows.bias[r] = options.bias == nullptr ? nullptr : options.bias + head_of(r) * options.bias_head - rows.position[r];
    rows.seen[r] = options.seen == nullptr ? nullptr : options.seen + token_of(r) * options.seen_stride;
    rows.slope[r] = options.alibi_slopes == nullptr ? 0.0f : options.alibi_slopes[head_of(r)];
    rows.largest[r] = -kInfinity;
    store(rows.total[r], broadcast(0.0f));
  }
  const auto weights = changed ? weigh<B, true> : weigh<B, false>;
  const bool stream = task.rows <= kRows;  // memory bound: the next bytes are fetched during the arithmetic
  for (int64_t page = task.begin / kPageTokens; page * kPageTokens < task.end; ++page) {
    const uint8_t* const keys = task.pages[page] + task.offset;
    const float* const scales = reinterpret_cast<const float*>(keys + layout.scales);
    const uint8_t* values = keys + layout.values;
    const int64_t page_begin = page * kPageTokens;
    if constexpr (kWholePages<B>)
      if (task.length - page_begin < kPageTokens)
        values = cut_values(layout, values, task.length - page_begin, scores + kTaskRows * kPageTokens);
    [[maybe_unused]] std::conditional_t<kMeasured, std::optional<PageDistances<B>>, int> distances{};
    if constexpr (kMeasured) {
      const int64_t left = task.end - page_begin;
      if (options.distances != nullptr)
        distances.emplace(task, keys, page_begin, static_cast<int>(left < kPageTokens ? left : kPageTokens),
                          scores + kTaskRows * kPageTokens);
    }
    for (int first = 0; first < task.rows; first += kRows) {
      const int count = task.rows - first < kRows ? task.rows - first : kRows;
      const int64_t last = rows.end[first + count - 1];
      const int64_t end = (last < task.end ? last : task.end) - page_begin;
      if (end <= 0 || rows.first_seen[first] >= page_begin + kPageTokens) continue;
      const int tokens = end < kPageTokens && !kWholePages<B> ? static_cast<int>(end) : kPageTokens;
      const bool more = page_begin + kPageTokens < task.end;
      const int blocks = (tokens + 15) / 16;
      const uint8_t* const after_keys = stream ? values : nullptr;
      const uint8_t* const after_values = stream && more ? task.pages[page + 1] + task.offset : nullptr;
      if (after_values != nullptr)
        for (size_t at = layout.scales; at < layout.bytes; at += 64) __builtin_prefetch(after_values + at);
      if constexpr (kNibbles)
        score_nibbles(layout, keys, rounded, first, count, tokens, scores, after_keys);
      else
        multiply<B>(
            {q + first * q_row, q_row, keys, layout.key_block_bytes, k, scores, kPageTokens, nullptr, after_keys},
            count, blocks);
      if constexpr (kMeasured)
        if (distances) distances->add(q + first * k, rows.position[first], count, scores);
      float factors[kRows + kLanes];
      weights(rows, first, count, scores, 16 * blocks, page_begin, scales, options.softcap, factors);
      if constexpr (kNibbles)
        add_nibbles(layout, keys, scores, count, tokens, factors, sums + first * width, after_values);
      else
        multiply<B>({scores, kPageTokens, values, layout.value_block_bytes, tokens, sums + first * width, width,
                     factors, after_values},
                    count, width / 16);
    }
  }
  for (int r = 0; r < task.rows; ++r) {
    const float total = sum(load(rows.total[r]));
    if (kNibbles) rotate_groups(sums + r * width, layout.value_dim);
    if (task.out == nullptr) {
      float* const to = task.partial + r * partial_floats(layout);
      for (int i = 0; i < width; ++i) to[i] = sums[r * width + i];
      to[width] = rows.largest[r];
      to[width + 1] = total;
      continue;
    }
    const float* const sink = options.sinks == nullptr ? nullptr : options.sinks + head_of(r);
    copy_scaled(sums + r * width, normaliser(rows.largest[r], total, sink), layout.value_dim,
                task.out + token_of(r) * task.out_stride + head_of(r) * layout.value_dim);
  }
}

}  // namespace
}  // namespace anyaccel::llm
