// SPDX-License-Identifier: Apache-2.0
// traffic RANKS BYTES copied|symmetric: one all-reduce of float32 by threads that are ranks, for traffic_plugin.c,
// which counts what each reads and writes of the memory of each. tools/model_collectives.py --count compiles and runs
// it.
#include <sys/prctl.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/shm_group.h"

namespace {

using namespace anyaccel::comm;

constexpr int kTell = 0x414e59;
constexpr size_t kBufferBytes = size_t{1} << 20, kMailbox = 4096;

void tell(unsigned long what, unsigned long a = 0, unsigned long b = 0) { prctl(kTell, what, a, b, 0); }

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "traffic RANKS BYTES copied|symmetric\n");
    return 2;
  }
  const int ranks = std::atoi(argv[1]);
  const size_t bytes = std::strtoul(argv[2], nullptr, 10);
  const bool symmetric = std::string(argv[3]) == "symmetric";
  std::vector<std::unique_ptr<ShmGroup>> groups;
  std::vector<ShmGroup*> all;
  std::vector<std::vector<float>> data;
  std::vector<char*> bases;
  for (int rank = 0; rank < ranks; ++rank) {
    groups.push_back(std::make_unique<ShmGroup>(rank, ranks, kBufferBytes, 600, ShmSegment::Kind::memfd, kMailbox));
    all.push_back(groups.back().get());
    data.emplace_back(bytes / sizeof(float), static_cast<float>(rank));
    bases.push_back(reinterpret_cast<char*>(data.back().data()));
  }
  for (ShmGroup* group : all) group->connect(all);
  for (int rank = 0; rank < ranks; ++rank) {  // the memory that ranks share: their tensors, or their buffers
    if (symmetric) {
      tell(2, reinterpret_cast<uintptr_t>(bases[static_cast<size_t>(rank)]), bytes);
      all[static_cast<size_t>(rank)]->add_symmetric(1, bases, bytes);
    } else {
      const char* end = all[static_cast<size_t>(rank)]->mailboxes(rank);
      tell(2, reinterpret_cast<uintptr_t>(end - 3 * kBufferBytes), 3 * kBufferBytes);
    }
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      tell(0, static_cast<unsigned long>(rank));
      std::vector<float>& own = data[static_cast<size_t>(rank)];
      all[static_cast<size_t>(rank)]->all_reduce(own.data(), own.size(), DType::f32, ReduceOp::sum);
      tell(1);
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<float>& own : data)
    for (const float value : own)
      if (value != static_cast<float>(ranks * (ranks - 1) / 2)) return 1;
  return 0;
}
