// SPDX-License-Identifier: Apache-2.0
// The key/value cache and attention over it: every instruction set, cache format and option against double precision;
// sharing, copying and giving back of pages against plain vectors.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "common/team.h"
#include "llm/attention/attention.h"
#include "llm/attention/distances.h"
#include "llm/attention/expanded_keys.h"
#include "llm/attention/rotate_groups.h"
#include "simd/convert.h"
#include "simd/isa.h"

namespace {

using namespace anyaccel;
using namespace anyaccel::llm;

std::mt19937 generator(11);
float normal(float scale) { return std::normal_distribution<float>(0, scale)(generator); }
int below(int n) { return static_cast<int>(generator() % static_cast<unsigned>(n)); }

float as_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

float half(float x) { return simd::from_f16(simd::to_f16(x)); }

// The scalar code and all code with sanitizers take most of the time: they do a part.
bool slow() { return kSanitized || selected_isa() == Isa::scalar; }

// Whether queries and weights of keys are rounded to bfloat16, as keys and values are.
bool pairs(CacheFormat format) { return format == CacheFormat::bf16 && includes(selected_isa(), Isa::avx512_bf16); }

// Of those that differ from others in bfloat16 only, no more than that.
std::vector<CacheFormat> formats() {
  if (row_of(selected_isa()).variants == Variants::some_kernels) return {CacheFormat::bf16};
  return {CacheFormat::f32, CacheFormat::bf16, CacheFormat::i8, CacheFormat::i4};
}

// What the cache keeps of a vector, up to half a step of i8.
std::vector<double> kept(const float* x, int n, CacheFormat format) {
  std::vector<double> out(x, x + n);
  if (format == CacheFormat::bf16)
    for (double& v : out) v = as_bf16(static_cast<float>(v));
  if (format == CacheFormat::i8) {
    float largest = 0;
    for (int i = 0; i < n; ++i) largest = std::max(largest, std::abs(x[i]));
    const float inverse = largest > 0 ? 127.0f / largest : 0;
    for (double& v : out) v = std::round(static_cast<float>(v) * inverse) * (largest / 127.0f);
  }
  if (format == CacheFormat::i4) {
    std::vector<float> rotated(x, x + n);
    rotate_groups(rotated.data(), n);
    for (int i = 0; i < n; i += kCacheGroup) {
      const int end = std::min(n, i + kCacheGroup);
      const float *const from = rotated.data() + i, *const to = rotated.data() + end;
      const float low = std::clamp(*std::min_element(from, to), -65504.0f, 65504.0f);
      const float high = std::max(*std::max_element(from, to), low);
      const float scale = half(std::min((high - low) * (1.0f / 15), 65504.0f)), least = half(low);
      const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
      for (int j = i; j < end; ++j) {
        const float place = (rotated[static_cast<size_t>(j)] - least) * inverse + 0.5f;
        out[static_cast<size_t>(j)] = static_cast<double>(least) + scale * std::clamp(std::floor(place), 0.0f, 15.0f);
      }
      if (end - i < kCacheGroup) continue;
      std::vector<double> back(kCacheGroup, 0.0);
      for (int j = 0; j < kCacheGroup; ++j)  // by the matrix: element (a, b) is -1 to the number of bits they share
        for (int k = 0; k < kCacheGroup; ++k)
          back[static_cast<size_t>(j)] += out[static_cast<size_t>(i + k)] *
                                          (std::popcount(static_cast<unsigned>(j & k)) % 2 != 0 ? -1 : 1) /
                                          std::sqrt(static_cast<double>(kCacheGroup));
      std::copy(back.begin(), back.end(), out.begin() + i);
    }
  }
  return out;
}

// The keys and values of one sequence, as plain vectors: [token][layer][kv head].
struct Plain {
  struct Token {
    std::vector<std::vector<std::vector<double>>> k, v;
  };
  std::vector<std::shared_ptr<Token>> tokens;  // shared by forks
};

struct Options {
  float softcap = 0;
  int window = 0, chunk = 0;
  bool alibi = false, sinks = false;
};

// A cache and its double, stepped together.
struct World {
  std::vector<AttentionShape> shapes;
  CacheFormat format;
  KvCache cache;
  std::map<int, Plain> plain;
  double squares = 0;  // of all differences
  int64_t compared = 0;

  // With four bits queries and weights are rounded, too. This test does not: single values may be further off, not all.
  ~World() {
    const double most = format == CacheFormat::i4 ? 0.018 : pairs(format) ? 1e-3 : 1;
    CHECK(squares <= most * most * static_cast<double>(compared));
  }
  World(std::vector<AttentionShape> layers, CacheFormat f, size_t limit = size_t{1} << 30)
      : shapes(layers), format(f), cache(layers, f, limit) {}

  struct Step {
    std::vector<std::vector<float>> q, k, v;  // of each layer
    std::vector<Query> queries;
    int rows = 0;
  };

  // New tokens for some sequences: {sequence, tokens}. extend()s them.
  Step prepare(const std::vector<std::pair<int, int>>& wanted, float q_scale = 1, float k_scale = 1) {
    Step step;
    for (const auto& [sequence, tokens] : wanted) {
      step.queries.push_back({sequence, cache.length(sequence), tokens, step.rows});
      cache.extend(sequence, tokens);
      step.rows += tokens;
    }
    for (const AttentionShape& s : shapes) {
      const auto fill = [&](int width, float scale) {
        std::vector<float> x(static_cast<size_t>(step.rows * width));
        for (float& value : x) value = normal(scale);
        return x;
      };
      step.q.push_back(fill(s.heads * s.head_dim, q_scale));
      step.k.push_back(fill(s.kv_heads * s.head_dim, k_scale));
      step.v.push_back(fill(s.kv_heads * s.value_dim, 1));
    }
    for (const Query& query : step.queries) {
      for (int t = 0; t < query.tokens; ++t) {
        auto token = std::make_shared<Plain::Token>();
        for (size_t l = 0; l < shapes.size(); ++l) {
          const AttentionShape& s = shapes[l];
          token->k.emplace_back();
          token->v.emplace_back();
          for (int h = 0; h < s.kv_heads; ++h) {
            const size_t at = static_cast<size_t>((query.row + t) * s.kv_heads + h);
            token->k[l].push_back(kept(&step.k[l][at * static_cast<size_t>(s.head_dim)], s.head_dim, format));
            token->v[l].push_back(kept(&step.v[l][at * static_cast<size_t>(s.value_dim)], s.value_dim, format));
          }
        }
        plain[query.sequence].tokens.push_back(token);
      }
    }
    return step;
  }

  struct Extras {
    std::vector<float> slopes, sinks;
    AttentionOptions options;
  };
  Extras extras(int heads, int head_dim, const Options& o) {
    Extras e;
    e.options.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
    for (int h = 0; h < heads; ++h) {
      e.slopes.push_back(std::pow(2.0f, -8.0f * static_cast<float>(h + 1) / static_cast<float>(heads)));
      e.sinks.push_back(3.0f * static_cast<float>(h % 5) - 4);
    }
    e.options.softcap = o.softcap;
    e.options.window = o.window;
    e.options.chunk = o.chunk;
    if (o.alibi) e.options.alibi_slopes = e.slopes.data();
    if (o.sinks) e.options.sinks = e.sinks.data();
    return e;
  }

  std::vector<float> run(const Step& step, size_t layer, const AttentionOptions& options, int threads,
                         AttentionScratch& scratch, Team* team = nullptr) {
    const AttentionShape& s = shapes[layer];
    std::vector<float> out(static_cast<size_t>(step.rows * s.heads * s.value_dim), -77.0f);
    const AttentionStep work{&cache,
                             static_cast<int>(layer),
                             options,
                             &step.queries,
                             step.q[layer].data(),
                             step.k[layer].data(),
                             step.v[layer].data(),
                             s.heads * s.head_dim,
                             s.kv_heads * s.head_dim,
                             s.kv_heads * s.value_dim,
                             out.data(),
                             s.heads * s.value_dim};
    scratch.reserve(s, step.queries, threads);
    if (team != nullptr) {
      team->run([&](int thread) {
        append(work, thread, threads);
        team->barrier(thread);
        attend(work, scratch, thread, threads);
        team->barrier(thread);
        if (needs_combine(work, threads)) combine(work, scratch, thread, threads);
      });
      return out;
    }
    for (int t = 0; t < threads; ++t) append(work, t, threads);
    for (int t = 0; t < threads; ++t) attend(work, scratch, t, threads);
    if (needs_combine(work, threads))
      for (int t = 0; t < threads; ++t) combine(work, scratch, t, threads);
    return out;
  }

  void check(const Step& step, size_t layer, const AttentionOptions& o, const std::vector<float>& out) {
    const AttentionShape& s = shapes[layer];
    const int group = s.heads / s.kv_heads;
    for (const Query& query : step.queries) {
      const auto& tokens = plain[query.sequence].tokens;
      for (int t = 0; t < query.tokens; ++t) {
        // The oracle is slow.
        if (query.tokens > 8 && t % (kSanitized ? 37 : 11) != 0 && t < query.tokens - 2) continue;
        const int64_t p = query.position + t;
        int64_t first = 0;
        if (o.window > 0) first = std::max<int64_t>(first, p - o.window + 1);
        if (o.chunk > 0) first = std::max<int64_t>(first, p / o.chunk * o.chunk);
        for (int h = s.heads > 4 ? t % 3 : 0; h < s.heads; h += s.heads > 4 ? 3 : 1) {
          const size_t kv = static_cast<size_t>(h / group);
          const float* q = &step.q[layer][static_cast<size_t>(((query.row + t) * s.heads + h) * s.head_dim)];
          std::vector<double> scores;
          // A query is rounded when it has been scaled, for powers of 2 where its scores are not changed.
          const bool changed = o.softcap > 0 || o.alibi_slopes != nullptr;
          const float scale = changed ? o.scale : o.scale * 1.44269504088896341f;
          std::vector<double> rounded(q, q + s.head_dim);
          if (pairs(format))
            for (double& x : rounded)
              x = static_cast<double>(as_bf16(static_cast<float>(x) * scale)) / static_cast<double>(scale);
          for (int64_t j = first; j <= p; ++j) {
            const auto& k = tokens[static_cast<size_t>(j)]->k[layer][kv];
            double score = 0;
            for (size_t i = 0; i < k.size(); ++i) score += k[i] * rounded[i];
            score *= o.scale;
            if (o.softcap > 0) score = o.softcap * std::tanh(score / o.softcap);
            if (o.alibi_slopes != nullptr) score += o.alibi_slopes[h] * static_cast<double>(j - p);
            scores.push_back(score);
          }
          double top = *std::max_element(scores.begin(), scores.end()), total = 0;
          if (o.sinks != nullptr) top = std::max(top, static_cast<double>(o.sinks[h]));
          for (double& score : scores) total += (score = std::exp(score - top));
          if (o.sinks != nullptr) total += std::exp(o.sinks[h] - top);
          const float* got = &out[static_cast<size_t>(((query.row + t) * s.heads + h) * s.value_dim)];
          // A value on the edge of two i8 steps may be rounded differently by this test.
          const double tolerance = format == CacheFormat::i4   ? 0.4
                                   : pairs(format)             ? 1e-2
                                   : format == CacheFormat::i8 ? 2e-4
                                                               : 2e-5;
          for (int i = 0; i < s.value_dim; ++i) {
            double want = 0;
            for (size_t j = 0; j < scores.size(); ++j)
              want += scores[j] / total * tokens[static_cast<size_t>(first) + j]->v[layer][kv][static_cast<size_t>(i)];
            squares += (got[i] - want) * (got[i] - want);
            ++compared;
            if (!(std::abs(got[i] - want) <= tolerance)) {
              std::fprintf(stderr, "sequence %d position %d head %d value %d: %.9g, not %.9g\n", query.sequence,
                           static_cast<int>(p), h, i, static_cast<double>(got[i]), want);
              std::abort();
            }
          }
        }
      }
    }
  }
};

const Options kOptions[] = {{},
                            {.window = 20},
                            {.window = 100},
                            {.chunk = 48},
                            {.softcap = 5},
                            {.alibi = true},
                            {.sinks = true},
                            {.softcap = 3, .window = 70, .alibi = true, .sinks = true}};

// Prompts, single tokens, chunks and batches, of all shapes.
void test_shapes() {
  const AttentionShape shapes[] = {{9, 3, 64, 64},   {4, 4, 32, 32},   {8, 1, 80, 80},   {6, 2, 96, 96},
                                   {5, 1, 100, 100}, {4, 2, 192, 128}, {3, 3, 256, 256}, {16, 1, 128, 128},
                                   {2, 1, 33, 7},    {7, 1, 40, 72}};
  Team team(3);
  AttentionScratch scratch;
  int turn = 0;
  for (size_t s = 0; s < std::size(shapes); ++s) {
    const AttentionShape& shape = shapes[s];
    for (size_t f = 0; f < formats().size(); ++f) {
      // Emulated, each shape has one or two of the formats.
      if (kEmulated && (s + f) % (kQuick ? 4 : 2) != 0) continue;
      if (kQuick && s > 5) continue;
      const CacheFormat format = formats()[f];
      World world({shape, {2, 1, 16, 16}}, format);
      const int a = world.cache.create(), b = world.cache.create(), c = world.cache.create();
      const std::vector<std::pair<int, int>> steps[] = {{{a, 1}},
                                                        {{b, 70}, {a, 1}},
                                                        {{c, kQuick ? 70 : 200}},
                                                        {{a, 3}, {b, 1}, {c, 1}},
                                                        {{c, 17}, {b, 16}},
                                                        {{c, kQuick ? 20 : 64}, {a, kQuick ? 30 : 60}},
                                                        {{c, 1}},
                                                        {{c, 2}, {b, 1}, {a, 1}}};
      for (const auto& wanted : steps) {
        const auto step = world.prepare(wanted, turn % 3 == 0 ? 4.0f : 1.0f);
        const Options& options = kOptions[static_cast<size_t>(turn++) % std::size(kOptions)];
        const auto extras = world.extras(shape.heads, shape.head_dim, options);
        const auto out = world.run(step, 0, extras.options, 3, scratch, &team);
        world.check(step, 0, extras.options, out);
        const auto simple = world.extras(2, 16, {});
        world.check(step, 1, simple.options, world.run(step, 1, simple.options, 2, scratch));
      }
    }
  }
  for (size_t f = 0; f < formats().size(); ++f) {
    for (size_t o = 0; o < std::size(kOptions); ++o) {
      if (kEmulated && (f + 3 * o) % (kQuick ? 8 : 2) != 0) continue;
      const CacheFormat format = formats()[f];
      const Options& options = kOptions[o];
      World world({{6, 2, 64, 64}}, format);
      const int a = world.cache.create();
      const auto extras = world.extras(6, 64, options);
      for (const int tokens : {kQuick ? 70 : 130, 1, 1, kQuick ? 40 : slow() ? 90 : 300, 5, 1}) {
        const auto step = world.prepare({{a, tokens}}, 2);
        world.check(step, 0, extras.options, world.run(step, 0, extras.options, 2, scratch));
      }
    }
  }
}

// Keys beyond what 16 bits hold: never NaN, and with scales in floats as exact as others.
void test_large_keys() {
  AttentionScratch scratch;
  for (const CacheFormat format : formats()) {
    for (const float size : {1e4f, 1e5f, 1e7f}) {
      if (kQuick && size != 1e5f) continue;
      World world({{6, 2, 64, 48}}, format);
      const int a = world.cache.create();
      const auto extras = world.extras(6, 64, {});
      for (const int tokens : {40, 1, 1, 9}) {
        const auto step = world.prepare({{a, tokens}}, 1 / size, size);
        world.check(step, 0, extras.options, world.run(step, 0, extras.options, 2, scratch));
      }
    }
  }
}

// The same bits with any number of threads and in any company.
void test_reproducible() {
  for (const CacheFormat format : formats()) {
    if (kQuick && format != CacheFormat::i8) continue;
    World world({{6, 2, 64, 48}}, format);
    AttentionScratch scratch;
    const int a = world.cache.create(), b = world.cache.create();
    const auto options = world.extras(6, 64, {}).options;
    for (const int tokens : {slow() ? 270 : 700, 1, 9, 64, 1}) {
      if (kQuick && tokens != 270 && tokens != 9) continue;
      const int64_t length = world.cache.length(a), other = world.cache.length(b);
      const auto step = world.prepare({{b, 33}, {a, tokens}});
      const auto want = world.run(step, 0, options, 1, scratch);
      for (const int threads : {2, 3, 7, 16}) {
        if (kQuick && threads % 13 != 3) continue;
        CHECK(world.run(step, 0, options, threads, scratch) == want);
      }
      World::Step alone;
      alone.queries = {{a, length, tokens, 0}};
      alone.rows = tokens;
      alone.q = {{step.q[0].begin() + 33 * 6 * 64, step.q[0].end()}};
      alone.k = {{step.k[0].begin() + 33 * 2 * 64, step.k[0].end()}};
      alone.v = {{step.v[0].begin() + 33 * 2 * 48, step.v[0].end()}};
      world.cache.truncate(a, length);
      world.cache.extend(a, tokens);
      const auto got = world.run(alone, 0, options, 2, scratch);
      CHECK(std::equal(got.begin(), got.end(), want.begin() + 33 * 6 * 48));
      CHECK(world.cache.length(b) == other + 33);
    }
  }
}

// A prompt has the same bits in one step as in several.
void test_chunks() {
  constexpr int kHeads = 6, kGroups = 2, kTokens = 190;
  for (const CacheFormat format : formats())
    for (const int dim : {40, 64}) {
      if (kQuick && format != CacheFormat::bf16) continue;
      World world({{kHeads, kGroups, dim, dim}}, format);
      AttentionScratch scratch;
      const auto options = world.extras(kHeads, dim, {.window = 150}).options;
      const int whole = world.cache.create(), parts = world.cache.create();
      const auto step = world.prepare({{whole, kTokens}});
      const auto want = world.run(step, 0, options, 1, scratch);
      for (const auto& [begin, end] : {std::pair{0, 37}, {37, 101}, {101, 119}, {119, kTokens}}) {
        const auto part = [&, first = begin, last = end](const std::vector<float>& x, int width) {
          return std::vector<float>(x.begin() + first * width * dim, x.begin() + last * width * dim);
        };
        World::Step some;
        some.queries = {{parts, begin, end - begin, 0}};
        some.rows = end - begin;
        some.q = {part(step.q[0], kHeads)};
        some.k = {part(step.k[0], kGroups)};
        some.v = {part(step.v[0], kGroups)};
        world.cache.extend(parts, end - begin);
        CHECK(world.run(some, 0, options, 1, scratch) == part(want, kHeads));
      }
    }
}

// Random lives of sequences. Every step's attention reads all that was kept.
void test_random_lives(CacheFormat format, int rounds) {
  World world({{2, 1, 16, 16}, {4, 2, 8, 24}}, format);
  KvCache& cache = world.cache;
  AttentionScratch scratch;
  std::vector<int> alive;
  const auto forget = [&](int sequence) {
    cache.destroy(sequence);
    world.plain.erase(sequence);
    std::erase(alive, sequence);
  };
  for (int round = 0; round < rounds; ++round) {
    const int choice = below(10);
    if (alive.empty() || (choice == 0 && alive.size() < 12)) {
      alive.push_back(cache.create());
      CHECK(cache.length(alive.back()) == 0 && cache.exists(alive.back()));
    } else if (choice <= 2 && alive.size() < 12) {
      const int from = alive[static_cast<size_t>(below(static_cast<int>(alive.size())))];
      const int64_t tokens = below(static_cast<int>(cache.length(from)) + 1);
      const size_t used = cache.used_bytes();
      const int fork = cache.fork(from, tokens);
      CHECK(cache.used_bytes() == used && cache.length(fork) == tokens);
      auto& known = world.plain[from].tokens;
      world.plain[fork].tokens.assign(known.begin(), known.begin() + tokens);
      alive.push_back(fork);
    } else if (choice == 3) {
      const int sequence = alive[static_cast<size_t>(below(static_cast<int>(alive.size())))];
      const int64_t tokens = below(static_cast<int>(cache.length(sequence)) + 1);
      cache.truncate(sequence, tokens);
      world.plain[sequence].tokens.resize(static_cast<size_t>(tokens));
    } else if (choice == 4 && alive.size() > 3) {
      forget(alive[static_cast<size_t>(below(static_cast<int>(alive.size())))]);
    } else {
      std::vector<std::pair<int, int>> wanted;
      for (const int sequence : alive)
        if (below(2) == 0 && cache.length(sequence) < 400)
          wanted.push_back({sequence, below(4) == 0 ? 1 + below(90) : 1});
      size_t predicted = cache.used_bytes();
      for (size_t i = 0; i < wanted.size(); ++i) {
        const size_t used = cache.used_bytes(), bytes = cache.extend_bytes(wanted[i].first, wanted[i].second);
        cache.extend(wanted[i].first, wanted[i].second);
        CHECK(cache.used_bytes() == used + bytes);
        cache.truncate(wanted[i].first, cache.length(wanted[i].first) - wanted[i].second);
      }
      CHECK(cache.used_bytes() >= predicted);
      const auto step = world.prepare(wanted);
      for (size_t layer = 0; layer < 2; ++layer) {
        const AttentionShape& s = world.shapes[layer];
        const auto extras = world.extras(s.heads, s.head_dim, {});
        world.check(step, layer, extras.options, world.run(step, layer, extras.options, 1 + below(3), scratch));
      }
    }
    CHECK(cache.sequences() == alive.size() && cache.used_bytes() <= cache.reserved_bytes());
  }
  while (!alive.empty()) forget(alive.back());
  CHECK(cache.used_bytes() == 0 && cache.reserved_bytes() <= size_t{64} << 20);
}

template <class Error, class Fn>
bool throws(Fn&& fn) {
  try {
    fn();
  } catch (const Error&) {
    return true;
  }
  return false;
}

void test_limits() {
  const AttentionShape shape{4, 2, 64, 64};
  const size_t page = KvCache({shape}, CacheFormat::bf16, 0).page_bytes();
  CHECK(page == size_t{2} * 64 * (64 + 64) * 2);
  KvCache cache({shape}, CacheFormat::bf16, 5 * page + 7);
  const int a = cache.create(), b = cache.create();
  cache.extend(a, 3 * 64 - 1);
  CHECK(cache.used_bytes() == 3 * page && cache.extend_bytes(a, 1) == 0 && cache.extend_bytes(a, 2) == page);
  try {
    cache.extend(b, 3 * 64);
    CHECK(false);
  } catch (const OutOfCache& error) {
    CHECK(error.needed == 3 * page && error.free == 2 * page && error.limit == 5 * page + 7);
  }
  CHECK(cache.length(b) == 0 && cache.used_bytes() == 3 * page);
  cache.extend(b, 2 * 64);
  const int c = cache.fork(a, 100);
  CHECK(throws<OutOfCache>([&] { cache.extend(c, 1); }) && cache.length(c) == 100);
  CHECK(throws<OutOfCache>([&] { cache.extend(a, 2); }) && cache.length(a) == 191);
  cache.truncate(b, 64);
  cache.extend(c, 1);  // its own copy of the second page
  CHECK(cache.used_bytes() == 5 * page);
  CHECK(throws<std::invalid_argument>([&] { cache.fork(a, 192); }));
  CHECK(throws<std::invalid_argument>([&] { cache.truncate(a, 192); }));
  CHECK(throws<std::invalid_argument>([&] { cache.extend(a, -1); }));
  CHECK(throws<std::out_of_range>([&] { cache.length(99); }) && throws<std::out_of_range>([&] { cache.destroy(99); }));
  CHECK(throws<std::invalid_argument>([] { KvCache({{5, 2, 8, 8}}, CacheFormat::f32, 1); }));
  for (const int sequence : {a, b, c}) cache.destroy(sequence);
  CHECK(cache.used_bytes() == 0 && cache.sequences() == 0);

  // Much memory goes back to the system, not only to the pool.
  KvCache large({shape}, CacheFormat::f32, size_t{1} << 30);
  std::vector<int> many;
  for (int i = 0; i < 50; ++i) {
    many.push_back(large.create());
    large.extend(many.back(), 64 * 40);
  }
  const size_t most = large.reserved_bytes();
  CHECK(most >= large.used_bytes() && large.used_bytes() == 50 * 40 * large.page_bytes());
  std::shuffle(many.begin(), many.end(), generator);
  for (const int sequence : many) large.destroy(sequence);
  CHECK(large.used_bytes() == 0 && large.reserved_bytes() <= size_t{64} << 20);
}

// A NaN stays in its sequence, also when its page is used again, and in what comes after it.
void test_nan() {
  for (const CacheFormat format : formats()) {
    World world({{2, 1, 32, 32}}, format);
    AttentionScratch scratch;
    const auto options = world.extras(2, 32, {}).options;
    const int a = world.cache.create(), b = world.cache.create();
    auto step = world.prepare({{a, 70}, {b, 3}});
    for (size_t i = 40 * 32; i < 70 * 32; ++i) step.k[0][i] = step.v[0][i] = i % 2 != 0 ? std::nanf("") : INFINITY;
    const auto out = world.run(step, 0, options, 2, scratch);
    for (size_t i = 0; i < 73 * 64; ++i) {
      if (i >= 70 * 64) CHECK(std::isfinite(out[i]));
      if (i >= 40 * 64 && i < 70 * 64) CHECK(!std::isfinite(out[i]));
    }
    world.cache.destroy(a);
    world.plain.erase(a);
    const int c = world.cache.create();
    for (const int tokens : {1, 2, 1, 14, 1, 30, 20}) {
      step = world.prepare({{c, tokens}});
      world.check(step, 0, options, world.run(step, 0, options, 1, scratch));
    }
  }
}

// Keys that are made for one query lie where others were, some of which were no numbers: what follows a key whose size
// the kernels round up is not seen.
void test_expanded_keys() {
  constexpr int kWide = 16, kTokens = 70;
  for (const CacheFormat format : {CacheFormat::f32, CacheFormat::bf16})
    for (const int narrow : {1, 2, 3, 5, 7, 8, 10, 15}) {
      ExpandedKeys made;
      const std::vector<float> nothing(size_t{kTokens} * kWide, std::nanf(""));
      made.reserve(kWide, kWide, format, 1, kTokens);
      made.append(0, 0, kTokens, nothing.data(), nothing.data(), kWide);

      std::vector<float> k(size_t{kTokens} * kWide), v(k.size()), q(k.size()), out(k.size());
      for (std::vector<float>* each : {&k, &v, &q})
        for (float& x : *each) x = as_bf16(normal(1));
      made.reserve(narrow, kWide, format, 1, kTokens);
      made.append(0, 0, kTokens, k.data(), v.data(), kWide);
      const AttentionOptions options{.scale = 0.5f};
      made.attend(0, options, {.sequence = 0, .position = 0, .tokens = kTokens, .row = 0}, q.data(), kWide, out.data(),
                  kWide);
      for (size_t t = 0; t < kTokens; ++t) {
        std::vector<double> weights(t + 1);
        double total = 0;
        for (size_t seen = 0; seen <= t; ++seen) {
          double score = 0;
          for (size_t i = 0; i < static_cast<size_t>(narrow); ++i) score += q[t * kWide + i] * k[seen * kWide + i];
          total += weights[seen] = std::exp(0.5 * score);
        }
        for (size_t i = 0; i < kWide; ++i) {
          double wanted = 0;
          for (size_t seen = 0; seen <= t; ++seen) wanted += weights[seen] / total * v[seen * kWide + i];
          CHECK(std::abs(out[t * kWide + i] - wanted) < (pairs(format) ? 3e-2 : 1e-4));
        }
      }
    }
}

// Scores by distance beside the formula, with distances that share rows and some that are beyond the last row.
void test_distances() {
  constexpr int kHeads = 2, kTokens = 150;
  for (const CacheFormat format : {CacheFormat::f32, CacheFormat::bf16})
    for (const int dim : {7, 32})
      for (const int terms : {1, 2, 3}) {  // of keys, of queries, both
        if (kQuick && dim + terms != 10) continue;
        const DistanceRows distances{12, 90, true};
        const std::vector<int32_t> rows = distances.rows();
        CHECK(rows.size() == 181 && rows[90] == 12 && rows[96] == 18 && rows[97] == 19 && rows[180] == 23);
        CHECK(rows[84] == 6 && rows[1] == 1 && rows[0] == 0 && std::is_sorted(rows.begin(), rows.end()));
        const auto random = [](int count) {
          std::vector<float> x(static_cast<size_t>(count));
          for (float& value : x) value = as_bf16(normal(1));
          return x;
        };
        const int width = kHeads * dim;
        const auto q = random(kTokens * width), k = random(kTokens * width), v = random(kTokens * width);
        const auto keys = random(24 * width), queries = random(24 * width);
        constexpr float kScale = 0.3f;
        DistanceTerms made(24, kHeads, dim, format);
        for (int row = 0; row < 24; ++row) {
          if (terms != 2) made.set_key(row, &keys[static_cast<size_t>(row * width)]);
          if (terms != 1) made.set_query(row, &queries[static_cast<size_t>(row * width)], kScale);
        }
        DistanceScores scores = made.scores();
        scores.rows = rows.data();
        scores.max_distance = 90;
        KvCache cache({{kHeads, kHeads, dim, dim}}, format, size_t{1} << 24);
        const int sequence = cache.create();
        cache.extend(sequence, kTokens);
        const std::vector<Query> one{{.sequence = sequence, .position = 0, .tokens = kTokens, .row = 0}};
        AttentionScratch scratch;
        scratch.reserve({kHeads, kHeads, dim, dim}, one, 1);
        std::vector<float> out(q.size());
        AttentionStep step{};
        step.cache = &cache;
        step.options = {.scale = kScale, .bidirectional = true, .distances = &scores};
        step.queries = &one;
        step.q = q.data();
        step.k = k.data();
        step.v = v.data();
        step.out = out.data();
        step.q_stride = step.k_stride = step.v_stride = step.out_stride = width;
        append(step, 0, 1);
        attend(step, scratch, 0, 1);
        const auto product = [&](const std::vector<float>& a, int row, const std::vector<float>& b, int other,
                                 int head) {
          double sum = 0;
          for (int i = 0; i < dim; ++i)
            sum += static_cast<double>(a[static_cast<size_t>(row * width + head * dim + i)]) *
                   static_cast<double>(b[static_cast<size_t>(other * width + head * dim + i)]);
          return sum;
        };
        for (int head = 0; head < kHeads; ++head)
          for (int t = 0; t < kTokens; t += 7) {
            std::vector<double> weights(kTokens);
            double total = 0;
            for (int seen = 0; seen < kTokens; ++seen) {
              const int row = scores.row(t - seen);
              double score = product(q, t, k, seen, head);
              if (terms != 2) score += product(q, t, keys, row, head);
              if (terms != 1) score += product(queries, row, k, seen, head);
              total += weights[static_cast<size_t>(seen)] = std::exp(static_cast<double>(kScale) * score);
            }
            for (int i = 0; i < dim; ++i) {
              double wanted = 0;
              for (int seen = 0; seen < kTokens; ++seen)
                wanted += weights[static_cast<size_t>(seen)] / total *
                          static_cast<double>(v[static_cast<size_t>(seen * width + head * dim + i)]);
              CHECK(std::abs(static_cast<double>(out[static_cast<size_t>(t * width + head * dim + i)]) - wanted) <
                    1e-4);
            }
          }
      }
}

int run_all() {
  test_limits();
  test_shapes();
  test_large_keys();
  test_reproducible();
  test_chunks();
  for (const CacheFormat format : formats())
    if (!kQuick || format == CacheFormat::i8) test_random_lives(format, kQuick ? 25 : slow() ? 100 : 250);
  test_nan();
  test_expanded_keys();
  test_distances();
  std::printf("%s: passed\n", isa_name(selected_isa()));
  return 0;
}

}  // namespace

int main() {
  if (kQuick) return run_all();
  // selected_isa() is read once a process.
  for (const char* name : {"scalar", "portable", "avx2", "avx512", "avx512_bf16", "amx", "neon"}) {
    std::fflush(nullptr);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      setenv("ANYACCEL_ISA", name, 1);
      if (std::strcmp(isa_name(selected_isa()), name) == 0) std::exit(run_all());
      std::printf("not tested on this machine: %s\n", name);
      std::exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    if (status != 0) {
      std::fprintf(stderr, "%s: ended with status %#x\n", name, static_cast<unsigned>(status));
      return 1;
    }
  }
  return 0;
}
