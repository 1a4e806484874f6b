// SPDX-License-Identifier: Apache-2.0
#include "comm/shm_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>
#include <utility>

namespace anyaccel::comm {
namespace {

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

std::string random_name() {
  uint8_t bytes[16];
  if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) fail(errno, "getrandom");
  std::string name = "/anyaccel-";
  for (uint8_t byte : bytes) {
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  return name;
}

struct Fd {
  int value;
  ~Fd() {
    if (value >= 0) close(value);
  }
};

void* map(int fd, size_t bytes, const std::string& name) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (data == MAP_FAILED) fail(errno, "mmap of shared memory " + name);
  return data;
}

}  // namespace

ShmSegment ShmSegment::create(size_t bytes) {
  ShmSegment segment;
  segment.name_ = random_name();
  Fd fd{shm_open(segment.name_.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600)};
  if (fd.value < 0) fail(errno, "shm_open of " + segment.name_);
  segment.linked_ = true;  // from here on the destructor unlinks it
  int error;
  do {  // tmpfs gives EINTR when a signal comes
    error = posix_fallocate(fd.value, 0, static_cast<off_t>(bytes));
  } while (error == EINTR);
  if (error != 0) fail(error, "reserving " + std::to_string(bytes) + " bytes of shared memory (see `df /dev/shm`)");
  segment.data_ = map(fd.value, bytes, segment.name_);
  segment.bytes_ = bytes;
  return segment;
}

ShmSegment ShmSegment::open(const std::string& name, size_t bytes) {
  ShmSegment segment;
  segment.name_ = name;
  Fd fd{shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0)};
  if (fd.value < 0) fail(errno, "shm_open of a peer's " + name);
  struct stat info{};
  if (fstat(fd.value, &info) != 0) fail(errno, "fstat of " + name);
  if (static_cast<size_t>(info.st_size) != bytes)
    fail(EINVAL, name + " has " + std::to_string(info.st_size) + " bytes, expected " + std::to_string(bytes));
  segment.data_ = map(fd.value, bytes, name);
  segment.bytes_ = bytes;
  return segment;
}

ShmSegment::~ShmSegment() {
  unlink();
  if (data_ != nullptr) munmap(data_, bytes_);
}

void ShmSegment::unlink() noexcept {
  if (linked_) shm_unlink(name_.c_str());
  linked_ = false;
}

void ShmSegment::swap(ShmSegment& other) noexcept {
  std::swap(name_, other.name_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(linked_, other.linked_);
}

}  // namespace anyaccel::comm
