// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>

namespace anyaccel::comm {

// One segment of shared memory that is mapped into this process; its pages follow the creator's memory policy.
//
// `posix` is an object in /dev/shm of mode 0600, created with O_EXCL under an unpredictable name. Its memory is
// reserved at creation, so that a full /dev/shm is an error there and not a SIGBUS later.
// Where memfd_create is forbidden, `memfd` is `posix`.
// `memfd` has no name in any file system and does not count against the size of /dev/shm; its memory is allocated on
// first touch. Peers of the same user and PID namespace open it through /proc/PID/fd. Its name() is the path there and
// the random name of the object, which open() compares, since the descriptor's number may belong to another file by
// then.
class ShmSegment {
 public:
  enum class Kind { posix, memfd };

  // Creates an object under a new random name. Throws std::system_error.
  static ShmSegment create(size_t bytes, Kind kind = Kind::posix);
  // Maps a peer's object. Throws std::system_error, as it does when its size is not `bytes`.
  static ShmSegment open(const std::string& name, size_t bytes);

  ShmSegment() = default;
  ShmSegment(ShmSegment&& other) noexcept { swap(other); }
  ShmSegment& operator=(ShmSegment&& other) noexcept {
    swap(other);
    return *this;
  }
  ~ShmSegment();

  // Removes the name, so that nobody else can open the segment; mappings stay valid. Does nothing when it is removed
  // already, or in a segment that was opened, not created.
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
