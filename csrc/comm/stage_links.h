// SPDX-License-Identifier: Apache-2.0
// What the members of a pipeline tell each other: any of them sends to any other one, which receives in the same order.
// Members of one host go through shared memory, others through a connection a pair.
//
// A packet is a line with a signature, which both have to have, and bytes behind it. The sender waits until the
// receiver has taken it, or the memory between them holds the rest: so a stage is never far ahead of the next one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/host_links.h"
#include "comm/messages.h"
#include "comm/shm_group.h"
#include "comm/shm_segment.h"

namespace anyaccel::comm {

class StageLinks {
 public:
  // Bytes before those of a packet, for the signature.
  static constexpr size_t kLine = 64;

  // `hosts`: the host of each member. `addresses`: of this host, see Rendezvous. Throws std::system_error,
  // std::invalid_argument.
  StageLinks(int member, const std::vector<int>& hosts, const std::vector<std::string>& addresses, double timeout_s,
             ShmSegment::Kind kind);

  // What connect() needs on the other members: for them only.
  const std::string& endpoint() const { return endpoint_; }
  // `ranks`: what errors call the members. Throws CommError, std::invalid_argument, std::system_error.
  void connect(const std::vector<std::string>& endpoints, const std::vector<int>& pids, const std::vector<int>& ranks);
  void unlink() noexcept;
  void set_interrupt_check(const std::function<void()>& check);

  // `packet`: kLine bytes that are written here, and `bytes` behind them. Throw CommError and what the interrupt check
  // throws; the links stay broken then.
  void send(int to, uint64_t signature, void* packet, size_t bytes);
  void receive(int from, uint64_t signature, void* packet, size_t bytes);

  // This member cannot go on: tells the others why.
  void fail(const char* why) noexcept;

 private:
  bool is_here(int member) const { return hosts_[static_cast<size_t>(member)] == hosts_[static_cast<size_t>(member_)]; }
  int place(int member) const;  // among those of this host
  template <class Move>
  void call(Move move);

  const int member_;
  const std::vector<int> hosts_;
  std::vector<int> here_;
  std::optional<ShmGroup> group_;  // of this host, where it has several members
  std::unique_ptr<Messages> messages_;
  std::optional<HostLinks> host_links_;  // all members, where they are on several hosts
  std::vector<int> ranks_;
  std::string endpoint_, broken_;
};

}  // namespace anyaccel::comm
