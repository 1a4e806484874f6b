// SPDX-License-Identifier: Apache-2.0
// Put before a program by LD_PRELOAD: recvmsg() of a TCP connection gives nothing until the time in the file
// ANYACCEL_BENCH_DELAY_FILE (nanoseconds, 64 bits) has passed since the kernel took in what comes first. So two network
// namespaces of one machine are so far from each other, where the kernel has no netem. Calls that wait are not delayed.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef ssize_t (*Receive)(int, struct msghdr*, int);

static Receive real;
static const volatile int64_t* delay;
static unsigned char stamped[65536];

__attribute__((constructor)) static void start(void) {
  real = (Receive)dlsym(RTLD_NEXT, "recvmsg");
  const char* path = getenv("ANYACCEL_BENCH_DELAY_FILE");
  const int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void* found = mmap(NULL, sizeof *delay, PROT_READ, MAP_SHARED, fd, 0);
  if (found != MAP_FAILED) delay = found;
  close(fd);
}

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

// When the kernel took in what would be read next; 0 where nothing has come or it is not known.
static int64_t arrival(int fd) {
  char byte;
  char control[256];
  struct iovec piece = {&byte, 1};
  struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  if (real(fd, &message, MSG_PEEK | MSG_DONTWAIT) <= 0) return 0;
  for (struct cmsghdr* each = CMSG_FIRSTHDR(&message); each; each = CMSG_NXTHDR(&message, each))
    if (each->cmsg_level == SOL_SOCKET && each->cmsg_type == SCM_TIMESTAMPNS) {
      struct timespec time;
      memcpy(&time, CMSG_DATA(each), sizeof time);
      return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
    }
  return 0;
}

ssize_t recvmsg(int fd, struct msghdr* message, int flags) {
  if (delay && *delay > 0 && fd >= 0 && fd < (int)sizeof stamped && (flags & MSG_DONTWAIT)) {
    if (!stamped[fd]) {
      const int on = 1;
      setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on);
      stamped[fd] = 1;
    }
    const int64_t came = arrival(fd);
    if (came && now() < came + *delay) {
      errno = EAGAIN;
      return -1;
    }
  }
  return real(fd, message, flags);
}
