// SPDX-License-Identifier: Apache-2.0
// Collectives among processes of one host through shared memory.
//
// Each rank owns one segment: a control block and three buffers. A rank writes its own segment only, so its
// pages can be local to its memory node, and reads the others'. Progress is a counter per rank ("arrived"): a
// synchronisation point is passed when every rank's counter has reached it.
//
// All-reduce, small: copy in, synchronise, every rank sums all copies.
// All-reduce, large: chunk by chunk, pipelined over three buffers with one synchronisation a chunk: while
// chunk i is copied in, this rank's share of chunk i-1 is summed and the other ranks' shares of chunk i-2 are
// copied out (reduce-scatter and all-gather: Thakur, Rabenseifner, Gropp, "Optimization of collective
// communication operations in MPICH", 2005).
//
// Why three buffers are enough: chunk numbers run on over all calls and chunk g uses buffer g mod 3. When a
// rank writes chunk g it has passed the synchronisation that every rank posts after its last read of chunk
// g-3.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "comm/reduce_kernels.h"
#include "comm/shm_segment.h"

namespace anyaccel::comm {

constexpr int kMaxRanks = 1024;

class ShmGroup {
 public:
  // Creates this rank's segment with three buffers of `buffer_bytes` each (a multiple of 64).
  // A rank waits at most `timeout_s` seconds for a live peer. Throws std::system_error,
  // std::invalid_argument.
  ShmGroup(int rank, int size, size_t buffer_bytes, double timeout_s);
  ~ShmGroup();
  ShmGroup(const ShmGroup&) = delete;
  ShmGroup& operator=(const ShmGroup&) = delete;

  const std::string& name() const { return own_.name(); }

  // Maps the peers' segments. `pids[r]` is used to notice that rank r has died; 0 when its pid means nothing
  // here.
  void connect(const std::vector<std::string>& names, const std::vector<int>& pids);
  // Call it when every rank has connected: nothing is left in /dev/shm from then on.
  void unlink() noexcept { own_.unlink(); }

  // Called about every 50 ms of waiting; may throw, which breaks the group.
  void set_interrupt_check(std::function<void()> check) { interrupt_check_ = std::move(check); }

  // All throw CommError, and whatever the interrupt check throws; after that the group stays broken and every
  // rank that waits in it gets an error.
  void all_reduce_sum(void* data, size_t count, DType dtype);
  void broadcast(void* data, size_t bytes, int root);
  void barrier();

 private:
  enum class Op : uint8_t { all_reduce, broadcast, barrier };

  // What a rank is doing, checked against the peers' at the first synchronisation of each call.
  struct Descriptor {
    uint64_t count;
    uint8_t op;
    uint8_t dtype;
    uint16_t root;
    uint32_t reserved;
    bool operator==(const Descriptor&) const = default;
  };

  // One cache line: a peer that sees the counter move has the descriptor with it. Two descriptors, because a
  // fast peer may be one synchronisation ahead of the reader, but never two.
  struct alignas(64) Control {
    std::atomic<uint64_t> arrived;
    Descriptor descriptor[2];
    std::atomic<uint32_t> gave_up;
  };
  static_assert(sizeof(Control) == 64);

  template <class Body>
  void call(const Descriptor& descriptor, Body body);
  Control& control(int rank) const { return *controls_[rank]; }
  char* buffer(int rank, uint64_t chunk) const { return buffers_[rank] + (chunk % 3) * buffer_bytes_; }
  void synchronise();
  void wait_slowly(int peer, int64_t start);
  void check_peer(int peer) const;
  void check_descriptors() const;
  std::string describe(const Descriptor& descriptor) const;
  void all_reduce_small(char* data, size_t count, DType dtype);
  void all_reduce_large(char* data, size_t count, DType dtype);

  const int rank_;
  const int size_;
  const size_t buffer_bytes_;
  const double timeout_s_;
  const ReduceKernels& kernels_;
  ShmSegment own_;
  std::vector<ShmSegment> peers_;
  std::vector<Control*> controls_;
  std::vector<char*> buffers_;
  std::vector<int> pidfds_;
  std::vector<int> pids_;
  std::function<void()> interrupt_check_;
  std::mutex one_call_;  // callers run without the GIL
  int64_t spin_ns_ = 0;
  Descriptor current_{};
  uint64_t sequence_ = 0;  // synchronisations posted
  uint64_t chunk_ = 0;     // chunks used
  std::string broken_;
};

}  // namespace anyaccel::comm
