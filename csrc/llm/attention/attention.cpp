// SPDX-License-Identifier: Apache-2.0
// Divides a step's attention into tasks, and those among threads.
//
// A task is some rows (tokens x heads of one KV head's group) of one query, over its whole context or, for queries of
// few tokens, a part of it. Tasks are made from the query alone and each is done by one thread in one order: results
// are the same bits with any number of threads and whatever else is in the step. Threads get neighbouring tasks of
// about equal cost.
#include "llm/attention/attention.h"

#include <algorithm>
#include <new>

#include "llm/attention/cache.h"
#include "llm/attention/kernels_attention.h"
#include "simd/pick.h"

namespace anyaccel::llm {

namespace {

constexpr int kSplitTokens = 16;  // queries of up to so many tokens have their context divided
constexpr int64_t kPartPages = 4;
constexpr int kPrefillRows = 60;  // of a task: a multiple of the tiles' 4 and 12 rows
static_assert(kPrefillRows <= kTaskRows);

const AttentionKernels& kernels() noexcept {
  static const AttentionKernels& chosen = pick<AttentionKernels>(selected_isa());
  return chosen;
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How one query's attention is divided: `blocks` of rows for each KV head, each over `parts` of the pages.
struct Division {
  int64_t rows;  // of one KV head
  int64_t blocks, parts;
  int64_t begin_page, end_page;  // of what the first token sees, up to the last token
  int64_t partial_rows(int kv_heads) const { return parts > 1 ? rows * parts * kv_heads : 0; }
};

int64_t first_seen(const AttentionOptions& options, int64_t position) {
  int64_t first = 0;
  if (options.window > 0) first = std::max(first, position - options.window + 1);
  if (options.chunk > 0) first = std::max(first, position / options.chunk * options.chunk);
  return first;
}

int64_t end_of_seen(const AttentionOptions& options, int64_t position, int64_t length) {
  if (!options.bidirectional) return position + 1;
  return options.window > 0 ? std::min(length, position + options.window) : length;
}

Division divide(const Query& query, const AttentionShape& shape, const AttentionOptions& options) {
  Division d{};
  d.rows = static_cast<int64_t>(query.tokens) * (shape.heads / shape.kv_heads);
  d.blocks = divide_up(d.rows, kPrefillRows);
  d.begin_page = first_seen(options, query.position) / kPageTokens;
  d.end_page = divide_up(query.position + query.tokens, kPageTokens);
  d.parts = divides_context(query) ? divide_up(d.end_page - d.begin_page, kPartPages) : 1;
  return d;
}

// One task of a query, before its pointers.
struct Piece {
  int kv_head;
  int64_t first_row, rows;
  int64_t begin, end;   // tokens
  int64_t partial_row;  // of the query's partial results
  int64_t cost() const { return (rows + 4) * (end - begin + 8); }
};

// Calls fn(piece) for each piece of a query's attention.
template <class Fn>
void pieces(const Query& query, const Division& d, const AttentionShape& shape, const AttentionOptions& options,
            Fn&& fn) {
  const int64_t group = shape.heads / shape.kv_heads;
  for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
    for (int64_t block = 0; block < d.blocks; ++block) {
      Piece piece{};
      piece.kv_head = kv_head;
      piece.first_row = block * kPrefillRows;
      piece.rows = std::min<int64_t>(kPrefillRows, d.rows - piece.first_row);
      const int64_t first_token = piece.first_row / group, last_token = (piece.first_row + piece.rows - 1) / group;
      const int64_t end = end_of_seen(options, query.position + last_token, query.position + query.tokens);
      for (int64_t part = 0; part < d.parts; ++part) {
        const int64_t pages = d.end_page - d.begin_page;
        piece.begin = (d.begin_page + pages * part / d.parts) * kPageTokens;
        piece.end = std::min(end, (d.begin_page + pages * (part + 1) / d.parts) * kPageTokens);
        if (d.parts == 1) piece.begin = first_seen(options, query.position + first_token) / kPageTokens * kPageTokens;
        piece.partial_row = (kv_head * d.rows + piece.first_row) * d.parts + part * piece.rows;
        fn(piece);
      }
    }
  }
}

// One token, all heads of a KV head in one task: the task that has the end of the context writes the token's key and
// value itself, since no other reads them.
bool appends_itself(const Query& query, const AttentionShape& shape) {
  return query.tokens == 1 && !query.shared && shape.heads / shape.kv_heads <= kPrefillRows;
}

const AppendKernels& append_kernels() noexcept {
  static const AppendKernels& chosen = pick<AppendKernels>(selected_isa());
  return chosen;
}

// `count` tokens of one KV head from the query's token `first` on.
void append_tokens(const AttentionStep& step, const Query& query, int kv_head, int64_t first, int64_t count) noexcept {
  const KvCache::Impl& cache = step.cache->impl();
  const auto layer = static_cast<size_t>(step.layer);
  const AttentionShape& shape = cache.shapes[layer];
  const HeadLayout& layout = cache.layouts[layer];
  const int64_t row = query.row + first;
  append_kernels().append({&layout, cache.at(query.sequence).data.data(),
                           cache.offsets[layer] + layout.bytes * static_cast<size_t>(kv_head),
                           step.k + row * step.k_stride + kv_head * shape.head_dim,
                           step.v + row * step.v_stride + kv_head * shape.value_dim, step.k_stride, step.v_stride,
                           query.position + first, static_cast<int>(count)});
}

// Calls fn(query) for what append() writes: shared queries of one sequence that follow each other are one, since one
// thread writes what is in the same block of 16 tokens.
template <class Fn>
void appended(const std::vector<Query>& queries, const AttentionShape& shape, Fn&& fn) {
  for (size_t i = 0; i < queries.size();) {
    Query query = queries[i++];
    while (query.shared && i < queries.size() && queries[i].shared && queries[i].sequence == query.sequence &&
           queries[i].position == query.position + query.tokens && queries[i].row == query.row + query.tokens)
      query.tokens += queries[i++].tokens;
    if (query.tokens > 0 && !appends_itself(query, shape)) fn(query);
  }
}

size_t thread_scratch_floats(const HeadLayout& layout) { return (task_scratch_floats(layout) + 31) / 16 * 16; }

const AttentionShape& shape_of(const AttentionStep& step) {
  return step.cache->impl().shapes[static_cast<size_t>(step.layer)];
}

}  // namespace

void attend(const AttendTask& task) noexcept {
  static const PairAttentionKernels* const pairs = find_variant<PairAttentionKernels>(selected_isa());
  const bool paired =
      pairs != nullptr && task.layout->format == CacheFormat::bf16 && task.options->distances == nullptr;
  (paired ? pairs->attend : kernels().attend)(task);
}

bool divides_context(const Query& query) noexcept { return query.tokens <= kSplitTokens && !query.whole; }

void AttentionScratch::reserve(const AttentionShape& shape, const std::vector<Query>& queries, int threads) {
  const HeadLayout layout = head_layout(shape, CacheFormat::f32);
  size_t floats = thread_scratch_floats(layout) * static_cast<size_t>(threads);
  for (const Query& query : queries)  // whole contexts: with a window or chunks, fewer parts are needed
    floats +=
        static_cast<size_t>(divide(query, shape, {.scale = 1}).partial_rows(shape.kv_heads) * partial_floats(layout));
  const size_t wanted = floats * sizeof(float);
  if (wanted <= bytes) return;
  const size_t rounded = (wanted + wanted / 4 + 4095) / 4096 * 4096;
  void* fresh = ::operator new(rounded, std::align_val_t{64});
  memory = std::shared_ptr<void>(fresh, [](void* p) { ::operator delete(p, std::align_val_t{64}); });
  bytes = rounded;
}

bool needs_append(const AttentionStep& step) noexcept {
  if (step.k == nullptr) return false;
  const AttentionShape& shape = shape_of(step);
  return std::any_of(step.queries->begin(), step.queries->end(),
                     [&](const Query& query) { return !appends_itself(query, shape); });
}

void append(const AttentionStep& step, int thread, int threads) noexcept {
  const AttentionShape& shape = shape_of(step);
  // Units: 16 tokens of one block and one KV head.
  const auto blocks = [](const Query& query) {
    return divide_up(query.position + query.tokens, 16) - query.position / 16;
  };
  int64_t units = 0;
  appended(*step.queries, shape, [&](const Query& query) { units += blocks(query) * shape.kv_heads; });
  const int64_t begin = units * thread / threads, end = units * (thread + 1) / threads;
  int64_t unit = 0;
  appended(*step.queries, shape, [&](const Query& query) {
    const int64_t count = blocks(query);
    if (unit >= end || unit + count * shape.kv_heads <= begin) {
      unit += count * shape.kv_heads;
      return;
    }
    for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head, unit += count) {
      const int64_t from = std::max<int64_t>(0, begin - unit), to = std::min(count, end - unit);
      if (from >= to) continue;
      const int64_t block = query.position / 16;
      const int64_t first = std::max<int64_t>(0, (block + from) * 16 - query.position);
      const int64_t last = std::min<int64_t>(query.tokens, (block + to) * 16 - query.position);
      append_tokens(step, query, kv_head, first, last - first);
    }
  });
}

void attend(const AttentionStep& step, AttentionScratch& scratch, int thread, int threads) noexcept {
  const KvCache::Impl& cache = step.cache->impl();
  const AttentionShape& shape = shape_of(step);
  const HeadLayout& layout = cache.layouts[static_cast<size_t>(step.layer)];
  const int group = shape.heads / shape.kv_heads;
  float* const memory = static_cast<float*>(scratch.memory.get());
  float* const partials = memory + thread_scratch_floats(layout) * static_cast<size_t>(threads);

  int64_t total = 0;
  if (threads > 1)
    for (const Query& query : *step.queries)
      pieces(query, divide(query, shape, step.options), shape, step.options,
             [&](const Piece& piece) { total += piece.cost(); });

  int64_t done = 0, partial_row = 0;
  for (const Query& query : *step.queries) {
    const Division d = divide(query, shape, step.options);
    if (d.rows == 0) continue;
    uint8_t* const* const pages = query.pages != nullptr ? query.pages : cache.at(query.sequence).data.data();
    const size_t offset = query.pages != nullptr ? 0 : cache.offsets[static_cast<size_t>(step.layer)];
    pieces(query, d, shape, step.options, [&](const Piece& piece) {
      const int64_t cost = piece.cost();
      const int64_t middle = done + cost / 2;
      done += cost;
      if (threads > 1 && (middle * threads < total * thread || middle * threads >= total * (thread + 1))) return;
      if (step.k != nullptr && piece.end > query.position && appends_itself(query, shape))
        append_tokens(step, query, piece.kv_head, 0, 1);
      AttentionOptions options = step.options;
      if (options.alibi_slopes != nullptr) options.alibi_slopes += piece.kv_head * group;
      if (options.sinks != nullptr) options.sinks += piece.kv_head * group;
      DistanceScores distances{};
      if (options.distances != nullptr) {
        distances = *options.distances;
        if (distances.keys != nullptr) distances.keys += static_cast<size_t>(piece.kv_head) * distances.head_bytes;
        if (distances.queries != nullptr) distances.queries += piece.kv_head * distances.head_floats;
        options.distances = &distances;
      }
      if (options.bias != nullptr) options.bias += piece.kv_head * group * options.bias_head;
      AttendTask task{};
      task.layout = &layout;
      task.options = &options;
      task.pages = pages;
      task.offset = offset + layout.bytes * static_cast<size_t>(piece.kv_head);
      task.q = step.q + query.row * step.q_stride + static_cast<int64_t>(piece.kv_head) * group * shape.head_dim;
      task.q_stride = step.q_stride;
      task.group = group;
      task.first_row = static_cast<int>(piece.first_row);
      task.rows = static_cast<int>(piece.rows);
      task.position = query.position;
      task.begin = piece.begin;
      task.end = piece.end;
      task.length = query.position + query.tokens;
      task.many = !divides_context(query);
      task.scratch = memory + thread_scratch_floats(layout) * static_cast<size_t>(thread);
      if (d.parts == 1) {
        task.out =
            step.out + query.row * step.out_stride + static_cast<int64_t>(piece.kv_head) * group * shape.value_dim;
        task.out_stride = step.out_stride;
      } else {
        task.partial = partials + (partial_row + piece.partial_row) * partial_floats(layout);
      }
      attend(task);
    });
    partial_row += d.partial_rows(shape.kv_heads);
  }
}

bool needs_combine(const AttentionStep& step, int) noexcept {
  const AttentionShape& shape = shape_of(step);
  return std::any_of(step.queries->begin(), step.queries->end(),
                     [&](const Query& query) { return divide(query, shape, step.options).parts > 1; });
}

void combine(const AttentionStep& step, AttentionScratch& scratch, int thread, int threads) noexcept {
  const AttentionShape& shape = shape_of(step);
  const HeadLayout& layout = step.cache->impl().layouts[static_cast<size_t>(step.layer)];
  const int group = shape.heads / shape.kv_heads;
  const int64_t floats = partial_floats(layout);
  const float* partials =
      static_cast<const float*>(scratch.memory.get()) + thread_scratch_floats(layout) * static_cast<size_t>(threads);
  int64_t row = 0;  // counts the rows of all divided queries, which threads take in turn
  for (const Query& query : *step.queries) {
    const Division d = divide(query, shape, step.options);
    if (d.parts <= 1) continue;
    pieces(query, d, shape, step.options, [&](const Piece& piece) {
      if (piece.partial_row != (piece.kv_head * d.rows + piece.first_row) * d.parts) return;  // not the first part
      for (int64_t r = piece.first_row; r < piece.first_row + piece.rows; ++r, ++row) {
        if (row % threads != thread) continue;
        const int head = piece.kv_head * group + static_cast<int>(r % group);
        kernels().combine(
            {partials + (piece.partial_row + r - piece.first_row) * floats, piece.rows * floats,
             static_cast<int>(d.parts), shape.value_dim, layout.padded_value_dim,
             step.options.sinks == nullptr ? nullptr : step.options.sinks + head,
             step.out + (query.row + r / group) * step.out_stride + static_cast<int64_t>(head) * shape.value_dim});
      }
    });
    partials += d.partial_rows(shape.kv_heads) * floats;
  }
}

}  // namespace anyaccel::llm
