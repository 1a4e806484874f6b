// SPDX-License-Identifier: Apache-2.0
// One read or write of a caller, which is split into chunks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "aio/file.h"

namespace anyaccel::aio {

// Memory that holds bytes [offset, offset + bytes) of the file.
struct Segment {
  int64_t offset;
  char* address;
  int64_t bytes;
};

// Bytes [begin, end) of the file.
struct Chunk {
  int64_t begin, end;
};

class Request {
 public:
  // The segments must ascend and not overlap; those of a write must leave no gaps.
  Request(std::vector<Segment> segments, int64_t block_bytes);

  // Opens the file and plans the chunks.
  Failure open(const std::string& path, int descriptor, const FileOptions& options);

  bool write() const { return write_; }
  size_t chunks() const { return chunks_; }
  Chunk chunk(size_t index) const;

  // The address of a chunk's bytes when they are contiguous in memory; else null.
  char* contiguous(const Chunk& chunk) const;
  // Whether any segment has bytes of the chunk.
  bool wanted(const Chunk& chunk) const;

  // Copies between `bounce`, which holds bytes from `base` of the file, and the segments' part of `chunk`.
  void scatter(const Chunk& chunk, const char* bounce, int64_t base) const;
  void gather(const Chunk& chunk, char* bounce, int64_t base) const;

  // Transfers from `from` to the chunk's end through the page cache, and blocks until that is done.
  Failure transfer_buffered(const Chunk& chunk, int64_t from);

  // Ends the request after its last chunk: writes the unaligned ends, then commits or abandons the file.
  void finish();

  // Records the first failure, or a later one of the same step that is nearer to the beginning of the file. Does
  // nothing once finish() has begun.
  void fail(const Failure& why);
  void cancel();
  bool cancelled() const { return cancelled_.load(std::memory_order_acquire); }
  // Whether the request has failed, so that no further chunk need be started.
  bool stopped() const { return stopped_.load(std::memory_order_acquire); }

  File file;
  std::atomic<int64_t> bytes_done{0};
  std::atomic<size_t> chunks_left{0};
  size_t next_chunk = 0;  // guarded by the handle's mutex
  bool done = false;      // guarded likewise
  // These are final once `done`.
  Failure failure;
  Leftover leftover = Leftover::untouched;
  bool fell_back = false;

 private:
  template <typename Visit>
  void visit(const Chunk& chunk, Visit&& each) const;

  std::vector<Segment> segments_;
  int64_t begin_ = 0, end_ = 0;                // the range of the segments
  int64_t middle_begin_ = 0, middle_end_ = 0;  // the range of the chunks, which in a direct write omits unaligned ends
  int64_t grid_ = 0, block_ = 0;
  size_t chunks_ = 0;
  bool write_ = false;
  std::atomic<bool> stopped_{false}, cancelled_{false};
  std::mutex failure_mutex_;  // guards `failure` until the request is done
  bool finishing_ = false;    // guarded likewise
};

}  // namespace anyaccel::aio
