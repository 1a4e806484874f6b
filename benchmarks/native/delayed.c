// SPDX-License-Identifier: Apache-2.0
// A network that is slower than the one there is, for benchmarks/hosts.py: a library to preload, in front of sendmsg(),
// recvmsg() and poll(). The sender notes in a file that both hosts map when each message went, and the receiver hands
// on what is older than the delay: so messages on the way at the same time are each delayed once, whenever the receiver
// looks. No thread or process is added, which would take a core from the ranks.
//
// Only calls that do not block are delayed, those of csrc/comm/host_links.cpp; acknowledgements are not. The folder
// of the files is in DELAYED_STAMPS, a new one for each job.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define SHOWN __attribute__((visibility("default")))
enum { kDescriptors = 4096, kStamps = 1 << 16, kRoom = 1 << 23 };

// Of a message: the number of bytes that were sent up to its end, and when.
struct stamp {
  _Atomic int64_t end;
  int64_t ns;
};
struct connection {
  int is_tcp;                       // 0: not known yet; -1: no
  struct stamp *theirs, *mine;      // rings
  int64_t sent, came, open, given;  // bytes
  uint64_t messages, next;          // how many were sent; the stamp to look at
  char* room;                       // a ring of what came and was not given
};

static struct connection* connections[kDescriptors];
static int64_t delay_ns, messages;
static ssize_t (*real_sendmsg)(int, const struct msghdr*, int);
static ssize_t (*real_recvmsg)(int, struct msghdr*, int);
static int (*real_poll)(struct pollfd*, nfds_t, int);

__attribute__((constructor)) static void find(void) {
  *(void**)&real_sendmsg = dlsym(RTLD_NEXT, "sendmsg");
  *(void**)&real_recvmsg = dlsym(RTLD_NEXT, "recvmsg");
  *(void**)&real_poll = dlsym(RTLD_NEXT, "poll");
}

// For the benchmark: nothing may be under way when the delay changes.
SHOWN void delayed_set(int64_t ns) { delay_ns = ns; }
// Messages that this process has sent since the last call.
SHOWN int64_t delayed_count(void) {
  const int64_t found = messages;
  messages = 0;
  return found;
}

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static struct stamp* stamps(const struct sockaddr_in* from, const struct sockaddr_in* to) {
  char path[1024], a[INET_ADDRSTRLEN], b[INET_ADDRSTRLEN];
  inet_ntop(AF_INET, &from->sin_addr, a, sizeof a);
  inet_ntop(AF_INET, &to->sin_addr, b, sizeof b);
  snprintf(path, sizeof path, "%s/%s,%d-%s,%d", getenv("DELAYED_STAMPS"), a, ntohs(from->sin_port), b,
           ntohs(to->sin_port));
  const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, kStamps * sizeof(struct stamp)) != 0) abort();
  void* found = mmap(0, kStamps * sizeof(struct stamp), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (found == MAP_FAILED) abort();
  close(fd);
  return found;
}

static struct connection* connection_of(int fd) {
  if (fd < 0 || fd >= kDescriptors) return 0;
  struct connection* c = connections[fd];
  if (!c) c = connections[fd] = calloc(1, sizeof *c);
  if (!c) abort();
  if (!c->is_tcp) {
    struct sockaddr_in own, other;
    socklen_t length = sizeof own, other_length = sizeof other;
    c->is_tcp = -1;
    if (getsockname(fd, (struct sockaddr*)&own, &length) != 0 ||
        getpeername(fd, (struct sockaddr*)&other, &other_length) != 0 || own.sin_family != AF_INET)
      return 0;
    c->is_tcp = 1;
    c->mine = stamps(&own, &other);
    c->theirs = stamps(&other, &own);
    c->room = malloc(kRoom);
    if (!c->room) abort();
  }
  return c->is_tcp == 1 ? c : 0;
}

SHOWN ssize_t sendmsg(int fd, const struct msghdr* message, int flags) {
  const ssize_t sent = real_sendmsg(fd, message, flags);
  const int error = errno;
  struct connection* c = flags == (MSG_NOSIGNAL | MSG_DONTWAIT) && sent > 0 ? connection_of(fd) : 0;
  if (c) {
    struct stamp* stamp = &c->mine[c->messages++ % kStamps];
    stamp->ns = now();
    c->sent += sent;
    atomic_store_explicit(&stamp->end, c->sent, memory_order_release);
    messages++;
  }
  errno = error;
  return sent;
}

// Opens what is old enough; returns when the next message will be, 0 where that is not known.
static int64_t open_more(struct connection* c) {
  for (;;) {
    const struct stamp* stamp = &c->theirs[c->next % kStamps];
    const int64_t end = atomic_load_explicit(&stamp->end, memory_order_acquire);
    if (end <= c->open) return 0;  // it is to be written yet
    if (stamp->ns + delay_ns > now()) return stamp->ns + delay_ns;
    c->open = end;
    c->next++;
  }
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

SHOWN ssize_t recvmsg(int fd, struct msghdr* message, int flags) {
  struct connection* c = flags == MSG_DONTWAIT ? connection_of(fd) : 0;
  if (!c) return real_recvmsg(fd, message, flags);
  ssize_t last = 0;
  int error = 0;
  do {
    const size_t at = (size_t)(c->came % kRoom);
    struct iovec piece = {c->room + at, least(kRoom - at, kRoom - (size_t)(c->came - c->given))};
    if (piece.iov_len == 0) break;
    struct msghdr more = {.msg_iov = &piece, .msg_iovlen = 1};
    last = real_recvmsg(fd, &more, MSG_DONTWAIT);
    error = errno;
    if (last > 0) c->came += last;
  } while (last > 0);
  if (c->came == c->given) {
    errno = error;
    return last;
  }
  open_more(c);
  const int64_t end = delay_ns == 0 || c->open > c->came ? c->came : c->open;
  ssize_t given = 0;
  for (size_t i = 0; i < message->msg_iovlen; ++i) {
    char* to = message->msg_iov[i].iov_base;
    size_t left = message->msg_iov[i].iov_len;
    while (left > 0 && c->given < end) {
      const size_t at = (size_t)(c->given % kRoom);
      const size_t part = least(least(left, (size_t)(end - c->given)), kRoom - at);
      memcpy(to, c->room + at, part);
      to += part, left -= part;
      c->given += (int64_t)part, given += (ssize_t)part;
    }
  }
  if (given > 0) return given;
  errno = EAGAIN;
  return -1;
}

SHOWN int poll(struct pollfd* looked_at, nfds_t count, int timeout_ms) {
  const struct pollfd* each = looked_at;
  int64_t first = INT64_MAX;
  for (nfds_t i = 0; i < count; ++i, ++each) {
    struct connection* c = each->fd >= 0 && each->fd < kDescriptors ? connections[each->fd] : 0;
    if (!c || c->is_tcp != 1 || c->came == c->given || !(each->events & POLLIN)) continue;
    int64_t next_ns = open_more(c);
    if (c->open > c->given) next_ns = 0;
    if (next_ns < first) first = next_ns;
  }
  if (first == INT64_MAX) return real_poll(looked_at, count, timeout_ms);
  const int64_t left = first - now();
  if (left > 0) {
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);  // a network's interrupt has none
    const struct timespec length = {left / 1000000000LL, left % 1000000000LL};
    nanosleep(&length, 0);
  }
  return real_poll(looked_at, count, 0) + 1;  // who asks looks at all of them
}
