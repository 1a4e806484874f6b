// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

namespace anyaccel::comm {

// Another process, watched: a pidfd that all groups of this process share, so that a thousand groups need one
// descriptor a peer. Pid 0: it cannot be watched (it is in another PID namespace), and never counts as ended.
class Peer {
 public:
  static std::shared_ptr<const Peer> watch(int pid);
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  int pid() const { return pid_; }
  bool ended() const;

 private:
  explicit Peer(int pid);
  const int pid_;
  int pidfd_;  // -1: the kernel has none
};

}  // namespace anyaccel::comm
