// SPDX-License-Identifier: Apache-2.0
// Speed of matrix products (prefill) beside the peak that this machine's arithmetic reaches in registers.
//   gemm [--threads 1,2] [--tokens 128,512,1024] [--format f32,bf16,f16,i8,i4,q4k,...] [--shape ROWSxCOLS] [--seconds
//   0.3]
//   [--cpu]
// --cpu: counts each thread's own CPU time instead of the clock's, on a machine that others use too.
// Compile it with the library (libanyaccel_llm.a and libanyaccel_core.a), or with the objects of csrc/llm.
#include "llm/kernels/gemm.h"

#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "common/team.h"
#include "llm/kernels/gemm_select.h"
#include "simd/isa.h"
#ifdef ANYACCEL_X86
#include <immintrin.h>
#endif

namespace {

using namespace anyaccel;
using namespace anyaccel::llm;

bool g_cpu = false;

double now() {
  timespec time;
  clock_gettime(g_cpu ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// --- the peak: independent sums that never leave the registers

#ifdef ANYACCEL_X86
constexpr int kRounds = 20000;
volatile float g_sink;

__attribute__((target("avx2,fma"))) double flops_avx2() {
  __m256 sums[12];
  for (int i = 0; i < 12; ++i) sums[i] = _mm256_set1_ps(static_cast<float>(i));
  const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
  for (int round = 0; round < kRounds; ++round)
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) sums[i] = _mm256_fmadd_ps(sums[i], a, b);
  for (int i = 1; i < 12; ++i) sums[0] = _mm256_add_ps(sums[0], sums[i]);
  g_sink = _mm256_cvtss_f32(sums[0]);
  return 16.0 * 12 * kRounds;
}

__attribute__((target("avx512f"))) double flops_avx512() {
  __m512 sums[24];
  for (int i = 0; i < 24; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
  for (int round = 0; round < kRounds; ++round)
#pragma GCC unroll 24
    for (int i = 0; i < 24; ++i) sums[i] = _mm512_fmadd_ps(sums[i], a, b);
  for (int i = 1; i < 24; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  g_sink = _mm512_cvtss_f32(sums[0]);
  return 32.0 * 24 * kRounds;
}

__attribute__((target("avx512f,avx512bf16"))) double flops_bf16() {
  __m512 sums[24];
  for (int i = 0; i < 24; ++i) sums[i] = _mm512_setzero_ps();
  __m512bh a;
  std::memset(&a, 0, sizeof a);
  for (int round = 0; round < kRounds; ++round)
#pragma GCC unroll 24
    for (int i = 0; i < 24; ++i) {
      sums[i] = _mm512_dpbf16_ps(sums[i], a, a);
      __asm__ volatile("" : "+v"(sums[i]));
    }
  for (int i = 1; i < 24; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  g_sink = _mm512_cvtss_f32(sums[0]);
  return 64.0 * 24 * kRounds;
}

__attribute__((target("amx-tile,amx-bf16"))) double flops_amx() {
  alignas(64) volatile uint8_t config[64] = {};  // volatile: GCC 12 thinks that 8 bytes of it are read
  alignas(64) static const uint8_t zeros[1024] = {};
  config[0] = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config[16 + 2 * tile] = 64;  // bytes of a row
    config[48 + tile] = 16;
  }
  __asm__ volatile("" ::: "memory");
  _tile_loadconfig(const_cast<const uint8_t*>(config));
  _tile_loadd(4, zeros, 64);
  _tile_loadd(5, zeros, 64);
  _tile_loadd(6, zeros, 64);
  _tile_loadd(7, zeros, 64);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int round = 0; round < kRounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 4.0 * 2 * 16 * 16 * 32 * kRounds;
}
#endif

double (*peak_function(const GemmKernels& kernels))() {
#ifdef ANYACCEL_X86
  const Isa isa = selected_isa();
  if (kernels.operands == GemmKernels::Operands::pairs) return isa == Isa::amx ? flops_amx : flops_bf16;
  if (isa >= Isa::avx512) return flops_avx512;
  if (isa >= Isa::avx2) return flops_avx2;
#endif
  (void)kernels;
  return nullptr;
}

// --- measuring

// The time of fn(thread) on all threads: the longest of them, the best of many tries.
template <class Fn>
double best_time(Team& team, double seconds, const Fn& fn) {
  std::vector<double> each(static_cast<size_t>(team.size()) * 8);
  double best = 1e30, spent = 0;
  for (int tries = 0; tries < 3 || spent < seconds; ++tries) {
    team.run([&](int thread) {
      team.barrier(thread);
      const double start = now();
      fn(thread);
      each[static_cast<size_t>(thread) * 8] = now() - start;
    });
    double longest = 0;
    for (int thread = 0; thread < team.size(); ++thread)
      longest = std::max(longest, each[static_cast<size_t>(thread) * 8]);
    best = std::min(best, longest);
    spent += longest;
  }
  return best;
}

struct Options {
  std::vector<int> threads = {1, 2}, tokens = {128, 512, 1024};
  std::vector<std::string> formats = {"f32", "bf16", "f16", "i8", "i8g32", "i4", "i4m"};
  std::vector<std::pair<int, int>> shapes = {{3072, 2048}, {2048, 2048}, {16384, 2048}, {2048, 8192},
                                             {960, 576},   {576, 576},   {3072, 576},   {576, 1536}};
  double seconds = 0.3;
};

Shape shape_of(const std::string& format, int64_t rows, int64_t cols) {
  if (format == "f32") return {Format::f32, rows, cols};
  if (format == "bf16") return {Format::bf16, rows, cols};
  if (format == "f16") return {Format::f16, rows, cols};
  if (format == "i8") return {Format::i8, rows, cols};
  if (format == "i8g32") return {Format::i8, rows, cols, 32};
  if (format == "i4") return {Format::i4, rows, cols, 32};
  if (format == "i4m") return {Format::i4, rows, cols, 32, true};
  if (format == "q4k") return {Format::i4, rows, cols, 32, true, ScaleKind::superblocks};
  if (format == "q6k") return {Format::i6, rows, cols, 16, false, ScaleKind::superblocks};
  if (format == "q5k") return {Format::i5, rows, cols, 32, true, ScaleKind::superblocks};
  if (format == "iq4xs") return {Format::nl4, rows, cols, 32, false, ScaleKind::superblocks};
  if (format == "mxfp4") return {Format::fp4, rows, cols, 32, false, ScaleKind::powers};
  std::fprintf(stderr, "unknown format %s\n", format.c_str());
  std::exit(2);
}

void measure(const Options& options, const std::string& format, int64_t rows, int64_t cols) {
  const Shape shape = shape_of(format, rows, cols);
  const GemmKernels& kernels = gemm_kernels(selected_isa(), shape);
  Matrix matrix(shape);
  std::mt19937 random(1);
  std::vector<float> row(static_cast<size_t>(cols));
  const bool rounded = shape.scales == ScaleKind::halves;  // nothing is rounded to what only ggml's files have
  if (!rounded) std::memset(const_cast<uint8_t*>(matrix.block(0)), 0x11, shape.bytes());
  for (int64_t r = 0; rounded && r < rows; ++r) {
    for (float& value : row) value = static_cast<float>(random() % 2001) * 1e-3f - 1.0f;
    matrix.set_rows(r, 1, {row.data(), SourceType::f32, cols * 4, 4});
  }
  for (const int threads : options.threads) {
    Team team(threads);
    double (*const peak_flops)() = peak_function(kernels);
    double flops = 0;
    const double peak_time = peak_flops != nullptr ? best_time(team, 0.1, [&](int) { flops = peak_flops(); }) : 0;
    const double peak = flops * threads / (peak_time + 1e-30) * 1e-9;
    for (const int tokens : options.tokens) {
      std::vector<float> x(static_cast<size_t>(tokens * cols)), out(static_cast<size_t>(tokens * rows));
      for (float& value : x) value = static_cast<float>(random() % 2001) * 1e-3f - 1.0f;
      Input input;
      input.reserve(shape, tokens);
      const double prepare = best_time(team, options.seconds / 4, [&](int thread) {
        input.prepare(shape, x.data(), cols, nullptr, tokens, thread, threads);
      });
      const double time = best_time(team, options.seconds,
                                    [&](int thread) { multiply(matrix, input, {out.data(), rows}, thread, threads); });
      const double rate = 2.0 * static_cast<double>(rows * cols) * tokens / time * 1e-9;
      std::printf(
          "%-6s %6lld x %-5lld %5d tokens %d threads: %8.1f GFLOP/s, %5.1f %% of the peak %.0f; prepare %.1f %%\n",
          format.c_str(), static_cast<long long>(rows), static_cast<long long>(cols), tokens, threads, rate,
          peak > 0 ? 100 * rate / peak : 0.0, peak, 100 * prepare / time);
      std::fflush(stdout);
    }
  }
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text)
    if (c == ',')
      parts.emplace_back();
    else
      parts.back() += c;
  return parts;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--cpu") {
      g_cpu = true;
      continue;
    }
    if (i + 1 >= argc) {
      std::fprintf(stderr, "%s needs a value\n", name.c_str());
      return 2;
    }
    const std::vector<std::string> values = split(argv[++i]);
    if (name == "--threads" || name == "--tokens") {
      std::vector<int>& numbers = name == "--threads" ? options.threads : options.tokens;
      numbers.clear();
      for (const std::string& value : values) numbers.push_back(std::max(std::atoi(value.c_str()), 1));
    } else if (name == "--format") {
      options.formats = values;
    } else if (name == "--seconds") {
      options.seconds = std::atof(values[0].c_str());
    } else if (name == "--shape") {
      options.shapes.clear();
      for (const std::string& value : values) {
        const size_t x = value.find('x');
        if (x == std::string::npos) return 2;
        options.shapes.emplace_back(std::atoi(value.c_str()), std::atoi(value.c_str() + x + 1));
      }
    } else {
      std::fprintf(stderr, "unknown option %s\n", name.c_str());
      return 2;
    }
  }
  std::printf("%s\n", isa_name(selected_isa()));
  for (const auto& [rows, cols] : options.shapes)
    for (const std::string& format : options.formats) measure(options, format, rows, cols);
  return 0;
}
