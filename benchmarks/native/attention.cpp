// SPDX-License-Identifier: Apache-2.0
// How near attention is to the machine's limits: decode to the bandwidth of reading memory, prefill to the peak of fp32
// FMA. One line a case, best of many rounds; the machine may have other work.
//
//   attention [threads] [model ...]     models: SmolLM2 1.2B 8B; one thread counts its own time only
#include "llm/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <vector>

#include "common/team.h"
#include "simd/isa.h"

#if defined(__x86_64__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC's bug 105593
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#endif

namespace {

using namespace anyaccel;
using namespace anyaccel::llm;
bool own_time = false;

double now() {
  timespec time;
  clock_gettime(own_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// Seconds of the fastest of several calls, for at least `least` seconds.
template <class Fn>
double best(Fn&& fn, double least = 0.4) {
  double fastest = 1e9, total = 0;
  for (int round = 0; round < 4 || total < least; ++round) {
    const double begin = now();
    fn();
    const double seconds = now() - begin;
    fastest = std::min(fastest, seconds);
    total += seconds;
  }
  return fastest;
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) float read512(const float* p, size_t n) {
  __m512 a = _mm512_setzero_ps(), b = a, c = a, d = a;
  for (size_t i = 0; i < n; i += 64) {
    a = _mm512_add_ps(a, _mm512_loadu_ps(p + i));
    b = _mm512_add_ps(b, _mm512_loadu_ps(p + i + 16));
    c = _mm512_add_ps(c, _mm512_loadu_ps(p + i + 32));
    d = _mm512_add_ps(d, _mm512_loadu_ps(p + i + 48));
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)));
}
__attribute__((target("avx512f"))) float fma512(int64_t rounds) {
  __m512 sums[12];
  for (__m512& v : sums) v = _mm512_set1_ps(1);
  const __m512 x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(1e-3f);
  for (int64_t i = 0; i < rounds; ++i) {
    for (__m512& v : sums) v = _mm512_fmadd_ps(v, x, y);
    asm volatile("" : : "v"(sums[0]), "v"(sums[11]));
  }
  float total = 0;
  for (const __m512& v : sums) total += _mm512_reduce_add_ps(v);
  return total;
}
#endif

volatile float sink;

// Bytes a second and floating-point operations a second of all threads; 0 where this program does not measure them.
double bandwidth(Team& team) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx512f")) return 0;
  const size_t n = size_t{32} << 20;  // floats of a thread
  std::vector<std::vector<float>> memory(static_cast<size_t>(team.size()));
  team.run([&](int t) { memory[static_cast<size_t>(t)].assign(n / static_cast<size_t>(team.size()) / 64 * 64, 1.0f); });
  const double seconds = best([&] {
    team.run(
        [&](int t) { sink = read512(memory[static_cast<size_t>(t)].data(), memory[static_cast<size_t>(t)].size()); });
  });
  return static_cast<double>(memory[0].size() * memory.size() * sizeof(float)) / seconds;
#else
  return 0;
#endif
}

double peak(Team& team) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx512f")) return 0;
  const int64_t rounds = 2000000;
  const double seconds = best([&] { team.run([&](int) { sink = fma512(rounds); }); }, 0.3);
  return static_cast<double>(rounds) * 12 * 16 * 2 * team.size() / seconds;
#else
  return 0;
#endif
}

struct Bench {
  const char* name;
  AttentionShape shape;
};

struct Result {
  double seconds;
  double bytes;  // of the cache that is read
  double flops;
};

// One step of all layers for `batch` sequences of `context` tokens, the last `tokens` of which are new.
Result measure(Team& team, const AttentionShape& shape, CacheFormat format, int layers, int batch, int context,
               int tokens) {
  KvCache cache(std::vector<AttentionShape>(static_cast<size_t>(layers), shape), format, size_t{16} << 30);
  std::vector<Query> queries;
  const int width = shape.heads * shape.head_dim, keys = shape.kv_heads * shape.head_dim;
  const int values = shape.kv_heads * shape.value_dim, results = shape.heads * shape.value_dim;
  const int rows = std::max(context, batch * tokens);
  const auto numbers = [&](int columns) {
    std::vector<float> x(static_cast<size_t>(rows) * static_cast<size_t>(columns));
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((i * 2654435761u >> 8) % 2001) * 1e-3f - 1;
    return x;
  };
  const std::vector<float> q = numbers(width), k = numbers(keys), v = numbers(values);
  std::vector<float> out(static_cast<size_t>(batch * tokens) * static_cast<size_t>(results));
  AttentionScratch scratch;
  AttentionStep step{&cache,   0,          {.scale = 1 / std::sqrt(static_cast<float>(shape.head_dim))},
                     &queries, q.data(),   k.data(),
                     v.data(), width,      keys,
                     values,   out.data(), results};
  for (int b = 0; b < batch; ++b) {
    const int sequence = cache.create();
    cache.extend(sequence, context);
    queries = {{sequence, 0, context, 0}};
    for (step.layer = 0; step.layer < layers; ++step.layer) append(step, 0, 1);
  }
  queries.clear();
  for (int b = 0; b < batch; ++b) queries.push_back({b, context - tokens, tokens, b * tokens});
  scratch.reserve(shape, queries, team.size());
  const auto run = [&] {
    team.run([&](int thread) {
      AttentionStep mine = step;
      for (mine.layer = 0; mine.layer < layers; ++mine.layer) {
        append(mine, thread, team.size());
        team.barrier(thread);
        attend(mine, scratch, thread, team.size());
        team.barrier(thread);
        if (needs_combine(mine, team.size())) {
          combine(mine, scratch, thread, team.size());
          team.barrier(thread);
        }
      }
    });
  };
  Result result{};
  result.seconds = best(run);
  const double pairs = static_cast<double>(batch) * layers *
                       (static_cast<double>(tokens) * (context - tokens) + tokens * (tokens + 1.0) / 2);
  result.flops = pairs * shape.heads * (shape.head_dim + shape.value_dim) * 2;
  result.bytes = static_cast<double>(cache.page_bytes()) / kPageTokens * batch * context;
  return result;
}

}  // namespace

int main(int count, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  Team team(count > 1 ? std::atoi(arguments[1]) : 0);
  own_time = team.size() == 1;
  const double bytes = bandwidth(team), flops = peak(team);
  std::printf("%s, %d threads: reads %.1f GB/s, %.0f GFLOP/s\n", isa_name(selected_isa()), team.size(), bytes * 1e-9,
              flops * 1e-9);
  const Bench benches[] = {{"SmolLM2", {9, 3, 64, 64}}, {"1.2B", {32, 8, 64, 64}}, {"8B", {32, 8, 128, 128}}};
  for (const Bench& bench : benches) {
    if (count > 2 && std::none_of(arguments + 2, arguments + count,
                                  [&](const char* name) { return std::strcmp(name, bench.name) == 0; }))
      continue;
    for (const CacheFormat format : {CacheFormat::f32, CacheFormat::bf16, CacheFormat::i8, CacheFormat::i4}) {
      const char* const kinds[] = {"f32", "bf16", "i8", "i4"};
      const char* kind = kinds[static_cast<int>(format)];
      for (const int context : {128, 1024, 8192}) {
        // As many layers and sequences as it takes to be far larger than the caches.
        const double layer = measure(team, bench.shape, format, 1, 1, context, 1).bytes;
        const int layers = static_cast<int>(std::clamp(100e6 / layer, 1.0, 30.0));
        const int batch = static_cast<int>(std::clamp(100e6 / (layer * layers), 1.0, 64.0));
        const Result r = measure(team, bench.shape, format, layers, batch, context, 1);
        std::printf("decode  %-8s %-4s context %5d batch %2d: %6.1f us a layer, %5.1f GB/s (%3.0f %%)\n", bench.name,
                    kind, context, batch, r.seconds * 1e6 / layers, r.bytes / r.seconds * 1e-9,
                    bytes > 0 ? 100 * r.bytes / r.seconds / bytes : 0.0);
      }
      for (const int tokens : {1024, 4096}) {
        const Result r = measure(team, bench.shape, format, 2, 1, tokens, tokens);
        std::printf("prefill %-8s %-4s %5d tokens: %8.0f us a layer, %5.0f GFLOP/s (%3.0f %%)\n", bench.name, kind,
                    tokens, r.seconds * 1e6 / 2, r.flops / r.seconds * 1e-9,
                    flops > 0 ? 100 * r.flops / r.seconds / flops : 0.0);
      }
    }
  }
  return 0;
}
