// SPDX-License-Identifier: Apache-2.0
// What the ranks of a tensor-parallel decoder exchange: each writes its part into a place of its own ("slot"), and
// after one exchange all read all parts. On one host slots are in shared memory, and the exchange is one
// synchronisation. Two slots a rank are used in turn, so that this is enough: who writes a slot again has passed the
// synchronisation that everybody posted after reading it.
//
// On several hosts the first rank of each, its leader, has slots for the ranks of other hosts too, where its own host's
// ranks read them: it waits for its host's ranks, sends their parts to the other leaders and takes theirs. All ranks
// have the same parts then, as on one host, and add them in the same order: results have the same bits.
//
// Where parts of sums go in fewer bytes (WireFormat), each rank writes its own beside its slot in that form, and brings
// it back into its slot: so its own host adds what other hosts add. Logits go as they are.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/errors.h"
#include "comm/host_links.h"
#include "comm/shm_group.h"
#include "comm/shm_segment.h"
#include "comm/wire_format.h"

namespace anyaccel::llm {

// The ranks of one host by socket: as many on each, `each`. Where that is not known or not so, or where every socket
// has one, each rank counts as a socket of its own.
struct SocketRanks {
  int count = 1, each = 1;
  int socket = 0, place = 0;  // of this rank
  std::vector<int> ranks;     // socket by socket

  int across(int on) const { return ranks[static_cast<size_t>(on * each + place)]; }
  int beside(int at) const { return ranks[static_cast<size_t>(socket * each + at)]; }
};

class ParallelRanks {
 public:
  // What a rank says about itself when they meet.
  struct Header {
    uint64_t model;                    // a hash of the sizes, equal on all
    int64_t vocab_first, vocab_count;  // its share of the vocabulary
    int64_t cache_pages;               // that its cache may have
    int64_t state_pages;               // as how many of them a recurrent state counts
    int64_t socket = -1;               // that all its threads run on; -1 where that is not one
  };
  // What the ranks have written into their slots: so many floats each, or so many rows of their shares of logits.
  struct Parts {
    int64_t floats = 0, logits = 0;
  };

  // `slot_floats`: room for one exchange of a rank. `hosts`: the host of each rank, numbered from 0 in the order in
  // which they come; empty for one host. `addresses`: of this host, see Rendezvous. `first_rank`: what errors call
  // rank 0, where these are a part of more. `wire`: of what goes between hosts.
  // `transport`: what carries it, see start_transport().
  ParallelRanks(int rank, int size, size_t slot_floats, double timeout_s, const Header& header,
                comm::ShmSegment::Kind kind = comm::ShmSegment::Kind::posix, const std::vector<int>& hosts = {},
                const std::vector<std::string>& addresses = {}, int first_rank = 0,
                comm::WireFormat wire = comm::WireFormat::f32, std::string transport = {});

  // What connect() needs on the other ranks: for them only.
  const std::string& name() const { return name_; }
  // Throws UsageError when the ranks do not fit together; std::system_error; comm::CommError when other hosts do not
  // come.
  void connect(const std::vector<std::string>& names, const std::vector<int>& pids);
  void unlink() noexcept;
  bool connected() const { return connected_; }
  void set_timeout(double timeout_s);
  void set_interrupt_check(const std::function<void()>& check);

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool on_one_host() const { return here_.size() == hosts_.size(); }
  const Header& header(int rank) const { return headers_[static_cast<size_t>(rank)]; }
  // Whose share of the vocabulary has this token.
  int owner_of_token(int64_t token) const;
  const SocketRanks& sockets() const { return sockets_; }
  size_t slot_floats() const { return slot_floats_; }
  float* slot(int rank, unsigned turn) const;
  // 8 bytes beside each slot, which go with its part.
  uint64_t& signature(int rank, unsigned turn) const;

  // All ranks' slots of this turn are written, and can be read when it returns. Called by one thread; throws
  // comm::CommError, and then the ranks stay broken.
  void exchange(unsigned turn, const Parts& parts);
  // This rank cannot go on for a reason of its own: tells the others.
  void fail(const char* why) noexcept;

 private:
  // At the beginning of a leader's segment: why it cannot go on.
  struct Failure {
    std::atomic<uint32_t> there;  // 1 + its kind
    char text[1024];
  };

  bool is_leader() const { return own_place_ == 0; }
  bool is_here(size_t rank) const { return hosts_[rank] == hosts_[static_cast<size_t>(rank_)]; }
  size_t slot_bytes() const;
  uint8_t* base(int rank, unsigned turn) const;
  // What the ranks of a host have written, in their order.
  void collect(int host, unsigned turn, const Parts& parts, std::vector<iovec>& pieces) const;
  // A rank's part as it goes between hosts, behind its slot.
  uint8_t* encoded(int rank, unsigned turn) const;
  bool encodes(const Parts& parts) const { return wire_ != comm::WireFormat::f32 && parts.floats > 0; }
  size_t floats_of(const Parts& parts) const;
  void encode_own(unsigned turn, const Parts& parts);
  void decode_others(unsigned turn, const Parts& parts);
  void group_by_socket();
  void connect_hosts(const std::vector<std::string>& endpoints);
  void exchange_as_leader(unsigned turn, const Parts& parts);
  void await_leader();
  void give_up(comm::CommError::Kind kind, const char* why) noexcept;
  std::string number(size_t rank) const { return std::to_string(first_rank_ + static_cast<int>(rank)); }

  const int rank_, size_, first_rank_;
  const size_t slot_floats_;
  double timeout_s_;
  const std::vector<int> hosts_;
  std::vector<int> here_;  // the ranks of this host
  int own_place_ = 0;      // among them
  const comm::WireFormat wire_;
  const std::string transport_;
  const comm::ShmSegment::Kind kind_;
  comm::ShmGroup group_;  // of this host
  comm::ShmSegment own_;  // a page for its Failure, then slots
  std::vector<comm::ShmSegment> peers_;
  std::vector<uint8_t*> bases_;  // of the slots, by rank
  std::vector<Header> headers_;
  SocketRanks sockets_;
  Failure* failure_ = nullptr;                 // the leader's
  std::optional<comm::HostLinks> host_links_;  // of a leader
  std::vector<iovec> given_;
  std::vector<std::vector<iovec>> taken_;
  std::string name_;
  bool connected_ = false;
};

}  // namespace anyaccel::llm
