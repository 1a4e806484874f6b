// SPDX-License-Identifier: Apache-2.0
#include "comm/peers.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>

#ifdef __linux__
#include <sys/syscall.h>
#endif

namespace anyaccel::comm {
namespace {

int open_pidfd([[maybe_unused]] int pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#else
  return -1;
#endif
}

}  // namespace

std::shared_ptr<const Peer> Peer::watch(int pid) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<const Peer>> known;
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<const Peer> peer = known[pid].lock();
  // A new process may have the pid of one that has ended.
  if (!peer || peer->ended()) known[pid] = peer = std::shared_ptr<const Peer>(new Peer(pid));
  return peer;
}

Peer::Peer(int pid) : pid_(pid), pidfd_(pid > 0 ? open_pidfd(pid) : -1) {}

Peer::~Peer() {
  if (pidfd_ >= 0) close(pidfd_);
}

bool Peer::ended() const {
  if (pid_ <= 0) return false;
  if (pidfd_ < 0) return kill(pid_, 0) != 0 && errno == ESRCH;
  pollfd fd{pidfd_, POLLIN, 0};
  return poll(&fd, 1, 0) == 1;
}

}  // namespace anyaccel::comm
