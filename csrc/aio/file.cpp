// SPDX-License-Identifier: Apache-2.0
#include "aio/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <random>

namespace anyaccel::aio {
namespace {

constexpr int64_t kPage = 4096;
// These are copied from linux/magic.h.
constexpr uint32_t kTmpfs = 0x01021994, kRamfs = 0x858458f6;

Failure failure(Step step, int64_t offset = 0) { return {step, errno, offset}; }

// Asks the kernel for the alignment of direct transfers, which it has told since Linux 6.1. Many headers lack the
// structure of the answer.
bool direct_alignment(int descriptor, uint32_t& memory, uint32_t& offset) {
#ifdef SYS_statx
  constexpr unsigned kMaskDioalign = 0x2000;
  alignas(8) unsigned char answer[256] = {};
  if (syscall(SYS_statx, descriptor, "", AT_EMPTY_PATH, kMaskDioalign, answer) != 0) return false;
  uint32_t mask;
  std::memcpy(&mask, answer, sizeof mask);
  std::memcpy(&memory, answer + 0x98, sizeof memory);
  std::memcpy(&offset, answer + 0x9c, sizeof offset);
  return (mask & kMaskDioalign) != 0;
#else
  (void)descriptor, (void)memory, (void)offset;
  return false;
#endif
}

// Whether the file is in tmpfs or ramfs, which keep files in the page cache alone. They accept O_DIRECT since Linux
// 6.6, but it has no effect there.
bool is_in_memory(int descriptor) {
  struct statfs status;
  if (fstatfs(descriptor, &status) != 0) return false;
  const auto type = static_cast<uint32_t>(status.f_type);
  return type == kTmpfs || type == kRamfs;
}

std::string temporary_name(const std::string& path) {
  static thread_local std::mt19937_64 random{std::random_device{}()};
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "" : path.substr(0, slash + 1);
  const std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
  char tag[24];
  std::snprintf(tag, sizeof tag, ".%016llx.part", static_cast<unsigned long long>(random()));
  // A file name may have 255 bytes at most.
  return folder + "." + name.substr(0, 200) + tag;
}

std::string proc_path(int descriptor) { return "/proc/self/fd/" + std::to_string(descriptor); }

void sync_folder(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  // The result is ignored: some file systems cannot sync a folder, and the file itself has been synced.
  (void)fsync(descriptor);
  ::close(descriptor);
}

}  // namespace

File::~File() { close(); }

void File::close() {
  for (int* descriptor : {&direct_, &buffered_}) {
    if (*descriptor >= 0) ::close(*descriptor);
    *descriptor = -1;
  }
}

Failure File::open(const std::string& path, int descriptor, const FileOptions& options, int64_t begin, int64_t end) {
  path_ = path;
  options_ = options;
  begin_ = begin;
  end_ = end;
  if (descriptor >= 0) {
    // The file is reopened, since the flags (O_DIRECT, O_APPEND) and position of a descriptor belong to the caller. The
    // descriptor's access mode is checked here, since reopening grants whatever the file's mode allows, and root all.
    const int mode = options.write ? O_WRONLY : O_RDONLY, flags = fcntl(descriptor, F_GETFL);
    if (flags < 0) return failure(Step::open);
    if ((flags & O_PATH) != 0 || ((flags & O_ACCMODE) != mode && (flags & O_ACCMODE) != O_RDWR))
      return {Step::open, EBADF, 0};
    buffered_ = ::open(proc_path(descriptor).c_str(), mode | O_CLOEXEC | O_NONBLOCK);
    if (buffered_ < 0) buffered_ = fcntl(descriptor, F_DUPFD_CLOEXEC, 3);
    if (buffered_ < 0) return failure(Step::open);
  } else if (options.write) {
    if (const Failure failed = open_for_write(path)) return failed;
  } else {
    buffered_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // without O_NONBLOCK, a FIFO would hang
    if (buffered_ < 0) return failure(Step::open);
  }

  struct stat status;
  if (fstat(buffered_, &status) != 0) return failure(Step::stat);
  if (S_ISDIR(status.st_mode)) return {Step::open, EISDIR, 0};
  if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) return {Step::open, ESPIPE, 0};
  size_before_ = status.st_size;
  if (!options.write && S_ISREG(status.st_mode) && end > begin && end > status.st_size)
    return {Step::end_of_file, ENODATA, status.st_size};
  if (!options.cached) open_direct();
  if (options.write && S_ISREG(status.st_mode)) {
    if (const Failure failed = reserve()) {
      abandon();
      return failed;
    }
  }
  return {};
}

Failure File::open_for_write(const std::string& path) {
  mode_t mode = 0666;
  if (options_.atomic) {
    struct stat status;
    const bool replaces = stat(path.c_str(), &status) == 0;
    if (replaces && S_ISDIR(status.st_mode)) return {Step::open, EISDIR, 0};
    // The rename at the end would replace a device, FIFO or socket by a file.
    if (replaces && !S_ISREG(status.st_mode)) return {Step::open, EINVAL, 0};
    if (replaces && access(path.c_str(), W_OK) != 0) return failure(Step::open);
    temporary_path_ = temporary_name(path);
    buffered_ = ::open(temporary_path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (buffered_ < 0) {
      temporary_path_.clear();
      return failure(Step::open);
    }
    created_ = true;
    if (replaces) (void)fchmod(buffered_, status.st_mode & 07777);
    return {};
  }
  // Another process may create or remove the file between the two calls.
  for (int attempt = 0; attempt < 8; ++attempt) {
    buffered_ = ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NONBLOCK);
    if (buffered_ >= 0 || errno != ENOENT) break;
    buffered_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    created_ = buffered_ >= 0;
    if (buffered_ >= 0 || errno != EEXIST) break;
  }
  return buffered_ < 0 ? failure(Step::open) : Failure{};
}

void File::open_direct() {
  if (is_in_memory(buffered_)) return;
  uint32_t memory = 0, offset = 0;
  const bool known = direct_alignment(buffered_, memory, offset);
  if (known && (memory == 0 || offset == 0 || std::max(memory, offset) > kMaxAlignment)) return;
  const int mode = (options_.write ? O_WRONLY : O_RDONLY) | O_DIRECT | O_CLOEXEC | O_NONBLOCK;
  const std::string& path = temporary_path_.empty() ? path_ : temporary_path_;
  direct_ = ::open(proc_path(buffered_).c_str(), mode);
  if (direct_ < 0 && errno == ENOENT && !path.empty()) direct_ = ::open(path.c_str(), mode);  // /proc is not mounted
  struct stat one, other;
  if (direct_ >= 0 && (fstat(direct_, &one) != 0 || fstat(buffered_, &other) != 0 || one.st_dev != other.st_dev ||
                       one.st_ino != other.st_ino)) {
    ::close(direct_);
    direct_ = -1;
  }
  if (known) {
    memory_alignment_ = memory;
    // With whole pages, the ends, which are written through the page cache, share no page with direct transfers.
    alignment_ = std::max<int64_t>(offset, kPage);
  }
}

// Sets the size first, since the kernel serialises writes that extend a file.
Failure File::reserve() {
  if (begin_ == end_ || end_ <= size_before_ || direct_ < 0) return {};
  if (fallocate(buffered_, 0, begin_, end_ - begin_) == 0) return {};
  if (errno == EINTR) return reserve();
  if (errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL) return failure(Step::allocate, begin_);
  return ftruncate(buffered_, end_) == 0 ? Failure{} : failure(Step::allocate, begin_);
}

Failure File::commit() {
  if (!options_.write || !options_.atomic) return {};
  if (fsync(buffered_) != 0) return failure(Step::sync, begin_);
  if (rename(temporary_path_.c_str(), path_.c_str()) != 0) return failure(Step::rename);
  temporary_path_.clear();
  sync_folder(path_);
  return {};
}

Leftover File::abandon() {
  if (!options_.write || buffered_ < 0) return Leftover::untouched;
  if (!temporary_path_.empty()) {
    unlink(temporary_path_.c_str());
    temporary_path_.clear();
    return Leftover::untouched;
  }
  struct stat status;
  if (fstat(buffered_, &status) != 0 || !S_ISREG(status.st_mode)) return Leftover::undefined;
  const bool touched = touched_.load(std::memory_order_relaxed);
  // The file is not truncated where other writers have put bytes behind our range, or before it.
  if (status.st_size > end_) return touched ? Leftover::undefined : Leftover::untouched;
  const int64_t keep = touched ? begin_ : std::max(begin_, size_before_);
  const int64_t left = std::min<int64_t>(status.st_size, keep);
  if (status.st_size > keep && ftruncate(buffered_, keep) != 0) return Leftover::undefined;
  struct stat named;
  if (created_ && left == 0 && stat(path_.c_str(), &named) == 0 && named.st_ino == status.st_ino &&
      named.st_dev == status.st_dev && unlink(path_.c_str()) == 0)
    return Leftover::removed;
  return touched || left != size_before_ ? Leftover::truncated : Leftover::untouched;
}

int64_t cached_bytes(int descriptor, int64_t size) {
  constexpr long kCachestat = 451;  // since Linux 6.5, and the same number on every architecture but Alpha
  struct {
    uint64_t offset, length;
  } range{0, static_cast<uint64_t>(size)};
  struct {
    uint64_t cached, dirty, writeback, evicted, recently_evicted;
  } answer{};
  if (size == 0 || syscall(kCachestat, descriptor, &range, &answer, 0u) != 0) return -1;
  return std::min(size, static_cast<int64_t>(answer.cached) * static_cast<int64_t>(sysconf(_SC_PAGESIZE)));
}

}  // namespace anyaccel::aio
