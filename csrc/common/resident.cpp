// SPDX-License-Identifier: Apache-2.0
#include "common/resident.h"

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <string_view>
#include <system_error>

#ifdef __GLIBC__
#include <malloc.h>
#endif
#ifdef __linux__
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace anyaccel {
namespace {

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

#ifdef __linux__
namespace {

// A file of /proc, opened on first use and kept: reading it again costs a third of opening it each time.
class KeptFile {
 public:
  explicit KeptFile(const char* path) : path_(path) {}

  // Reads the beginning of the file, as much as `text` holds. Throws std::system_error.
  template <size_t kSize>
  std::string_view read(char (&text)[kSize]) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!is_open()) reopen();
    const ssize_t length = pread(descriptor_, text, kSize, 0);
    if (length <= 0) fail(path_);
    return {text, static_cast<size_t>(length)};
  }

  void before_fork() { mutex_.lock(); }
  void in_parent() { mutex_.unlock(); }
  void in_child() {
    // The open file is about the parent process.
    if (is_open()) close(descriptor_);
    descriptor_ = -1;
    mutex_.unlock();
  }

 private:
  // Someone may have closed all descriptors, and this number may be another file by now.
  bool is_open() const {
    struct stat status;
    return descriptor_ >= 0 && fstat(descriptor_, &status) == 0 && status.st_dev == device_ && status.st_ino == inode_;
  }

  void reopen() {
    descriptor_ = open(path_, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (descriptor_ < 0 || fstat(descriptor_, &status) != 0) fail(path_);
    device_ = status.st_dev;
    inode_ = status.st_ino;
  }

  const char* path_;
  std::mutex mutex_;
  int descriptor_ = -1;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

struct Files {
  KeptFile statm{"/proc/self/statm"}, meminfo{"/proc/meminfo"};
};

Files& files() {
  static Files instance;
  static const int registered = pthread_atfork([] { instance.statm.before_fork(), instance.meminfo.before_fork(); },
                                               [] { instance.statm.in_parent(), instance.meminfo.in_parent(); },
                                               [] { instance.statm.in_child(), instance.meminfo.in_child(); });
  (void)registered;
  return instance;
}

// The number at the beginning, behind blanks.
int64_t number_at(std::string_view text) {
  size_t at = text.find_first_not_of(' ');
  int64_t value = 0;
  for (; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at) value = value * 10 + (text[at] - '0');
  return value;
}

}  // namespace

int64_t resident_bytes() {
  static const int64_t page = sysconf(_SC_PAGESIZE);
  char text[128];
  // "size resident shared ...", in pages.
  const std::string_view found = files().statm.read(text);
  return number_at(found.substr(std::min(found.find(' '), found.size()))) * page;
}

int64_t available_bytes() {
  constexpr std::string_view kName = "MemAvailable:";
  char text[4096];
  const std::string_view found = files().meminfo.read(text);
  const size_t at = found.find(kName);
  if (at == std::string_view::npos) {
    errno = ENODATA;
    fail("/proc/meminfo has no MemAvailable");
  }
  return number_at(found.substr(at + kName.size())) << 10;
}

#else

int64_t resident_bytes() {
  errno = ENOSYS;
  fail("resident_bytes: Linux only");
}

int64_t available_bytes() {
  errno = ENOSYS;
  fail("available_bytes: Linux only");
}

#endif

void release_free_memory() noexcept {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace anyaccel
