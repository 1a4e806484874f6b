// SPDX-License-Identifier: Apache-2.0
// Packed weights to a file and back, or the file as the weights: in chunks, on several threads, with a checksum of what
// went through.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace anyaccel::llm {

// Called on the calling thread with the bytes done so far; what it throws ends the transfer and is passed on.
using FileProgress = std::function<void(size_t done)>;

// `pieces`: bytes that have a checksum of their own, one after another from `data` on. Both return the checksums: 64
// bits that find damage (any change within eight bytes is found for sure, others are missed once in 2^64), not
// tampering. They do not depend on the number of threads. A chunk is hashed while it is in the cache, so that checking
// a file costs hardly more than reading it. `threads`: 0 for as many as this process may use CPUs. Throws
// std::system_error naming the call that failed; a file that ends too early is EIO.
std::vector<uint64_t> write_weights(int fd, int64_t offset, const void* data, const std::vector<size_t>& pieces,
                                    int threads = 0, const FileProgress& progress = {});
std::vector<uint64_t> read_weights(int fd, int64_t offset, void* data, const std::vector<size_t>& pieces,
                                   int threads = 0, const FileProgress& progress = {});
// As read_weights(), without a copy: the file's own pages become the memory, which allocate_weights() has given for as
// many bytes and nobody has written to. The file must not be changed in place from then on; it may be removed. On a
// network's file system, and where there is too little for whole pages, they are read.
std::vector<uint64_t> map_weights(int fd, int64_t offset, void* data, const std::vector<size_t>& pieces,
                                  int threads = 0, const FileProgress& progress = {});
// The checksum of a piece, of bytes in memory.
uint64_t weights_checksum(const void* data, size_t bytes);

}  // namespace anyaccel::llm
