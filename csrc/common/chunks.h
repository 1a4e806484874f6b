// SPDX-License-Identifier: Apache-2.0
// A loop over chunks on threads that last as long as it, for long work that may throw and may wait for a disk.
// parallel.h has one for short work, which may do neither.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "common/team.h"

namespace anyaccel {

// Calls fn(chunk) once for every chunk in 0 .. chunks-1, on up to `threads` threads (0: usable_cpus()), the caller's
// among them. When a call throws, no more chunks are begun, and the first exception is thrown here.
template <class Fn>
void for_each_chunk(size_t chunks, int threads, const Fn& fn) {
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      for (size_t chunk; (chunk = next.fetch_add(1)) < chunks;) fn(chunk);
    } catch (...) {
      next = chunks;
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  const size_t wanted = std::min(static_cast<size_t>(threads > 0 ? threads : usable_cpus()), chunks);
  std::vector<std::thread> helpers;
  for (size_t i = 1; i < wanted; ++i) {
    try {
      helpers.emplace_back(work);
    } catch (const std::system_error&) {
      break;  // the system has no more threads: those that run do all of the work
    }
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace anyaccel
