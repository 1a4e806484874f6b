// SPDX-License-Identifier: Apache-2.0
// The resident set of this process, and what the host has left.
#pragma once

#include <cstdint>

namespace anyaccel {

// Bytes of this process that are in memory now. Throws std::system_error.
int64_t resident_bytes();

// Bytes that can be allocated now without swapping, as /proc/meminfo has it. Throws std::system_error.
int64_t available_bytes();

// Gives the heap's free pages back to the system, those below live blocks too (the allocator itself gives back the
// top only). Nothing to do with another C library than glibc.
void release_free_memory() noexcept;

}  // namespace anyaccel
