// SPDX-License-Identifier: Apache-2.0
#include "comm/shm_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <utility>

namespace anyaccel::comm {
namespace {

constexpr char kProcPrefix[] = "/proc/";
constexpr char kSeparator = ':';  // between the path below /proc and the object's own name

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

std::string random_name() {
  uint8_t bytes[16];
  if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) fail(errno, "getrandom");
  std::string name = "anyaccel-";
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

void* map(int fd, size_t bytes, const std::string& name, int flags) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | flags, fd, 0);
  if (data == MAP_FAILED) fail(errno, "mmap of shared memory " + name);
  return data;
}

void reserve(int fd, size_t bytes) {
  int error;
  do {  // tmpfs returns EINTR after a signal
    error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  } while (error == EINTR);
  if (error != 0) fail(error, "reserving " + std::to_string(bytes) + " bytes of shared memory (see `df /dev/shm`)");
}

// The object behind a descriptor's path must have the given name, since the number may have been reused.
void check_same(const std::string& path, const std::string& object) {
  char target[256];
  const ssize_t length = readlink(path.c_str(), target, sizeof target);
  if (length < 0) fail(errno, "a peer's shared memory at " + path);
  const std::string expected = "/memfd:" + object;
  if (std::string(target, static_cast<size_t>(length)).compare(0, expected.size(), expected) != 0)
    fail(ENOENT, "a peer's shared memory " + object + " is no longer at " + path);
}

}  // namespace

ShmSegment ShmSegment::create(size_t bytes, Kind kind) {
  ShmSegment segment;
  const std::string object = random_name();
  std::string refused;
  if (kind == Kind::memfd) {
    segment.fd_ = memfd_create(object.c_str(), MFD_CLOEXEC);
    if (segment.fd_ < 0) {
      // Sandboxes forbid the call (seccomp), old kernels have none: a file in /dev/shm does, whose name tells peers.
      if (errno != EPERM && errno != EACCES && errno != ENOSYS) fail(errno, "memfd_create");
      refused =
          std::string("memfd_create is refused (") + std::strerror(errno) +
          "; by a seccomp profile?), and /dev/shm cannot be used in its place: allow the one, or mount the other: ";
      kind = Kind::posix;
    }
  }
  if (kind == Kind::memfd) {
    fchmod(segment.fd_, 0600);
    if (ftruncate(segment.fd_, static_cast<off_t>(bytes)) != 0)
      fail(errno, "making " + std::to_string(bytes) + " bytes of shared memory");
    segment.name_ = kProcPrefix + std::to_string(getpid()) + "/fd/" + std::to_string(segment.fd_) + kSeparator + object;
    segment.data_ = map(segment.fd_, bytes, object, 0);
  } else {
    segment.name_ = "/" + object;
    Fd fd{shm_open(segment.name_.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600)};
    if (fd.value < 0) fail(errno, refused + "shm_open of " + segment.name_);
    segment.linked_ = true;  // from here on the destructor unlinks it
    reserve(fd.value, bytes);
    segment.data_ = map(fd.value, bytes, segment.name_, MAP_POPULATE);
  }
  segment.bytes_ = bytes;
  return segment;
}

ShmSegment ShmSegment::open(const std::string& name, size_t bytes) {
  ShmSegment segment;
  segment.name_ = name;
  const bool anonymous = name.rfind(kProcPrefix, 0) == 0;
  int opened = -1;
  if (anonymous) {
    const size_t at = name.find(kSeparator);
    const std::string path = name.substr(0, at);
    check_same(path, at == std::string::npos ? "" : name.substr(at + 1));
    opened = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  } else {
    opened = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0);
  }
  const Fd fd{opened};
  if (fd.value < 0) fail(errno, "opening a peer's shared memory " + name);
  struct stat info{};
  if (fstat(fd.value, &info) != 0) fail(errno, "fstat of " + name);
  if (static_cast<size_t>(info.st_size) != bytes)
    fail(EINVAL, name + " has " + std::to_string(info.st_size) + " bytes, expected " + std::to_string(bytes));
  segment.data_ = map(fd.value, bytes, name, anonymous ? 0 : MAP_POPULATE);
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
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

void ShmSegment::swap(ShmSegment& other) noexcept {
  std::swap(name_, other.name_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(linked_, other.linked_);
  std::swap(fd_, other.fd_);
}

}  // namespace anyaccel::comm
