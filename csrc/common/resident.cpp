// SPDX-License-Identifier: Apache-2.0
#include "common/resident.h"

#include <cerrno>
#include <mutex>
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

// /proc/self/statm, opened on first use and kept: reading it again costs a third of opening it each time.
struct Statm {
  std::mutex mutex;
  int descriptor = -1;
  dev_t device = 0;
  ino_t inode = 0;

  // Someone may have closed all descriptors, and this number may be another file by now.
  bool is_open() const {
    struct stat status;
    return descriptor >= 0 && fstat(descriptor, &status) == 0 && status.st_dev == device && status.st_ino == inode;
  }

  void reopen() {
    descriptor = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (descriptor < 0 || fstat(descriptor, &status) != 0) fail("/proc/self/statm");
    device = status.st_dev;
    inode = status.st_ino;
  }
};

Statm& statm() {
  static Statm instance;
  static const int registered = pthread_atfork([] { instance.mutex.lock(); }, [] { instance.mutex.unlock(); },
                                               [] {
                                                 // What is open shows the parent.
                                                 if (instance.is_open()) close(instance.descriptor);
                                                 instance.descriptor = -1;
                                                 instance.mutex.unlock();
                                               });
  (void)registered;
  return instance;
}

}  // namespace

int64_t resident_bytes() {
  static const int64_t page = sysconf(_SC_PAGESIZE);
  Statm& file = statm();
  const std::lock_guard<std::mutex> lock(file.mutex);
  if (!file.is_open()) file.reopen();
  char text[128];
  const ssize_t length = pread(file.descriptor, text, sizeof text, 0);
  if (length <= 0) fail("/proc/self/statm");
  // "size resident shared ...", in pages.
  const char* at = text;
  const char* const end = text + length;
  while (at < end && *at != ' ') ++at;
  int64_t pages = 0;
  for (++at; at < end && *at >= '0' && *at <= '9'; ++at) pages = pages * 10 + (*at - '0');
  return pages * page;
}

#else

int64_t resident_bytes() {
  errno = ENOSYS;
  fail("resident_bytes: Linux only");
}

#endif

void release_free_memory() noexcept {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace anyaccel
