// SPDX-License-Identifier: Apache-2.0
// What hosts tell each other in the middle of a computation: each sends the same pieces of memory to all others, and
// takes theirs. One TCP connection a pair of hosts, used by one rank of each, its leader; small messages, of which the
// time on the way is what counts: no piece is copied on its way to the kernel, and who waits looks again and again
// before it sleeps.
//
// One host may also send something to one other, which receives it: no exchange may be under way then.
//
// Where a library carries what is exchanged (transport.h), the connections bring errors only: so a host that has failed
// or left is noticed as it is without.
//
// A message is a header and the pieces, without gaps. A host that cannot go on says why to all others before it closes
// its connections, so that they need not wait for their deadline, and pass it on.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/rendezvous.h"
#include "comm/transport.h"
#include "common/descriptor.h"

namespace anyaccel::comm {

class HostLinks {
 public:
  // A host waits at most `timeout_s` seconds for another. Throws as Rendezvous.
  HostLinks(int host, int hosts, const std::vector<std::string>& addresses, double timeout_s);
  ~HostLinks();

  // How much longer than the timeout a host waits for another: where a rank is late, those of its own host shall notice
  // first, since they know which one it is.
  double grace() const { return std::min(timeout_s_ * 0.1, 1.0); }
  const std::string& endpoint() const { return rendezvous_.endpoint(); }

  // Call it on every host, with the endpoints of all. `ranks`: which ranks each host has, for errors ("rank 2").
  // `transport`: of exchanges; none for the connections themselves. Throws as Rendezvous::connect, and as the
  // transport.
  void connect(const std::vector<std::string>& endpoints, const std::vector<std::string>& ranks,
               std::unique_ptr<Transport> transport = nullptr);
  // What host `host` is called: its ranks and its name. After connect().
  const std::string& name(int host) const { return peers_[static_cast<size_t>(host)].name; }

  void set_timeout(double timeout_s);

  // Called about every 50 ms of waiting; may throw, which ends the connections.
  void set_interrupt_check(std::function<void()> check) { interrupt_check_ = std::move(check); }

  // Sends `given` to each other host, and fills taken[host] with what comes from there, for each host but this one; the
  // sizes must be what is sent. All memory is free for use when it returns. Called by one thread at a time. Throws
  // CommError, what the interrupt check throws; after that the connections stay broken.
  void exchange(const std::vector<iovec>& given, const std::vector<std::vector<iovec>>& taken);

  // To one other host, and from one. send() returns when the kernel has it all. Calls of all hosts must fit together; a
  // host that waits also notices those that it does not wait for, when they say that they cannot go on. Throw as
  // exchange() does.
  void send(int host, const std::vector<iovec>& given);
  void receive(int host, const std::vector<iovec>& taken);

  // At the end of the process: tells all hosts that exchange by a transport that this one has left.
  static void leave_all() noexcept;
  // This host cannot go on: tells the others why. From then on all calls throw.
  void fail(const std::string& why) noexcept;

 private:
  enum class Kind : uint32_t { data = 1, error = 2 };
  struct Header {
    uint32_t magic;
    Kind kind;
    uint64_t sequence;
    uint64_t bytes;  // that follow
  };
  // Pieces of memory that are sent or filled one after another; the header is the first one.
  class Pieces {
   public:
    void begin(Header* header, const std::vector<iovec>& rest);
    void clear() { pieces_.clear(), at_ = moved_ = 0; }
    bool done() const { return at_ == pieces_.size(); }
    bool begun() const { return moved_ > 0; }
    size_t moved() const { return moved_; }
    size_t bytes() const { return bytes_; }  // behind the header
    // What has come behind the header.
    std::string text() const;
    msghdr message();
    void advance(size_t bytes);

   private:
    std::vector<iovec> pieces_, whole_;
    size_t at_ = 0, moved_ = 0, bytes_ = 0;
  };
  struct Peer {
    std::string name;
    Descriptor fd;
    Header out, in;
    Pieces sending, receiving;
    uint64_t sent = 0, received = 0;  // messages
    bool checked = false;             // the header that came
    int64_t left = 0;                 // when its end was seen, while a transport may still bring what it has sent
  };

  bool is_other(size_t host) const { return static_cast<int>(host) != host_; }
  template <class Begin>
  void call(Begin begin);
  void connect_transport(std::unique_ptr<Transport> transport);
  void carry(const std::vector<iovec>& given, const std::vector<std::vector<iovec>>& taken);
  // Calls done() again and again until it is true; waits in between as the time calls for, looks at the other hosts,
  // and throws when the time is over.
  template <class Done, class Sleep>
  void wait_until(Done done, Sleep rest);
  void begin_send(Peer& peer, const std::vector<iovec>& given);
  void begin_receive(Peer& peer, const std::vector<iovec>& taken);
  void move_all();
  // True once all is sent, or has come.
  bool push(Peer& peer);
  bool pull(Peer& peer);
  void check_header(Peer& peer);
  void check(const Peer& peer, uint64_t sequence, size_t expected) const;
  // Throws when a host that nothing is expected from has said that it cannot go on, or has left.
  void look_around();
  [[noreturn]] void pass_on(Peer& peer);
  [[noreturn]] void gone(const Peer& peer, int error) const;
  bool waits_for(size_t host) const;
  void sleep() const;
  [[noreturn]] void time_out() const;

  const int host_;
  double timeout_s_;
  Rendezvous rendezvous_;
  std::vector<Peer> peers_;
  std::unique_ptr<Transport> transport_;
  uint64_t carried_ = 0;  // exchanges
  Transport::Bytes own_;
  std::vector<Transport::Bytes> others_;
  std::function<void()> interrupt_check_;
  std::string broken_;
};

}  // namespace anyaccel::comm
