// SPDX-License-Identifier: Apache-2.0
#include "llm/bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>

#include "common/team.h"
#include "llm/matrix.h"

namespace anyaccel::llm {

double read_bandwidth(size_t bytes, int threads, int rounds) {
  constexpr size_t kLine = 64;
  constexpr size_t kAhead = 256;  // words: hardware prefetchers stop at the ends of 4 KiB pages
  if (bytes < kLine * 1024 || rounds < 1) throw std::invalid_argument("read_bandwidth: needs 64 KiB and one round");
  const auto memory = allocate_weights(bytes);
  const auto* words = static_cast<uint64_t*>(memory.get());
  Team team(threads);
  // Written first: untouched pages would all be the one page of zeros.
  team.run([&](int thread) {
    const Range lines = part_of(static_cast<int64_t>(bytes / kLine), thread, team.size());
    auto* mine = static_cast<uint64_t*>(memory.get());
    for (int64_t word = lines.begin * 8; word < lines.end * 8; ++word) mine[word] = static_cast<uint64_t>(word);
  });
  std::atomic<uint64_t> sink{0};
  double best = 0;
  for (int round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    team.run([&](int thread) {
      const Range lines = part_of(static_cast<int64_t>(bytes / kLine), thread, team.size());
      uint64_t sum = 0;
      for (const uint64_t *line = words + lines.begin * 8, *end = words + lines.end * 8; line != end; line += 8) {
        __builtin_prefetch(line + kAhead);
        sum += *line;
      }
      sink.fetch_add(sum, std::memory_order_relaxed);
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(bytes / kLine * kLine) / seconds.count());
  }
  return best;
}

}  // namespace anyaccel::llm
