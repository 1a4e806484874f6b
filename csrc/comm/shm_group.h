// SPDX-License-Identifier: Apache-2.0
// Collectives among processes of one host through shared memory.
//
// Each rank owns one segment: a control block, three buffers, and mailboxes for messages (messages.h). A rank writes
// its own segment only, so its pages can be local to its memory node, and reads the others'. Progress is a counter per
// rank ("arrived"): a rank passes a synchronisation point when every rank's counter has reached it.
//
// In a small all-reduce, each rank copies its data in, synchronises, and reduces all copies.
// A large all-reduce is pipelined over three buffers with one synchronisation for each chunk: while chunk i is copied
// in, this rank's share of chunk i-1 is reduced and the other ranks' shares of chunk i-2 are copied out (reduce-scatter
// and all-gather: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005).
// In an all-reduce of symmetric tensors (add_symmetric), every rank reduces its share of all tensors and writes the
// result into all of them, without copies. The other collectives write, synchronise and read, chunk by chunk.
//
// Three buffers are enough because chunks are numbered over all calls and chunk g uses buffer g mod 3. A rank that
// writes chunk g has passed the synchronisation that every rank posts after its last read of chunk g-3.
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
#include "common/waiting.h"

namespace anyaccel::comm {

constexpr int kMaxRanks = 1024;

// Functions by which a thread that holds the interpreter's lock releases it during a long wait.
struct IdleHooks {
  void* (*begin)();
  void (*end)(void*);
};

class ShmGroup {
 public:
  // Creates this rank's segment with three buffers of `buffer_bytes` each (a multiple of 64) and `mailbox_bytes` more.
  // A rank waits at most `timeout_s` seconds for a live peer. Throws std::system_error and std::invalid_argument.
  ShmGroup(int rank, int size, size_t buffer_bytes, double timeout_s, ShmSegment::Kind kind = ShmSegment::Kind::posix,
           size_t mailbox_bytes = 0);
  ~ShmGroup();
  ShmGroup(const ShmGroup&) = delete;
  ShmGroup& operator=(const ShmGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return own_.name(); }

  // Maps the peers' segments. `pids[r]` is used to detect that rank r has died; it is 0 when rank r is in another PID
  // namespace.
  void connect(const std::vector<std::string>& names, const std::vector<int>& pids);
  // Connects ranks that are threads of one process, given their groups in rank order, which must outlive this one's
  // use.
  void connect(const std::vector<ShmGroup*>& ranks);
  // Must be called when every rank has connected; nobody can open the segments from then on.
  void unlink() noexcept { own_.unlink(); }

  // Called about every 50 ms of waiting; may throw, which breaks the group.
  void set_interrupt_check(std::function<void()> check) { interrupt_check_ = std::move(check); }
  // Sets the numbers of the ranks in error messages, for a group that is a part of a larger one.
  void set_numbers(std::vector<int> numbers) { numbers_ = std::move(numbers); }
  void set_idle_hooks(IdleHooks hooks) { idle_hooks_ = hooks; }
  void set_timeout(double timeout_s);
  double timeout() const { return timeout_s_.load(std::memory_order_relaxed); }

  // The executor of asynchronous calls counts those that are not done here.
  void add_waiting(int calls) { waiting_.fetch_add(calls, std::memory_order_acq_rel); }
  bool waiting() const { return waiting_.load(std::memory_order_acquire) != 0; }

  // Ends all waits in this group, here and on the peers, with an error. Any thread may call it at any time.
  void abort() noexcept;
  // Leaves the group without an error here; peers that wait for this rank fail with the message that it has left.
  void leave() noexcept;

  // The collectives throw CommError, and whatever the interrupt check throws; after that the group stays broken and
  // every rank that waits in it gets an error. `dtype` is compared with the peers' even where bytes are only moved.
  // Calls of several threads run one after the other.

  // Works in place. With `holds_lock` the caller holds the interpreter's lock, which is released only in a long wait.
  // `caller_dtype` is the caller's dtype where it was converted to `dtype`; the peers must have the same.
  void all_reduce(void* data, size_t count, DType dtype, ReduceOp op, bool holds_lock = false,
                  DType caller_dtype = DType::f32);
  // Returns false without having done anything when another thread runs a call.
  bool try_all_reduce(void* data, size_t count, DType dtype, ReduceOp op);
  // `out` is written on `root` only, and may be `in`.
  void reduce(const void* in, void* out, size_t count, DType dtype, ReduceOp op, int root,
              DType caller_dtype = DType::f32);
  // `ins[r]` is the data for rank r; `out` may be ins[rank].
  void reduce_scatter(const void* const* ins, void* out, size_t count, DType dtype, ReduceOp op,
                      DType caller_dtype = DType::f32);
  void broadcast(void* data, size_t count, DType dtype, int root);
  // `counts[r]` is the number of elements of rank r, and must be the same on all ranks. outs[rank] may be `in`.
  void all_gather(const void* in, void* const* outs, const size_t* counts, DType dtype);
  void gather(const void* in, void* const* outs, size_t count, DType dtype, int root);
  void scatter(const void* const* ins, void* out, size_t count, DType dtype, int root);
  // Counts may differ from pair to pair, but this rank must expect from a peer what that one sends.
  void all_to_all(const void* const* ins, const size_t* in_counts, void* const* outs, const size_t* out_counts,
                  DType dtype);
  void barrier() { barrier(0); }
  // With 0, the group's timeout applies.
  void barrier(double timeout_s);
  // partial := rms_norm(residual := residual + sum over ranks of partial) * weight, row by row.
  void all_reduce_add_rms_norm(void* partial, void* residual, const void* weight, float eps, size_t rows, size_t width,
                               DType dtype, bool holds_lock = false);

  // Registers memory of all ranks; an all-reduce of an address inside this rank's part needs no copies then.
  // `id` must be the same on all ranks and new. bases[rank] is this rank's address.
  void add_symmetric(uint16_t id, const std::vector<char*>& bases, size_t bytes);
  void remove_symmetric(uint16_t id);

  // The rest of the interface serves messages.h.
  char* mailboxes(int rank) const { return buffers_[rank] + kBuffers * buffer_bytes_; }
  size_t mailbox_bytes() const { return mailbox_bytes_; }
  // Throws when `peer` has ended, left the group or failed, or when this rank has aborted.
  void check_peer(int peer, const std::string& doing) const;
  std::string peer_name(int peer) const;
  // Throws in a process that was forked after the group was made, since its parent is the rank.
  void check_process() const;
  // Wakes the threads of a rank that wait for messages: called after each change that it may wait for.
  void ring(int rank) noexcept;
  // Sleeps until a peer rings, at most `ns`; not if `progress` returns true, which is called before.
  template <class Progress>
  void sleep_unless(Progress progress, int64_t ns) {
    const Listening listening(bell(rank_));
    const uint32_t rung = listening.mine.rung.load();
    if (!progress()) sleep_while(listening.mine.rung, rung, ns);
  }
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

  // Describes a call, and is compared with the peers' at the first synchronisation of each call.
  struct Descriptor {
    uint64_t count = 0;
    uint64_t offset = 0;  // in the symmetric memory; in all_reduce_add_rms_norm, the width of a row
    Op op = Op::barrier;
    uint8_t dtype = 0;
    uint8_t reduce_op = 0;
    uint8_t caller_dtype = 0;  // the caller's dtype where it was converted, else 0
    uint16_t root = 0;
    uint16_t symmetric = 0;  // the id of the memory, or 0
    bool operator==(const Descriptor&) const = default;
  };

  // This is one cache line, so that a peer that sees the counter move has read the descriptor with it. There are two
  // descriptors because a fast peer may be one synchronisation ahead of the reader, but never two.
  struct alignas(64) Control {
    std::atomic<uint64_t> arrived;
    Descriptor descriptor[2];
    std::atomic<uint32_t> fate;     // a Fate, and in the upper half the rank that was the cause
    std::atomic<uint32_t> sleeper;  // while this rank sleeps: the rank that it waits for, and 1; that one sets it to 0
  };
  static_assert(sizeof(Control) == 64);

  // By which threads of a rank that wait for messages are woken.
  struct alignas(64) Bell {
    std::atomic<uint32_t> rung;
    std::atomic<uint32_t> listeners;
  };
  struct Listening {
    explicit Listening(Bell& bell) : mine(bell) { mine.listeners.fetch_add(1); }
    ~Listening() { mine.listeners.fetch_sub(1); }
    Listening(const Listening&) = delete;
    Listening& operator=(const Listening&) = delete;
    Bell& mine;
  };

  // Serialises calls. With `waits` it throws in a forked process, and in a thread that runs a call already, which is
  // in a signal handler and would wait for itself. Without, it is not acquired in these cases, nor while another thread
  // runs a call.
  class CallGuard {
   public:
    explicit CallGuard(ShmGroup& group, bool waits = true);
    ~CallGuard();
    CallGuard(const CallGuard&) = delete;
    CallGuard& operator=(const CallGuard&) = delete;
    bool acquired() const { return acquired_; }

   private:
    ShmGroup& group_;
    bool acquired_ = false;
  };
  friend class CallGuard;
  bool is_forked() const;
  std::string number(int rank) const;

  // The state of a rank: in the group, or why it is no longer.
  enum class Fate : uint32_t { here, left, peer_lost, timed_out, aborted, error };
  // Records this rank's fate for its peers, unless it has one already.
  void set_fate(Fate fate, int cause = 0) const noexcept;
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
  Bell& bell(int rank) const { return *reinterpret_cast<Bell*>(controls_[rank] + 1); }
  // The sizes that each rank announces to its peers. There are two tables for the reason that there are two
  // descriptors.
  uint64_t* table(int rank, uint64_t sequence) const;
  char* buffer(int rank, uint64_t chunk) const { return buffers_[rank] + (chunk % kBuffers) * buffer_bytes_; }
  size_t control_bytes() const;
  void add_peer(char* base, int pid);
  void check_root(const char* what, int root) const;
  void synchronise();
  void wake_sleepers() noexcept;
  void wait_slowly(int64_t start);
  // Sleeps until the peer arrives, for a short while at most.
  void sleep_for(int peer) noexcept;
  [[noreturn]] void time_out() const;
  void check_descriptors() const;
  void check_tables(const size_t* counts) const;
  // Whether the ranks of an all-reduce agree on the symmetric memory and offset. Throws when they disagree on more.
  bool same_placement() const;
  std::string describe(const Descriptor& descriptor) const;
  ReduceFn kernel(DType dtype, ReduceOp op) const;
  Descriptor reduction(Op what, size_t count, DType dtype, ReduceOp op, int root = 0,
                       DType caller_dtype = DType::f32) const;
  bool is_small(size_t bytes) const;
  void all_reduce_locked(char* data, size_t count, DType dtype, ReduceOp op, DType caller_dtype);
  // These return false, without having changed anything, when a peer's tensor has another placement.
  bool all_reduce_copying(char* data, size_t count, DType dtype, ReduceFn kernel);
  bool all_reduce_small(char* data, size_t count, DType dtype, ReduceFn kernel);
  bool all_reduce_large(char* data, size_t count, DType dtype, ReduceFn kernel);
  void all_reduce_symmetric(const Symmetric& memory, size_t offset, size_t count, DType dtype, ReduceFn kernel);
  const Symmetric* find_symmetric(const void* data, size_t bytes);

  const uint32_t forks_at_creation_;
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
  std::vector<std::shared_ptr<const Peer>> processes_;
  std::function<void()> interrupt_check_;
  std::vector<int> numbers_;
  IdleHooks idle_hooks_{nullptr, nullptr};
  std::mutex call_mutex_;
  std::atomic<std::thread::id> calling_thread_{};
  std::vector<Symmetric> symmetric_;
  std::mutex retired_mutex_;
  std::vector<uint16_t> retired_;
  std::atomic<bool> any_retired_{false};
  int64_t spin_ns_ = 0;
  Descriptor current_{};
  uint64_t sequence_ = 0;  // synchronisations posted
  uint64_t chunk_ = 0;     // the number of the next chunk
  double call_timeout_s_ = 0;
  bool holds_lock_ = false;
  std::string broken_;
  std::atomic<bool> aborted_{false};
  std::atomic<int> waiting_{0};
};

}  // namespace anyaccel::comm
