// SPDX-License-Identifier: Apache-2.0
// The resident set of this process.
#pragma once

#include <cstdint>

namespace anyaccel {

// Bytes of this process that are in memory now. Throws std::system_error.
int64_t resident_bytes();

}  // namespace anyaccel
