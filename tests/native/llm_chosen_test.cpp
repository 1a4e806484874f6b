// SPDX-License-Identifier: Apache-2.0
// Attention to chosen tokens, with every instruction set and cache format: scores and attention against double
// precision, the choice against a sort, and attention to copies against attention that hides the others.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "llm/attention/attention.h"
#include "llm/attention/cache.h"
#include "llm/attention/chosen.h"
#include "llm/attention/expanded_keys.h"
#include "simd/isa.h"
#include "simd/pick.h"

namespace {

using namespace anyaccel;
using namespace anyaccel::llm;

std::mt19937 generator(5);

std::vector<float> normal(int64_t count) {
  std::normal_distribution<float> values;
  std::vector<float> out(static_cast<size_t>(count));
  for (float& x : out) x = values(generator);
  return out;
}

struct Free {
  void operator()(float* p) const { ::operator delete(p, std::align_val_t{64}); }
};
std::unique_ptr<float, Free> aligned(size_t floats) {
  return std::unique_ptr<float, Free>(
      static_cast<float*>(::operator new(floats * sizeof(float), std::align_val_t{64})));
}

void test_choice() {
  const auto check = [](const std::vector<float>& scores, int64_t top_k) {
    const auto count = static_cast<int64_t>(scores.size());
    std::vector<uint64_t> words(static_cast<size_t>((count + kPageTokens - 1) / kPageTokens), ~uint64_t{0});
    choose_highest(scores.data(), count, top_k, words.data());
    std::vector<int64_t> order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
    });
    std::vector<uint64_t> wanted(words.size());
    for (int64_t i = 0; i < top_k; ++i)
      wanted[static_cast<size_t>(order[static_cast<size_t>(i)] / kPageTokens)] |=
          uint64_t{1} << order[static_cast<size_t>(i)] % kPageTokens;
    CHECK(words == wanted);
  };
  for (const int64_t count : {2, 64, 65, 1000})
    for (int64_t top_k = 1; top_k < count; top_k += 1 + count / 5) {
      std::vector<float> scores = normal(count);
      check(scores, top_k);
      for (float& x : scores) x = std::round(x) + 0.0f;  // most are equal
      check(scores, top_k);
      check(std::vector<float>(scores.size(), 0.0f), top_k);
    }
}

// A layer's latents and an indexer's keys of one sequence.
struct World {
  int heads, dim, value_dim, index_heads, index_dim;
  int64_t tokens;
  std::vector<float> keys, index_keys;  // a value is the first part of a key
  KvCache cache;
  int sequence;

  World(CacheFormat format, int heads_, int dim_, int value_dim_, int index_heads_, int index_dim_, int64_t tokens_)
      : heads(heads_),
        dim(dim_),
        value_dim(value_dim_),
        index_heads(index_heads_),
        index_dim(index_dim_),
        tokens(tokens_),
        keys(normal(tokens * dim)),
        index_keys(normal(tokens * index_dim)),
        cache({{heads, 1, dim, value_dim}, {index_heads, 1, index_dim, 0}}, format, size_t{1} << 30),
        sequence(cache.create()) {
    cache.extend(sequence, tokens);
    const std::vector<Query> queries{{sequence, 0, static_cast<int>(tokens), 0}};
    AttentionStep step{};
    step.cache = &cache;
    step.queries = &queries;
    step.k = step.v = keys.data();
    step.k_stride = step.v_stride = dim;
    append(step, 0, 1);
    step.layer = 1;
    step.k = step.v = index_keys.data();
    step.k_stride = step.v_stride = index_dim;
    append(step, 0, 1);
  }
};

double tolerance(CacheFormat format) {
  return format == CacheFormat::f32 ? 1e-5 : format == CacheFormat::bf16 ? 1e-2 : 2e-2;
}

std::vector<float> test_scores(const ChosenKernels& kernels, World& world) {
  const KvCache::Impl& impl = world.cache.impl();
  const int64_t pages = (world.tokens + kPageTokens - 1) / kPageTokens;
  const std::vector<float> q = normal(int64_t{world.index_heads} * world.index_dim),
                           weights = normal(world.index_heads);
  const auto scores = aligned(static_cast<size_t>(pages * kPageTokens));
  for (const auto& [begin, end] : {std::pair{int64_t{0}, pages / 2}, {pages / 2, pages}})
    kernels.score({&impl.layouts[1], impl.at(world.sequence).data.data(), impl.offsets[1], q.data(), weights.data(),
                   world.index_heads, begin, end, world.tokens, scores.get()});
  for (int64_t t = 0; t < world.tokens; ++t) {
    double wanted = 0, size = 0;
    for (int head = 0; head < world.index_heads; ++head) {
      double product = 0;
      for (int i = 0; i < world.index_dim; ++i)
        product += static_cast<double>(q[static_cast<size_t>(head * world.index_dim + i)]) *
                   static_cast<double>(world.index_keys[static_cast<size_t>(t * world.index_dim + i)]);
      wanted += static_cast<double>(weights[static_cast<size_t>(head)]) * std::max(product, 0.0);
      size += std::abs(static_cast<double>(weights[static_cast<size_t>(head)]) * product);
    }
    CHECK(std::abs(static_cast<double>(scores.get()[t]) - wanted) <=
          tolerance(world.cache.format()) * (size + std::sqrt(static_cast<double>(world.index_dim))));
  }
  return {scores.get(), scores.get() + world.tokens};
}

// The last token sees `chosen` ones: of the cache, where the others are hidden, and of copies.
void test_attention(Isa isa, World& world, const std::vector<float>& scores, int64_t chosen) {
  const KvCache::Impl& impl = world.cache.impl();
  const HeadLayout& layout = impl.layouts[0];
  const CacheFormat format = world.cache.format();
  const auto& pages = impl.at(world.sequence).data;
  std::vector<uint64_t> words(pages.size());
  choose_highest(scores.data(), world.tokens, chosen, words.data());
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < world.tokens; ++t)
    if (words[static_cast<size_t>(t / kPageTokens)] >> t % kPageTokens & 1) positions.push_back(t);
  CHECK(static_cast<int64_t>(positions.size()) == chosen);

  const int64_t count = (chosen + kPageTokens - 1) / kPageTokens;
  const auto copies = aligned(layout.bytes / sizeof(float) * static_cast<size_t>(count));
  std::fill_n(copies.get(), layout.bytes / sizeof(float) * static_cast<size_t>(count), std::nanf(""));
  std::vector<uint8_t*> copied;
  for (int64_t page = 0; page < count; ++page)
    copied.push_back(reinterpret_cast<uint8_t*>(copies.get()) + layout.bytes * static_cast<size_t>(page));
  for (int64_t first = 0; first < chosen; first += 16)
    pick<ChosenKernels>(isa).copy({&layout, pages.data(), impl.offsets[0], positions.data() + first,
                                   static_cast<int>(std::min<int64_t>(16, chosen - first)),
                                   copied[static_cast<size_t>(first / kPageTokens)],
                                   static_cast<int>(first % kPageTokens)});

  const std::vector<float> q = normal(int64_t{world.heads} * world.dim);
  const auto scratch = aligned(task_scratch_floats(layout) + 16);
  const float scale = 1 / std::sqrt(static_cast<float>(world.dim));
  const auto attend = [&](uint8_t* const* from, size_t offset, int64_t tokens, const uint64_t* seen) {
    std::vector<float> out(static_cast<size_t>(world.heads * world.value_dim));
    AttentionOptions options{scale};
    options.seen = seen;
    AttendTask task{};
    task.layout = &layout;
    task.options = &options;
    task.pages = from;
    task.offset = offset;
    task.q = q.data();
    task.group = task.rows = world.heads;
    task.position = tokens - 1;
    task.end = task.length = tokens;
    task.scratch = scratch.get();
    task.out = out.data();
    pick<AttentionKernels>(isa).attend(task);
    return out;
  };
  const std::vector<float> hidden = attend(pages.data(), impl.offsets[0], world.tokens, words.data());
  const std::vector<float> seen = attend(copied.data(), 0, chosen, nullptr);
  std::vector<float> kept(static_cast<size_t>(world.tokens * world.dim));
  read_keys(world.cache, 0, world.sequence, 0, world.tokens, kept.data(), world.dim);
  for (int head = 0; head < world.heads; ++head) {
    std::vector<double> weights;
    double total = 0;
    for (const int64_t t : positions) {
      double product = 0;
      for (int i = 0; i < world.dim; ++i)
        product += static_cast<double>(q[static_cast<size_t>(head * world.dim + i)]) *
                   static_cast<double>(kept[static_cast<size_t>(t * world.dim + i)]);
      weights.push_back(std::exp(product * static_cast<double>(scale)));
      total += weights.back();
    }
    for (int i = 0; i < world.value_dim; ++i) {
      double wanted = 0;
      for (size_t n = 0; n < positions.size(); ++n)
        wanted +=
            weights[n] / total * static_cast<double>(world.keys[static_cast<size_t>(positions[n] * world.dim + i)]);
      const auto at = static_cast<size_t>(head * world.value_dim + i);
      const double most = format == CacheFormat::i4 ? 0.4 : tolerance(format) * 2;  // of values of about 1
      CHECK(std::abs(static_cast<double>(hidden[at]) - wanted) <= most);
      CHECK(std::abs(static_cast<double>(seen[at]) - wanted) <= most);
      // The same values in another order; with four bits weights are rounded, in groups of neighbours.
      CHECK(std::abs(hidden[at] - seen[at]) <= (format == CacheFormat::i4 ? 0.1f : 1e-5f));
    }
  }
}

}  // namespace

int main() {
  test_choice();
  for (const Isa isa : {Isa::scalar, Isa::portable, Isa::avx2, Isa::avx512, Isa::neon}) {
    if (!can_run(isa) || (kQuick && isa != highest_of_every_kernel(selected_isa()))) continue;
    for (const CacheFormat format : {CacheFormat::f32, CacheFormat::bf16, CacheFormat::i8, CacheFormat::i4})
      for (const auto& [heads, dim, value_dim, index_heads, index_dim, tokens, chosen] :
           {std::tuple{3, 20, 16, 5, 20, 130, 33}, {1, 24, 17, 1, 7, 64, 63}, {17, 96, 64, 33, 128, 301, 128}}) {
        World world(format, heads, dim, value_dim, index_heads, index_dim, tokens);
        const std::vector<float> scores = test_scores(pick<ChosenKernels>(isa), world);
        test_attention(isa, world, scores, chosen);
      }
    std::printf("%s: passed\n", isa_name(isa));
  }
  return 0;
}
