// SPDX-License-Identifier: Apache-2.0
// The queue of one thread's transfers, over io_uring, Linux AIO or plain system calls.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <system_error>
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

// A queue is used by one thread. At most as many transfers as it was made for may be in flight.
class Queue {
 public:
  virtual ~Queue() = default;

  // Adds a transfer, whose completion will carry `slot`. The memory must stay until then.
  virtual void add(uint32_t slot, const Transfer& transfer) = 0;

  // Hands the added transfers to the kernel. Those that it refuses complete with the error.
  virtual void submit() = 0;

  // Waits for at least one completion and appends all that there are. A transfer must be in flight.
  virtual void reap(std::vector<Completion>& done) = 0;

  // Pins memory that transfers will use, so that the kernel need not look it up each time; the destructor unpins it. A
  // failure, as with a low RLIMIT_MEMLOCK, is no error.
  virtual void pin(char*, size_t) {}
};

// Each throws std::system_error when this machine does not allow it.
std::unique_ptr<Queue> make_io_uring(unsigned depth);
std::unique_ptr<Queue> make_linux_aio(unsigned depth);

// This queue transfers synchronously, within add().
std::unique_ptr<Queue> make_synchronous();

[[noreturn]] inline void throw_errno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace anyaccel::aio
