// SPDX-License-Identifier: Apache-2.0
// Runs every collective of ShmGroup: one at a time, with errors that break the group for good.
#pragma once

#include <cstddef>
#include <exception>
#include <mutex>
#include <stdexcept>

#include "comm/errors.h"
#include "comm/shm_group.h"

namespace anyaccel::comm {

constexpr size_t kLine = 64;

constexpr size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

template <class Body>
void ShmGroup::call_locked(const Descriptor& descriptor, Body body) {
  if (controls_.empty()) throw std::logic_error("the group is not connected");
  if (!broken_.empty()) throw CommError(CommError::Kind::broken, "the group is broken by an earlier error: " + broken_);
  if (aborted_.load(std::memory_order_relaxed)) throw CommError(CommError::Kind::broken, "the group was aborted");
  current_ = descriptor;
  if (call_timeout_s_ == 0) call_timeout_s_ = timeout();
  try {
    body();
    call_timeout_s_ = 0;
  } catch (const std::exception& error) {
    broken_ = error.what();
    give_up();
    throw;
  }
}

template <class Body>
void ShmGroup::call(const Descriptor& descriptor, Body body) {
  const CallGuard guard(*this);
  holds_lock_ = false;
  call_locked(descriptor, body);
}

}  // namespace anyaccel::comm
