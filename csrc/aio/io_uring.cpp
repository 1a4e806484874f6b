// SPDX-License-Identifier: Apache-2.0
// io_uring through its system calls. The structures are copied from linux/io_uring.h, which older build machines lack.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "aio/queue.h"

namespace anyaccel::aio {
namespace {

// The system call numbers are the same on every architecture of Linux but Alpha.
constexpr long kSetup = 425, kEnter = 426, kRegister = 427;

constexpr uint8_t kOpReadFixed = 4, kOpWriteFixed = 5, kOpRead = 22, kOpWrite = 23;
constexpr uint32_t kEnterGetEvents = 1u << 0;
constexpr uint32_t kRegisterBuffers = 0;
constexpr uint32_t kSetupCoopTaskrun = 1u << 8;
constexpr uint32_t kFeatureSingleMmap = 1u << 0, kFeatureRwCurPos = 1u << 3;
constexpr int64_t kOffsetSqRing = 0, kOffsetSqes = 0x10000000;

struct SqOffsets {
  uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
  uint64_t user_addr;
};

struct CqOffsets {
  uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
  uint64_t user_addr;
};

struct Params {
  uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
  SqOffsets sq;
  CqOffsets cq;
};
static_assert(sizeof(Params) == 120);

struct Sqe {
  uint8_t opcode, flags;
  uint16_t ioprio;
  int32_t fd;
  uint64_t offset, address;
  uint32_t length, rw_flags;
  uint64_t user_data;
  uint16_t buffer_index, personality;
  int32_t splice_fd;
  uint64_t reserved[2];
};
static_assert(sizeof(Sqe) == 64);

struct Cqe {
  uint64_t user_data;
  int32_t result;
  uint32_t flags;
};
static_assert(sizeof(Cqe) == 16);

class Mapping {
 public:
  Mapping(int descriptor, size_t bytes, int64_t offset) : bytes_(bytes) {
    address_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, offset);
    if (address_ == MAP_FAILED) throw_errno("mmap of io_uring");
  }
  ~Mapping() { munmap(address_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  template <typename T>
  T* at(uint32_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(address_) + offset);
  }

 private:
  void* address_;
  size_t bytes_;
};

class IoUring final : public Queue {
 public:
  explicit IoUring(unsigned depth) {
    Params params{};
    params.flags = kSetupCoopTaskrun;
    descriptor_ = static_cast<int>(syscall(kSetup, depth, &params));
    if (descriptor_ < 0 && errno == EINVAL) {  // before Linux 5.19
      params = {};
      descriptor_ = static_cast<int>(syscall(kSetup, depth, &params));
    }
    if (descriptor_ < 0) throw_errno("io_uring_setup");
    try {
      // Linux 5.6 is the first version with plain reads and writes.
      if (!(params.features & kFeatureSingleMmap) || !(params.features & kFeatureRwCurPos)) {
        errno = ENOSYS;
        throw_errno("io_uring before Linux 5.6");
      }
      const size_t sq_bytes = params.sq.array + params.sq_entries * sizeof(uint32_t);
      const size_t cq_bytes = params.cq.cqes + params.cq_entries * sizeof(Cqe);
      rings_ = std::make_unique<Mapping>(descriptor_, sq_bytes > cq_bytes ? sq_bytes : cq_bytes, kOffsetSqRing);
      entries_ = std::make_unique<Mapping>(descriptor_, params.sq_entries * sizeof(Sqe), kOffsetSqes);
    } catch (...) {
      close(descriptor_);
      throw;
    }
    sq_tail_ = rings_->at<uint32_t>(params.sq.tail);
    sq_mask_ = *rings_->at<uint32_t>(params.sq.ring_mask);
    sq_array_ = rings_->at<uint32_t>(params.sq.array);
    cq_head_ = rings_->at<uint32_t>(params.cq.head);
    cq_tail_ = rings_->at<uint32_t>(params.cq.tail);
    cq_mask_ = *rings_->at<uint32_t>(params.cq.ring_mask);
    cqes_ = rings_->at<Cqe>(params.cq.cqes);
  }

  ~IoUring() override {
    rings_.reset();
    entries_.reset();
    close(descriptor_);
  }

  void add(uint32_t slot, const Transfer& transfer) override {
    const bool fixed = transfer.address >= pinned_ && transfer.address + transfer.bytes <= pinned_ + pinned_bytes_;
    const uint32_t tail = *sq_tail_;  // the kernel never writes it
    const uint32_t index = tail & sq_mask_;
    Sqe& entry = entries_->at<Sqe>(0)[index];
    entry = {};
    entry.opcode = transfer.write ? (fixed ? kOpWriteFixed : kOpWrite) : (fixed ? kOpReadFixed : kOpRead);
    entry.fd = transfer.descriptor;
    entry.offset = static_cast<uint64_t>(transfer.offset);
    entry.address = reinterpret_cast<uint64_t>(transfer.address);
    entry.length = transfer.bytes;
    entry.user_data = slot;
    sq_array_[index] = index;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    ++added_;
  }

  void submit() override {
    while (added_ > 0) {
      const long taken = syscall(kEnter, descriptor_, added_, 0u, 0u, nullptr, 0);
      if (taken >= 0) {
        added_ -= static_cast<uint32_t>(taken);
      } else if (errno == EAGAIN || errno == EBUSY) {
        usleep(100);  // the kernel is short of memory for requests
      } else if (errno != EINTR) {
        retract_added(-errno);
      }
    }
  }

  void reap(std::vector<Completion>& done) override {
    done.insert(done.end(), refused_.begin(), refused_.end());
    bool some = !refused_.empty();
    refused_.clear();
    while (!collect(done) && !some)
      // After any error, the kernel still uses the memory and reports the completion in the ring.
      if (syscall(kEnter, descriptor_, 0u, 1u, kEnterGetEvents, nullptr, 0) < 0 && errno != EINTR) usleep(100);
  }

  void pin(char* address, size_t bytes) override {
    const iovec memory{address, bytes};
    if (syscall(kRegister, descriptor_, kRegisterBuffers, &memory, 1u) == 0) {
      pinned_ = address;
      pinned_bytes_ = bytes;
    }
  }

 private:
  bool collect(std::vector<Completion>& done) {
    uint32_t head = *cq_head_;  // the kernel never writes it
    const uint32_t tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
    if (head == tail) return false;
    for (; head != tail; ++head) {
      const Cqe& entry = cqes_[head & cq_mask_];
      done.push_back({static_cast<uint32_t>(entry.user_data), entry.result});
    }
    __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
    return true;
  }

  // Removes the added entries from the ring, and has them complete with `result`.
  void retract_added(int64_t result) {
    const uint32_t tail = *sq_tail_;
    for (uint32_t i = tail - added_; i != tail; ++i)
      refused_.push_back({static_cast<uint32_t>(entries_->at<Sqe>(0)[i & sq_mask_].user_data), result});
    __atomic_store_n(sq_tail_, tail - added_, __ATOMIC_RELEASE);
    added_ = 0;
  }

  int descriptor_ = -1;
  std::unique_ptr<Mapping> rings_, entries_;
  uint32_t *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  uint32_t sq_mask_ = 0, cq_mask_ = 0, added_ = 0;
  Cqe* cqes_ = nullptr;
  char* pinned_ = nullptr;
  size_t pinned_bytes_ = 0;
  std::vector<Completion> refused_;
};

}  // namespace

std::unique_ptr<Queue> make_io_uring(unsigned depth) { return std::make_unique<IoUring>(depth); }

}  // namespace anyaccel::aio
