// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>

namespace anyaccel::comm {

// One POSIX shared-memory object, mapped into this process. Mode 0600, an unpredictable name, memory reserved
// at creation (a full /dev/shm is an error here and not a SIGBUS later). Pages come from the creator's memory
// policy.
class ShmSegment {
 public:
  // Creates an object under a new random name. Throws std::system_error.
  static ShmSegment create(size_t bytes);
  // Maps a peer's object. Throws std::system_error, also when its size is not `bytes`.
  static ShmSegment open(const std::string& name, size_t bytes);

  ShmSegment() = default;
  ShmSegment(ShmSegment&& other) noexcept { swap(other); }
  ShmSegment& operator=(ShmSegment&& other) noexcept {
    swap(other);
    return *this;
  }
  ~ShmSegment();

  // Takes the name away; mappings stay valid. Does nothing when it is gone already or was opened, not
  // created.
  void unlink() noexcept;

  void* data() const { return data_; }
  const std::string& name() const { return name_; }

 private:
  void swap(ShmSegment& other) noexcept;

  std::string name_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
  bool linked_ = false;
};

}  // namespace anyaccel::comm
