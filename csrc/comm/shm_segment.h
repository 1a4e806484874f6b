// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>

namespace anyaccel::comm {

// One piece of shared memory, mapped into this process; pages come from the creator's memory policy.
//
// In a file system (`posix`): an object in /dev/shm, mode 0600, O_EXCL, an unpredictable name, memory reserved at
// creation (a full /dev/shm is an error here and not a SIGBUS later).
// Anonymous (`memfd`): has no name in any file system and does not count against the size of /dev/shm; memory is taken
// when it is first touched. Peers of the same user and PID namespace open it through /proc/PID/fd. Its name() is the
// path there and the random name of the object, which open() compares: the number could be another file's by then.
class ShmSegment {
 public:
  enum class Kind { posix, memfd };

  // Creates an object under a new random name. Throws std::system_error.
  static ShmSegment create(size_t bytes, Kind kind = Kind::posix);
  // Maps a peer's object. Throws std::system_error, also when its size is not `bytes`.
  static ShmSegment open(const std::string& name, size_t bytes);

  ShmSegment() = default;
  ShmSegment(ShmSegment&& other) noexcept { swap(other); }
  ShmSegment& operator=(ShmSegment&& other) noexcept {
    swap(other);
    return *this;
  }
  ~ShmSegment();

  // Takes the name away, so that nobody else can open it; mappings stay valid. Does nothing when it is gone already or
  // was opened, not created.
  void unlink() noexcept;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  const std::string& name() const { return name_; }

 private:
  void swap(ShmSegment& other) noexcept;

  std::string name_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
  bool linked_ = false;
  int fd_ = -1;  // of a memfd that peers may still open
};

}  // namespace anyaccel::comm
