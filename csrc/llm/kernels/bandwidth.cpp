// SPDX-License-Identifier: Apache-2.0
#include "llm/kernels/bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "common/team.h"
#include "llm/kernels/multiply.h"
#include "llm/pack/matrix.h"

namespace anyaccel::llm {
namespace {

constexpr size_t kLine = 64;
constexpr uint64_t kOnes = 0x3f803f803f803f80;  // of bfloat16: products of denormal numbers would take their time

// A word of each line of a part of the memory, which is read as kStreams consecutive parts at once.
template <int kStreams>
uint64_t read_lines(const uint8_t* data, size_t lines, size_t prefetch) {
  const size_t each = lines / kStreams;
  uint64_t sums[kStreams] = {};
  const auto word = [](const uint8_t* p) { return *reinterpret_cast<const uint64_t*>(p); };
  for (size_t line = 0; line < each; ++line)
    for (int s = 0; s < kStreams; ++s) {
      const uint8_t* p = data + (static_cast<size_t>(s) * each + line) * kLine;
      if (prefetch != 0) __builtin_prefetch(p + prefetch);
      sums[s] += word(p);
    }
  for (size_t line = each * kStreams; line < lines; ++line) sums[0] += word(data + line * kLine);
  uint64_t sum = 0;
  for (const uint64_t one : sums) sum += one;
  return sum;
}

// Which is the fastest depends on the processor: how many requests a core has under way, how far its own prefetchers
// look ahead (to the end of a page of 4 KiB at most), how the threads' addresses fall on the memory's banks.
struct Pattern {
  uint64_t (*read)(const uint8_t* data, size_t lines, size_t prefetch);
  size_t prefetch;  // bytes that are asked for before they are read
};
constexpr Pattern kPatterns[] = {{read_lines<1>, 2048}, {read_lines<1>, 8192}, {read_lines<2>, 0},
                                 {read_lines<2>, 4096}, {read_lines<4>, 1024}, {read_lines<8>, 0},
                                 {read_lines<8>, 512}};

// Seconds that the threads take together.
template <class Work>
double seconds_of(Team& team, const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  team.run(work);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double read_bandwidth(size_t bytes, int threads, int rounds) {
  if (bytes < kLine * 1024 || rounds < 1) throw std::invalid_argument("read_bandwidth: needs 64 KiB and one round");
  const auto memory = allocate_weights(bytes);
  auto* data = static_cast<uint8_t*>(memory.get());
  const auto lines = static_cast<int64_t>(bytes / kLine);
  Team team(threads);
  // Written first: untouched pages would all be the one page of zeros.
  team.run([&](int thread) {
    const Range mine = part_of(lines, thread, team.size());
    auto* words = reinterpret_cast<uint64_t*>(data);
    std::fill(words + mine.begin * 8, words + mine.end * 8, kOnes);
  });
  std::atomic<uint64_t> sink{0};
  double best = 0;
  for (int round = 0; round < rounds; ++round)
    for (const Pattern& pattern : kPatterns) {
      const double seconds = seconds_of(team, [&](int thread) {
        const Range mine = part_of(lines, thread, team.size());
        const uint8_t* first = data + static_cast<size_t>(mine.begin) * kLine;
        sink.fetch_add(pattern.read(first, static_cast<size_t>(mine.end - mine.begin), pattern.prefetch),
                       std::memory_order_relaxed);
      });
      best = std::max(best, static_cast<double>(lines) * kLine / seconds);
    }

  // What decoding does, which no limit may be below.
  constexpr int64_t kCols = 2048;
  const Shape shape{Format::bf16, static_cast<int64_t>(bytes) / (kCols * 2) / kBlockRows * kBlockRows, kCols};
  const Matrix matrix(shape, memory, data);
  const std::vector<float> x(kCols);
  std::vector<float> y(static_cast<size_t>(shape.rows));
  Input input;
  input.reserve(shape, 1);
  input.prepare(shape, x.data(), kCols, nullptr, 1, 0, 1);
  for (int round = 0; round < rounds; ++round) {
    const double seconds =
        seconds_of(team, [&](int thread) { multiply(matrix, input, {y.data(), shape.rows}, thread, team.size()); });
    best = std::max(best, static_cast<double>(shape.bytes()) / seconds);
  }
  return best;
}

}  // namespace anyaccel::llm
