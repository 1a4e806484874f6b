// SPDX-License-Identifier: Apache-2.0
// One thread's queue of transfers, over io_uring, Linux AIO or plain system calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace anyaccel::aio {

enum class Engine { automatic, io_uring, linux_aio, threads };

struct Transfer {
  int descriptor;
  bool write;
  char* address;
  uint32_t bytes;
  int64_t offset;
};

struct Completion {
  uint32_t slot;
  int64_t result;  // bytes transferred, or -errno
};

// Used by one thread. At most as many transfers as the queue was made for may be under way.
class Queue {
 public:
  virtual ~Queue() = default;

  // Adds a transfer, whose completion will carry `slot`. The memory must stay until then.
  virtual void add(uint32_t slot, const Transfer& transfer) = 0;

  // Hands to the kernel what was added. What it does not take completes with the error.
  virtual void submit() = 0;

  // Waits until something is complete and appends all that is. There must be something under way.
  virtual void reap(std::vector<Completion>& done) = 0;

  // Pins memory that transfers will use, so that the kernel need not look it up each time. Needs no undoing. Not to be
  // able to is no error: RLIMIT_MEMLOCK may be too low.
  virtual void pin(char*, size_t) {}
};

// Each throws std::system_error when this machine does not allow it.
std::unique_ptr<Queue> make_io_uring(unsigned depth);
std::unique_ptr<Queue> make_linux_aio(unsigned depth);

// Transfers one after the other, each within submit().
std::unique_ptr<Queue> make_synchronous();

}  // namespace anyaccel::aio
