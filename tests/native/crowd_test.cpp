// SPDX-License-Identifier: Apache-2.0
// crowd_test [THREADS [SECONDS]]: barriers, loops and collectives of many threads, 64 without an argument, which is
// more than most machines have cores. All end, with the right results, in a time that grows with their number: at most
// SECONDS a thread. tests/machines runs it on a machine with 64 CPUs.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "comm/messages.h"
#include "comm/shm_group.h"
#include "common/parallel.h"
#include "common/team.h"

namespace {

using namespace anyaccel;
using namespace anyaccel::comm;

// Sleeping threads are woken one after another, which takes some microseconds each, and on shared cores a hundred times
// as long. What collapses takes the time slice of each thread at each barrier, for each other thread.
double most_seconds_per_thread = 0.02;

class Clock {
 public:
  explicit Clock(const char* what) : what_(what) {}
  // Prints a line of JSON, and ends the program if each turn took longer than it may.
  void check(int threads, int turns) const {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count() / turns;
    std::printf("{\"what\": \"%s\", \"threads\": %d, \"seconds\": %.6f}\n", what_, threads, seconds);
    CHECK(seconds < most_seconds_per_thread * threads);
  }

 private:
  const char* const what_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

void test_barriers(int threads) {
  constexpr int kPhases = 20;
  Team team(threads);
  std::vector<int> done(static_cast<size_t>(threads));
  const Clock clock("barriers of a team");
  team.run([&](int thread) {
    for (int phase = 1; phase <= kPhases; ++phase) {
      done[static_cast<size_t>(thread)] = phase;
      team.barrier(thread);
      for (const int other : done) CHECK(other == phase);
      team.barrier(thread);
    }
  });
  clock.check(threads, 2 * kPhases);
}

void test_runs(int threads) {
  constexpr int kRuns = 20;
  Team team(threads);
  std::atomic<int> calls{0};
  const Clock clock("runs of a team");
  for (int run = 1; run <= kRuns; ++run) {
    team.run([&](int) { calls.fetch_add(1); });
    CHECK(calls.load() == run * threads);
  }
  clock.check(threads, kRuns);
}

void test_loops(int threads) {
  constexpr int kLoops = 20;
  const Clock clock("loops");
  for (int loop = 0; loop < kLoops; ++loop) {
    std::atomic<int64_t> sum{0};
    parallel_for(4 * threads, threads, [&](int64_t chunk) { sum.fetch_add(chunk + 1); });
    CHECK(sum.load() == int64_t{2} * threads * (4 * threads + 1));
  }
  clock.check(threads, kLoops);
}

void test_all_reduce(int ranks, size_t count) {
  constexpr int kCalls = 3;
  std::vector<std::unique_ptr<ShmGroup>> groups;
  std::vector<ShmGroup*> all;
  for (int rank = 0; rank < ranks; ++rank) {
    groups.push_back(std::make_unique<ShmGroup>(rank, ranks, size_t{64} << 10, 300, ShmSegment::Kind::memfd,
                                                Messages::bytes_a_rank(ranks, 4096)));
    all.push_back(groups.back().get());
  }
  for (ShmGroup* group : all) group->connect(all);
  const Clock clock(count < 1000 ? "small all_reduce" : "large all_reduce");
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      for (int call = 0; call < kCalls; ++call) {
        std::vector<int32_t> data(count, rank + call);
        all[static_cast<size_t>(rank)]->all_reduce(data.data(), count, DType::i32, ReduceOp::sum);
        for (const int32_t value : data) CHECK(value == ranks * (ranks - 1) / 2 + ranks * call);
      }
    });
  for (std::thread& thread : threads) thread.join();
  clock.check(ranks, kCalls);
}

}  // namespace

int main(int argc, char** argv) {
  const int most = argc > 1 ? std::atoi(argv[1]) : kSanitized ? 16 : 64;
  CHECK(most > 0);
  if (argc > 2) most_seconds_per_thread = std::atof(argv[2]);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  for (const int threads : {(most + 3) / 4, most}) {
    test_barriers(threads);
    test_runs(threads);
    test_loops(threads);
    test_all_reduce(threads, 16);
    test_all_reduce(threads, 100000);
  }
  std::puts("crowd: all tests passed");
  return 0;
}
