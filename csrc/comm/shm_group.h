// SPDX-License-Identifier: Apache-2.0
// Collectives among processes of one host through shared memory.
//
// Each rank owns one segment: a control block, three buffers, and mailboxes for messages (messages.h). A rank writes
// its own segment only, so its pages can be local to its memory node, and reads the others'. Progress is a counter per
// rank ("arrived"): a synchronisation point is passed when every rank's counter has reached it.
//
// All-reduce, small: copy in, synchronise, every rank reduces all copies.
// All-reduce, large: chunk by chunk, pipelined over three buffers with one synchronisation a chunk: while
// chunk i is copied in, this rank's share of chunk i-1 is reduced and the other ranks' shares of chunk i-2 are
// copied out (reduce-scatter and all-gather: Thakur, Rabenseifner, Gropp, "Optimization of collective
// communication operations in MPICH", 2005).
// All-reduce of symmetric tensors (add_symmetric): every rank reduces its share out of all tensors and writes the
// result into all of them; nothing is copied. The others move data chunk by chunk: write, synchronise, read.
//
// Why three buffers are enough: chunk numbers run on over all calls and chunk g uses buffer g mod 3. When a
// rank writes chunk g it has passed the synchronisation that every rank posts after its last read of chunk
// g-3.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/peers.h"
#include "comm/reduce_kernels.h"
#include "comm/shm_segment.h"

namespace anyaccel::comm {

constexpr int kMaxRanks = 1024;

// How a thread that holds the interpreter's lock gives it to others while it waits for long.
struct IdleHooks {
  void* (*begin)();
  void (*end)(void*);
};

class ShmGroup {
 public:
  // Creates this rank's segment with three buffers of `buffer_bytes` each (a multiple of 64) and `mailbox_bytes` more.
  // A rank waits at most `timeout_s` seconds for a live peer. Throws std::system_error,
  // std::invalid_argument.
  ShmGroup(int rank, int size, size_t buffer_bytes, double timeout_s, ShmSegment::Kind kind = ShmSegment::Kind::posix,
           size_t mailbox_bytes = 0);
  ~ShmGroup();
  ShmGroup(const ShmGroup&) = delete;
  ShmGroup& operator=(const ShmGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return own_.name(); }

  // Maps the peers' segments. `pids[r]` is used to notice that rank r has died; 0 when its pid means nothing
  // here.
  void connect(const std::vector<std::string>& names, const std::vector<int>& pids);
  // Where the ranks are threads of one process: their groups, in rank order, which must outlive this one's use.
  void connect(const std::vector<ShmGroup*>& ranks);
  // Call it when every rank has connected: nobody can open the segments from then on.
  void unlink() noexcept { own_.unlink(); }

  // Called about every 50 ms of waiting; may throw, which breaks the group.
  void set_interrupt_check(std::function<void()> check) { interrupt_check_ = std::move(check); }
  // What errors call the ranks, where these are a part of more; their own numbers without it.
  void set_numbers(std::vector<int> numbers) { numbers_ = std::move(numbers); }
  void set_idle_hooks(IdleHooks hooks) { idle_hooks_ = hooks; }
  void set_timeout(double timeout_s);
  double timeout() const { return timeout_s_.load(std::memory_order_relaxed); }

  // Calls that were asked for asynchronously and are not done; kept by whoever runs them.
  void add_waiting(int calls) { waiting_.fetch_add(calls, std::memory_order_acq_rel); }
  bool waiting() const { return waiting_.load(std::memory_order_acquire) != 0; }

  // Ends what waits in this group, here and on the peers, with an error; callable from any thread, at any time.
  void abort() noexcept;
  // The group ends in peace: peers that wait for this rank are told that it has left.
  void leave() noexcept;

  // All throw CommError, and whatever the interrupt check throws; after that the group stays broken and every
  // rank that waits in it gets an error. `dtype` is compared with the peers' also where bytes are only moved.
  // One call at a time; others wait.

  // In place. `holds_lock`: the caller holds the interpreter's lock, which is given up only where the wait gets long.
  // `told` is the dtype that the caller has, where it was brought to another one: peers are to have the same.
  void all_reduce(void* data, size_t count, DType dtype, ReduceOp op, bool holds_lock = false, DType told = DType::f32);
  // False, and nothing done, when another thread is inside the group.
  bool try_all_reduce(void* data, size_t count, DType dtype, ReduceOp op);
  // `out` is written on `root` only; may be `in`.
  void reduce(const void* in, void* out, size_t count, DType dtype, ReduceOp op, int root, DType told = DType::f32);
  // `ins[r]`: what goes to rank r; `out` may be ins[rank].
  void reduce_scatter(const void* const* ins, void* out, size_t count, DType dtype, ReduceOp op,
                      DType told = DType::f32);
  void broadcast(void* data, size_t count, DType dtype, int root);
  // `counts[r]`: elements that rank r gives, the same on all ranks. outs[rank] may be `in`.
  void all_gather(const void* in, void* const* outs, const size_t* counts, DType dtype);
  void gather(const void* in, void* const* outs, size_t count, DType dtype, int root);
  void scatter(const void* const* ins, void* out, size_t count, DType dtype, int root);
  // Counts may differ from pair to pair; what this rank expects from a peer must be what that one sends.
  void all_to_all(const void* const* ins, const size_t* in_counts, void* const* outs, const size_t* out_counts,
                  DType dtype);
  void barrier() { barrier(0); }
  // 0: the group's timeout.
  void barrier(double timeout_s);
  // partial := rms_norm(residual := residual + sum over ranks of partial) * weight, row by row.
  void all_reduce_add_rms_norm(void* partial, void* residual, const void* weight, float eps, size_t rows, size_t width,
                               DType dtype, bool holds_lock = false);

  // Memory of all ranks that an all-reduce of an address inside this rank's piece works on without copying.
  // `id` is the same on all ranks and not used before. bases[rank] is this rank's.
  void add_symmetric(uint16_t id, const std::vector<char*>& bases, size_t bytes);
  void remove_symmetric(uint16_t id);

  // For messages, which are apart from collectives (messages.h).
  char* mailboxes(int rank) const { return buffers_[rank] + kBuffers * buffer_bytes_; }
  size_t mailbox_bytes() const { return mailbox_bytes_; }
  // Throws when `peer` cannot be waited for any more: it has ended, left or given up; or when this rank has aborted.
  void check_peer(int peer, const std::string& doing) const;
  std::string peer_name(int peer) const;
  // Throws in a process that was forked after the group was made: its parent is the rank, and has the threads.
  void check_process() const;
  // Breaks the group for the peers.
  void give_up() noexcept;
  const std::function<void()>& interrupt_check() const { return interrupt_check_; }

 private:
  static constexpr int kBuffers = 3;
  enum class Op : uint8_t {
    all_reduce,
    broadcast,
    barrier,
    reduce,
    reduce_scatter,
    all_gather,
    all_gather_uneven,
    gather,
    scatter,
    all_to_all,
    all_reduce_add_rms_norm
  };

  // What a rank is doing, checked against the peers' at the first synchronisation of each call.
  struct Descriptor {
    uint64_t count = 0;
    uint64_t offset = 0;  // in the symmetric memory; the width of a row of all_reduce_add_rms_norm
    Op op = Op::barrier;
    uint8_t dtype = 0;
    uint8_t reduce_op = 0;
    uint8_t told = 0;  // the dtype that the caller has, where it is brought to another one; 0: this one
    uint16_t root = 0;
    uint16_t symmetric = 0;  // its id, 0: none
    bool operator==(const Descriptor&) const = default;
  };

  // One cache line: a peer that sees the counter move has the descriptor with it. Two descriptors, because a
  // fast peer may be one synchronisation ahead of the reader, but never two.
  struct alignas(64) Control {
    std::atomic<uint64_t> arrived;
    Descriptor descriptor[2];
    std::atomic<uint32_t> gave_up;  // a Fate, and the rank that was the cause
  };
  static_assert(sizeof(Control) == 64);

  // One call at a time. Who waits for it throws in a forked process, and in a thread that is inside already: a signal
  // handler's, which would wait for itself. Without `waits` it is not taken there, nor while another thread is inside.
  class Turn {
   public:
    explicit Turn(ShmGroup& group, bool waits = true);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    bool taken() const { return taken_; }

   private:
    ShmGroup& group_;
    bool taken_ = false;
  };
  friend class Turn;
  bool is_forked() const;
  std::string number(int rank) const;

  // Why a rank is no longer in the group.
  enum class Fate : uint32_t { here, left, peer_lost, timed_out, aborted, error };
  struct Symmetric {
    uint16_t id;
    size_t bytes;
    std::vector<char*> bases;
  };

  template <class Body>
  void call(const Descriptor& descriptor, Body body);
  template <class Body>
  void call_locked(const Descriptor& descriptor, Body body);
  Control& control(int rank) const { return *controls_[rank]; }
  // The sizes that each rank announces for its peers to compare. There are two tables, used in turn, as of descriptors.
  uint64_t* table(int rank, uint64_t sequence) const;
  char* buffer(int rank, uint64_t chunk) const { return buffers_[rank] + (chunk % kBuffers) * buffer_bytes_; }
  size_t control_bytes() const;
  void add_peer(char* base, int pid);
  void check_root(const char* what, int root) const;
  void synchronise();
  void wait_slowly(int64_t start);
  [[noreturn]] void time_out() const;
  void check_descriptors() const;
  void check_tables(const size_t* counts) const;
  // Of an all-reduce: throws when the ranks disagree; false when only their tensors' places do.
  bool agreed() const;
  std::string describe(const Descriptor& descriptor) const;
  ReduceFn kernel(DType dtype, ReduceOp op) const;
  Descriptor reduction(Op what, size_t count, DType dtype, ReduceOp op, int root = 0, DType told = DType::f32) const;
  bool is_small(size_t bytes) const;
  void all_reduce_locked(char* data, size_t count, DType dtype, ReduceOp op, DType told);
  // These return false, without having changed anything, when a peer's tensor is symmetric.
  bool all_reduce_copying(char* data, size_t count, DType dtype, ReduceFn kernel);
  bool all_reduce_small(char* data, size_t count, DType dtype, ReduceFn kernel);
  bool all_reduce_large(char* data, size_t count, DType dtype, ReduceFn kernel);
  void all_reduce_symmetric(const Symmetric& memory, size_t offset, size_t count, DType dtype, ReduceFn kernel);
  const Symmetric* find_symmetric(const void* data, size_t bytes);

  const uint32_t born_;  // after so many forks
  const int rank_;
  const int size_;
  const size_t buffer_bytes_;
  const size_t mailbox_bytes_;
  std::atomic<double> timeout_s_;
  const ReduceKernels& kernels_;
  ShmSegment own_;
  std::vector<ShmSegment> peers_;
  std::vector<Control*> controls_;
  std::vector<char*> buffers_;
  std::vector<std::shared_ptr<const Peer>> watched_;
  std::function<void()> interrupt_check_;
  std::vector<int> numbers_;
  IdleHooks idle_hooks_{nullptr, nullptr};
  std::mutex one_call_;  // of Turn; callers run without the interpreter's lock
  std::atomic<std::thread::id> inside_{};
  std::vector<Symmetric> symmetric_;
  std::mutex retired_mutex_;
  std::vector<uint16_t> retired_;
  std::atomic<bool> any_retired_{false};
  int64_t spin_ns_ = 0;
  Descriptor current_{};
  uint64_t sequence_ = 0;  // synchronisations posted
  uint64_t chunk_ = 0;     // chunks used
  double call_timeout_s_ = 0;
  bool holds_lock_ = false;
  std::string broken_;
  std::atomic<bool> aborted_{false};
  std::atomic<int> waiting_{0};
};

}  // namespace anyaccel::comm
