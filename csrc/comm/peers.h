// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

namespace anyaccel::comm {

// Watches another process through a pidfd, which all groups of this process share, so that a thousand groups need one
// descriptor for each peer. A process of pid 0 is in another PID namespace and cannot be watched; it never counts as
// ended.
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
  int pidfd_;  // -1 where the kernel has no pidfds
};

}  // namespace anyaccel::comm
