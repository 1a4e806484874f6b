// SPDX-License-Identifier: Apache-2.0
// How fast this machine reads memory: the physical limit of decoding.
#pragma once

#include <cstddef>

namespace anyaccel::llm {

// Bytes a second that `threads` threads (0: all CPUs of this process) read together from a buffer of `bytes`, the best
// of `rounds` passes of each of several ways to read, the product of a matrix with a token among them. A buffer that
// fits the caches measures those. Throws std::bad_alloc, std::system_error, std::invalid_argument.
double read_bandwidth(size_t bytes, int threads, int rounds);

}  // namespace anyaccel::llm
