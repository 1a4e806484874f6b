// SPDX-License-Identifier: Apache-2.0
// The resident set of this process.
#pragma once

#include <cstdint>

namespace anyaccel {

// Bytes of this process that are in memory now. Throws std::system_error.
int64_t resident_bytes();

// Gives the heap's free pages back to the system, those below live blocks too (the allocator itself gives back the
// top only). Nothing to do with another C library than glibc.
void release_free_memory() noexcept;

}  // namespace anyaccel
