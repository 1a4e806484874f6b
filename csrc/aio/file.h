// SPDX-License-Identifier: Apache-2.0
// A file that is being read or written: its descriptors and alignment, and the clean-up after a failed write.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace anyaccel::aio {

// The step in which an error occurred. The order is that of STEPS in ops/aio/native.py.
enum class Step : int32_t { none, open, stat, allocate, read, write, sync, rename, end_of_file, cancelled };

// The state of the file after a failed write. The order is that of LEFTOVERS in ops/aio/native.py.
enum class Leftover : int32_t { untouched, removed, truncated, undefined };

struct Failure {
  Step step = Step::none;
  int error = 0;
  int64_t offset = 0;

  explicit operator bool() const { return step != Step::none; }
};

struct FileOptions {
  bool write = false;
  bool atomic = false;  // write to a temporary file and rename it at the end
  bool cached = false;  // the file is in the page cache, so transfer through it
};

// Direct transfers are not used where the file system needs a larger alignment, which no known one does.
constexpr int64_t kMaxAlignment = 1 << 16;

class File {
 public:
  File() = default;
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // Opens `path`, or reopens the file of `descriptor` when that is not negative, to transfer bytes [begin, end).
  Failure open(const std::string& path, int descriptor, const FileOptions& options, int64_t begin, int64_t end);

  // Ends a complete write: an atomic one is made durable and renamed into place.
  Failure commit();

  // Undoes a write that failed or was cancelled as far as possible, so that the file does not look complete.
  Leftover abandon();

  void close();

  int direct() const { return direct_; }  // descriptor with O_DIRECT; negative where the file system does not have it
  int buffered() const { return buffered_; }        // descriptor without O_DIRECT
  int64_t alignment() const { return alignment_; }  // of offsets and sizes of direct transfers
  int64_t memory_alignment() const { return memory_alignment_; }

  // Records that a direct transfer was refused although the file system accepted O_DIRECT.
  void refuse_direct() { refused_.store(true, std::memory_order_relaxed); }
  bool refused_direct() const { return refused_.load(std::memory_order_relaxed); }
  bool uses_direct() const { return direct_ >= 0 && !refused_direct(); }

  // Must be called before the first write, so that abandon() knows that there is something to undo.
  void touch() { touched_.store(true, std::memory_order_relaxed); }

 private:
  Failure open_for_write(const std::string& path);
  Failure reserve();
  void open_direct();

  std::string path_;
  std::string temporary_path_;  // where an atomic write goes first
  FileOptions options_;
  int64_t begin_ = 0, end_ = 0, size_before_ = 0;
  bool created_ = false;
  std::atomic<bool> touched_{false}, refused_{false};
  int buffered_ = -1, direct_ = -1;
  int64_t alignment_ = 4096, memory_alignment_ = 4096;
};

// The bytes of [0, size) of an open file that are in the page cache; -1 where the kernel does not say.
int64_t cached_bytes(int descriptor, int64_t size);

}  // namespace anyaccel::aio
