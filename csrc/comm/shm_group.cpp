// SPDX-License-Identifier: Apache-2.0
#include "comm/shm_group.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <new>
#include <stdexcept>
#include <utility>

#include "comm/errors.h"

#ifdef __linux__
#include <sys/syscall.h>
#endif

namespace anyaccel::comm {
namespace {

constexpr size_t kControlBytes = 4096;  // a page, so that buffers are page-aligned
constexpr size_t kLine = 64;
constexpr int kBuffers = 3;

// Up to this size every rank sums everything: one synchronisation instead of two, and more reading for it.
constexpr size_t kSmallBytes = 32 << 10;
// Chunks of the large path: small enough that a chunk of every rank stays in the L2 caches.
constexpr size_t kMinChunkBytes = 64 << 10;

// How long a waiting rank spins before it yields its core, yields before it sleeps, and how often it looks
// around.
constexpr int64_t kSpinNs = 20'000;
constexpr int64_t kYieldNs = 20'000'000;
constexpr int64_t kSleepNs = 50'000;
constexpr int64_t kPeerCheckNs = 1'000'000;
constexpr int64_t kInterruptCheckNs = 50'000'000;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

void cpu_pause() {
#ifdef ANYACCEL_X86
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

int open_pidfd([[maybe_unused]] int pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#else
  return -1;
#endif
}

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

ShmGroup::ShmGroup(int rank, int size, size_t buffer_bytes, double timeout_s)
    : rank_(rank),
      size_(size),
      buffer_bytes_(buffer_bytes),
      timeout_s_(timeout_s),
      kernels_(reduce_kernels(selected_isa())) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size)
    throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(size));
  if (buffer_bytes < kLine * static_cast<size_t>(size) || buffer_bytes % kLine != 0)
    throw std::invalid_argument("a buffer of " + std::to_string(buffer_bytes) + " bytes for " + std::to_string(size) +
                                " ranks; needs a multiple of 64, at least 64 a rank");
  if (!(timeout_s > 0)) throw std::invalid_argument("timeout must be above 0");
  // Spinning takes the core from the very rank that is waited for when there are more ranks than cores.
  spin_ns_ = size <= get_nprocs() ? kSpinNs : 0;
  own_ = ShmSegment::create(kControlBytes + kBuffers * buffer_bytes);
  new (own_.data()) Control{};
}

ShmGroup::~ShmGroup() {
  // A peer that still waits for this rank gets an error at once; one that has what it needs never looks.
  if (!controls_.empty()) control(rank_).gave_up.store(1, std::memory_order_release);
  for (int fd : pidfds_)
    if (fd >= 0) close(fd);
}

void ShmGroup::connect(const std::vector<std::string>& names, const std::vector<int>& pids) {
  if (names.size() != static_cast<size_t>(size_) || pids.size() != names.size())
    throw std::invalid_argument("connect: needs one name and one pid a rank");
  if (!peers_.empty()) throw std::invalid_argument("connect: already connected");
  for (int r = 0; r < size_; ++r) {
    const bool self = r == rank_;
    peers_.push_back(self ? ShmSegment() : ShmSegment::open(names[r], kControlBytes + kBuffers * buffer_bytes_));
    char* base = static_cast<char*>(self ? own_.data() : peers_.back().data());
    controls_.push_back(reinterpret_cast<Control*>(base));
    buffers_.push_back(base + kControlBytes);
    pids_.push_back(pids[r]);
    pidfds_.push_back(self || pids[r] <= 0 ? -1 : open_pidfd(pids[r]));
  }
}

// --- waiting
// ------------------------------------------------------------------------------------------------------

void ShmGroup::synchronise() {
  const uint64_t target = ++sequence_;
  Control& mine = control(rank_);
  mine.descriptor[target & 1] = current_;
  mine.arrived.store(target, std::memory_order_release);
  int64_t started = 0;  // of waiting in earnest: one deadline for all peers together
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const std::atomic<uint64_t>& arrived = control(peer).arrived;
    if (arrived.load(std::memory_order_acquire) >= target) continue;
    const int64_t deadline = spin_ns_ > 0 ? now_ns() + spin_ns_ : 0;
    bool here = false;
    do {
      for (int i = 0; i < 8 && !here; ++i) {
        cpu_pause();
        here = arrived.load(std::memory_order_acquire) >= target;
      }
    } while (!here && spin_ns_ > 0 && now_ns() < deadline);
    if (here) continue;
    if (started == 0) started = now_ns();
    wait_slowly(peer, started);
  }
}

void ShmGroup::wait_slowly(int peer, int64_t start) {
  const std::atomic<uint64_t>& arrived = control(peer).arrived;
  int64_t peer_checked = start, interrupt_checked = start;
  while (arrived.load(std::memory_order_acquire) < sequence_) {
    const int64_t now = now_ns();
    if (now - start < kYieldNs) {
      sched_yield();
    } else {
      const timespec nap{0, kSleepNs};
      nanosleep(&nap, nullptr);
    }
    if (now - peer_checked > kPeerCheckNs) {
      peer_checked = now;
      // All peers: the one that is waited for may itself be waiting for a rank that died.
      for (int r = 0; r < size_; ++r)
        if (r != rank_ && control(r).arrived.load(std::memory_order_acquire) < sequence_) check_peer(r);
    }
    if (interrupt_check_ && now - interrupt_checked > kInterruptCheckNs) {
      interrupt_checked = now;
      interrupt_check_();
    }
    if (static_cast<double>(now - start) * 1e-9 > timeout_s_)
      throw CommError(CommError::Kind::timeout, "rank " + std::to_string(peer) + " (pid " +
                                                    std::to_string(pids_[peer]) + ") did not come within " +
                                                    std::to_string(static_cast<long>(timeout_s_)) + " s for " +
                                                    describe(current_));
  }
}

void ShmGroup::check_peer(int peer) const {
  const std::string who = "rank " + std::to_string(peer) + " (pid " + std::to_string(pids_[peer]) + ")";
  if (control(peer).gave_up.load(std::memory_order_acquire) != 0)
    throw CommError(
        CommError::Kind::broken,
        who + " has left the group or given up after an error, while this rank waited in " + describe(current_));
  bool ended = false;
  if (pidfds_[peer] >= 0) {
    pollfd fd{pidfds_[peer], POLLIN, 0};
    ended = poll(&fd, 1, 0) == 1;
  } else if (pids_[peer] > 0) {
    ended = kill(pids_[peer], 0) != 0 && errno == ESRCH;
  }
  // It may have arrived with its last breath.
  if (ended && control(peer).arrived.load(std::memory_order_acquire) < sequence_)
    throw CommError(CommError::Kind::peer_lost,
                    who + " has ended, while this rank waited for it in " + describe(current_));
}

std::string ShmGroup::describe(const Descriptor& descriptor) const {
  switch (static_cast<Op>(descriptor.op)) {
    case Op::all_reduce:
      return "all_reduce of " + std::to_string(descriptor.count) + " " +
             dtype_name(static_cast<DType>(descriptor.dtype));
    case Op::broadcast:
      return "broadcast of " + std::to_string(descriptor.count) + " bytes from rank " + std::to_string(descriptor.root);
    case Op::barrier:
      return "barrier";
  }
  return "an unknown operation";
}

void ShmGroup::check_descriptors() const {
  for (int peer = 0; peer < size_; ++peer) {
    const Descriptor& theirs = control(peer).descriptor[sequence_ & 1];
    if (theirs == current_) continue;
    throw CommError(CommError::Kind::broken, "ranks disagree: rank " + std::to_string(rank_) + " called " +
                                                 describe(current_) + ", rank " + std::to_string(peer) + " called " +
                                                 describe(theirs));
  }
}

// --- collectives
// --------------------------------------------------------------------------------------------------

template <class Body>
void ShmGroup::call(const Descriptor& descriptor, Body body) {
  if (size_ == 1) return;
  const std::lock_guard<std::mutex> lock(one_call_);
  if (controls_.empty()) throw std::logic_error("the group is not connected");
  if (!broken_.empty()) throw CommError(CommError::Kind::broken, "the group is broken by an earlier error: " + broken_);
  current_ = descriptor;
  try {
    body();
  } catch (const std::exception& error) {
    broken_ = error.what();
    control(rank_).gave_up.store(1, std::memory_order_release);
    throw;
  }
}

void ShmGroup::all_reduce_sum(void* data, size_t count, DType dtype) {
  const size_t bytes = count * dtype_bytes(dtype);
  call({count, static_cast<uint8_t>(Op::all_reduce), static_cast<uint8_t>(dtype), 0, 0}, [&] {
    if (bytes <= std::min(kSmallBytes, buffer_bytes_))
      all_reduce_small(static_cast<char*>(data), count, dtype);
    else
      all_reduce_large(static_cast<char*>(data), count, dtype);
  });
}

void ShmGroup::all_reduce_small(char* data, size_t count, DType dtype) {
  const uint64_t chunk = chunk_++;
  std::memcpy(buffer(rank_, chunk), data, count * dtype_bytes(dtype));
  synchronise();
  check_descriptors();
  const void* sources[kMaxRanks];
  for (int r = 0; r < size_; ++r) sources[r] = r == rank_ ? data : buffer(r, chunk);
  kernels_.by_dtype[static_cast<int>(dtype)](sources, size_, data, nullptr, count);
}

void ShmGroup::all_reduce_large(char* data, size_t count, DType dtype) {
  const size_t item = dtype_bytes(dtype);
  const size_t total = count * item;
  // At least two chunks where they are not tiny, so that the pipeline has something to overlap.
  const size_t wanted = std::min(std::max(round_up(total / 2, kLine * size_), kMinChunkBytes), buffer_bytes_);
  const size_t part_bytes = std::max(wanted / size_ / kLine * kLine, kLine);
  const size_t chunk_bytes = part_bytes * size_;
  const size_t n_chunks = (total + chunk_bytes - 1) / chunk_bytes;
  const uint64_t first = chunk_;
  chunk_ += n_chunks;

  // Calls body(offset in the chunk, bytes) for the part of chunk i that `owner` sums.
  const auto part = [&](size_t i, int owner, auto body) {
    const size_t length = std::min(chunk_bytes, total - i * chunk_bytes);
    const size_t begin = std::min(part_bytes * owner, length);
    const size_t end = std::min(begin + part_bytes, length);
    if (end > begin) body(begin, end - begin);
  };
  for (size_t i = 0; i < n_chunks + 2; ++i) {
    if (i < n_chunks) {
      char* in = data + i * chunk_bytes;
      char* mine = buffer(rank_, first + i);
      for (int r = 0; r < size_; ++r)
        if (r != rank_) part(i, r, [&](size_t at, size_t n) { std::memcpy(mine + at, in + at, n); });
    }
    if (i >= 1 && i <= n_chunks) {
      const size_t c = i - 1;
      part(c, rank_, [&](size_t at, size_t n) {
        char* own = data + c * chunk_bytes + at;
        const void* sources[kMaxRanks];
        for (int r = 0; r < size_; ++r) sources[r] = r == rank_ ? own : buffer(r, first + c) + at;
        kernels_.by_dtype[static_cast<int>(dtype)](sources, size_, own, buffer(rank_, first + c) + at, n / item);
      });
    }
    if (i >= 2) {
      const size_t c = i - 2;
      char* out = data + c * chunk_bytes;
      for (int r = 0; r < size_; ++r)
        if (r != rank_) part(c, r, [&](size_t at, size_t n) { std::memcpy(out + at, buffer(r, first + c) + at, n); });
    }
    if (i <= n_chunks) synchronise();
    if (i == 0) check_descriptors();
  }
}

void ShmGroup::broadcast(void* data, size_t bytes, int root) {
  if (root < 0 || root >= size_)
    throw std::invalid_argument("broadcast from rank " + std::to_string(root) + " in a group of " +
                                std::to_string(size_));
  call({bytes, static_cast<uint8_t>(Op::broadcast), 0, static_cast<uint16_t>(root), 0}, [&] {
    size_t done = 0;
    do {
      const size_t n = std::min(buffer_bytes_, bytes - done);
      char* at = static_cast<char*>(data) + done;
      const uint64_t chunk = chunk_++;
      if (rank_ == root) std::memcpy(buffer(rank_, chunk), at, n);
      synchronise();
      if (done == 0) check_descriptors();
      if (rank_ != root) std::memcpy(at, buffer(root, chunk), n);
      done += n;
    } while (done < bytes);
  });
}

void ShmGroup::barrier() {
  call({0, static_cast<uint8_t>(Op::barrier), 0, 0, 0}, [&] {
    synchronise();
    check_descriptors();
  });
}

}  // namespace anyaccel::comm
