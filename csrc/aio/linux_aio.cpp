// SPDX-License-Identifier: Apache-2.0
// Linux AIO through its system calls (io_submit), and the synchronous queue, which needs no support of the kernel.
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "aio/queue.h"

namespace anyaccel::aio {
namespace {

class LinuxAio final : public Queue {
 public:
  explicit LinuxAio(unsigned depth) : blocks_(depth), events_(depth) {
    if (syscall(SYS_io_setup, depth, &context_) != 0) throw_errno("io_setup");
  }

  ~LinuxAio() override { syscall(SYS_io_destroy, context_); }

  void add(uint32_t slot, const Transfer& transfer) override {
    iocb& block = blocks_[slot];
    block = {};
    block.aio_data = slot;
    block.aio_lio_opcode = transfer.write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    block.aio_fildes = static_cast<uint32_t>(transfer.descriptor);
    block.aio_buf = reinterpret_cast<uint64_t>(transfer.address);
    block.aio_nbytes = transfer.bytes;
    block.aio_offset = transfer.offset;
    added_.push_back(&block);
  }

  void submit() override {
    size_t first = 0;
    while (first < added_.size()) {
      const long taken = syscall(SYS_io_submit, context_, static_cast<long>(added_.size() - first), &added_[first]);
      if (taken > 0) {
        first += static_cast<size_t>(taken);
      } else if (taken == 0 || errno == EAGAIN) {
        usleep(100);
      } else if (errno != EINTR) {
        // The error is about the first block, as EINVAL for a descriptor or alignment that the file system refuses.
        refused_.push_back({static_cast<uint32_t>(added_[first]->aio_data), -errno});
        ++first;
      }
    }
    added_.clear();
  }

  void reap(std::vector<Completion>& done) override {
    done.insert(done.end(), refused_.begin(), refused_.end());
    const bool some = !refused_.empty();
    refused_.clear();
    for (;;) {
      const long found = syscall(SYS_io_getevents, context_, some ? 0L : 1L, static_cast<long>(events_.size()),
                                 events_.data(), nullptr);
      for (long i = 0; i < found; ++i)
        done.push_back({static_cast<uint32_t>(events_[i].data), static_cast<int64_t>(events_[i].res)});
      if (found > 0 || some) return;
      if (found < 0 && errno != EINTR) usleep(100);  // the kernel still uses the memory
    }
  }

 private:
  aio_context_t context_ = 0;
  std::vector<iocb> blocks_;
  std::vector<iocb*> added_;
  std::vector<io_event> events_;
  std::vector<Completion> refused_;
};

class Synchronous final : public Queue {
 public:
  void add(uint32_t slot, const Transfer& transfer) override {
    ssize_t result;
    do {
      result = transfer.write ? pwrite(transfer.descriptor, transfer.address, transfer.bytes, transfer.offset)
                              : pread(transfer.descriptor, transfer.address, transfer.bytes, transfer.offset);
    } while (result < 0 && errno == EINTR);
    done_.push_back({slot, result < 0 ? -errno : result});
  }

  void submit() override {}

  void reap(std::vector<Completion>& done) override {
    done.insert(done.end(), done_.begin(), done_.end());
    done_.clear();
  }

 private:
  std::vector<Completion> done_;
};

}  // namespace

std::unique_ptr<Queue> make_linux_aio(unsigned depth) { return std::make_unique<LinuxAio>(depth); }
std::unique_ptr<Queue> make_synchronous() { return std::make_unique<Synchronous>(); }

}  // namespace anyaccel::aio
