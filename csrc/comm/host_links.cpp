// SPDX-License-Identifier: Apache-2.0
#include "comm/host_links.h"

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <exception>
#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>

#include "comm/errors.h"
#include "common/waiting.h"

namespace anyaccel::comm {
namespace {

constexpr uint32_t kMagic = 0x61636d31;
// Where other work wants the core, a host sleeps sooner than after kYieldNs: what is woken runs before what has been
// looking all the time.
constexpr int64_t kSharedYieldNs = 200'000;
constexpr int kSleepMs = 50;
constexpr int64_t kTransportSleepNs = 50'000;
// How long a transport may take to bring what a host has sent that has ended since.
constexpr int64_t kTransportNs = 1'000'000'000;
constexpr size_t kMostPieces = 1024;  // of one system call (IOV_MAX)
constexpr size_t kMostText = 1000;    // bytes of an error that another host tells
constexpr int64_t kTextNs = 1'000'000'000;

size_t total_bytes(const std::vector<iovec>& pieces) {
  size_t sum = 0;
  for (const iovec& piece : pieces) sum += piece.iov_len;
  return sum;
}

// What a transport that did not come to its end may still use.
struct Abandoned {
  Transport::Bytes own;
  std::vector<Transport::Bytes> others;
  std::unique_ptr<Transport> transport;
};

// Those that have a transport.
struct Carried {
  std::mutex mutex;
  std::set<HostLinks*> hosts;
  std::vector<Abandoned> abandoned;
};

Carried& with_transports() {
  static auto* found = new Carried;  // for the whole process: leave_all() comes late
  return *found;
}

// While a transport works, which has nothing to poll.
void nap() {
  const timespec length{0, kTransportSleepNs};
  nanosleep(&length, nullptr);
}

bool would_wait(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

}  // namespace

void HostLinks::Pieces::begin(Header* header, const std::vector<iovec>& rest) {
  pieces_.clear();
  pieces_.push_back({header, sizeof *header});
  for (const iovec& piece : rest)
    if (piece.iov_len > 0) pieces_.push_back(piece);
  whole_ = pieces_;
  bytes_ = total_bytes(rest);
  at_ = moved_ = 0;
}

std::string HostLinks::Pieces::text() const {
  std::string found;
  size_t there = moved_ - sizeof(Header);
  for (size_t i = 1; i < whole_.size(); ++i) {
    const size_t part = std::min(there, whole_[i].iov_len);
    found.append(static_cast<const char*>(whole_[i].iov_base), part);
    there -= part;
  }
  return found;
}

msghdr HostLinks::Pieces::message() {
  msghdr message{};
  message.msg_iov = pieces_.data() + at_;
  message.msg_iovlen = std::min(pieces_.size() - at_, kMostPieces);
  return message;
}

void HostLinks::Pieces::advance(size_t bytes) {
  moved_ += bytes;
  while (bytes > 0) {
    iovec& piece = pieces_[at_];
    const size_t part = std::min(bytes, piece.iov_len);
    piece.iov_base = static_cast<char*>(piece.iov_base) + part;
    piece.iov_len -= part;
    bytes -= part;
    if (piece.iov_len == 0) ++at_;
  }
}

HostLinks::HostLinks(int host, int hosts, const std::vector<std::string>& addresses, double timeout_s)
    : host_(host), timeout_s_(timeout_s), rendezvous_(host, hosts, addresses), peers_(static_cast<size_t>(hosts)) {
  set_timeout(timeout_s);
}

void HostLinks::set_timeout(double timeout_s) {
  if (!(timeout_s > 0)) throw std::invalid_argument("timeout must be above 0");
  timeout_s_ = timeout_s;
}

HostLinks::~HostLinks() {
  Carried& all = with_transports();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.hosts.erase(this);
  // Something may be under way, which reads and writes its memory whenever it comes.
  if (transport_ && !broken_.empty())
    all.abandoned.push_back({std::move(own_), std::move(others_), std::move(transport_)});
}

void HostLinks::connect(const std::vector<std::string>& endpoints, const std::vector<std::string>& ranks,
                        std::unique_ptr<Transport> transport) {
  if (endpoints.size() != peers_.size() || ranks.size() != peers_.size())
    throw std::invalid_argument("connect: needs one endpoint a host, of " + std::to_string(peers_.size()));
  std::vector<std::string> names;
  for (size_t host = 0; host < endpoints.size(); ++host)
    names.push_back(ranks[host] + " on " + Rendezvous::name_of(endpoints[host]));
  std::vector<Descriptor> found = rendezvous_.connect(endpoints, names, timeout_s_, interrupt_check_);
  for (size_t host = 0; host < peers_.size(); ++host) {
    peers_[host].name = names[host];
    peers_[host].fd = std::move(found[host]);
  }
  if (transport) connect_transport(std::move(transport));
}

void HostLinks::connect_transport(std::unique_ptr<Transport> transport) {
  std::vector<Transport::Endpoint> endpoints(peers_.size());
  Transport::Endpoint& own = endpoints[static_cast<size_t>(host_)];
  own = transport->endpoint(host_);
  std::vector<std::vector<iovec>> taken;
  for (Transport::Endpoint& endpoint : endpoints) taken.push_back({{&endpoint, sizeof endpoint}});
  exchange({{&own, sizeof own}}, taken);
  for (size_t host = 0; host < endpoints.size(); ++host)
    if (std::strncmp(endpoints[host].kind, own.kind, sizeof own.kind) != 0)
      throw CommError(CommError::Kind::broken, peers_[host].name + " has another library between hosts than this rank");
  transport_ = std::move(transport);
  call([&] {
    transport_->connect(host_, endpoints);
    wait_until([&] { return transport_->connected(); }, nap);
  });
  others_.resize(peers_.size());
  const std::lock_guard<std::mutex> lock(with_transports().mutex);
  with_transports().hosts.insert(this);
}

// `begin` may end what it begins, or leave it to the connections.
template <class Begin>
void HostLinks::call(Begin begin) {
  if (!broken_.empty())
    throw CommError(CommError::Kind::broken,
                    "the connections between hosts are broken by an earlier error: " + broken_);
  try {
    begin();
    move_all();
  } catch (const std::exception& error) {
    fail(error.what());
    throw;
  } catch (...) {
    fail("it was interrupted");
    throw;
  }
}

void HostLinks::begin_send(Peer& peer, const std::vector<iovec>& given) {
  peer.out = {kMagic, Kind::data, ++peer.sent, total_bytes(given)};
  peer.sending.begin(&peer.out, given);
}

void HostLinks::begin_receive(Peer& peer, const std::vector<iovec>& taken) {
  ++peer.received;
  peer.receiving.begin(&peer.in, taken);
  peer.checked = false;
}

void HostLinks::exchange(const std::vector<iovec>& given, const std::vector<std::vector<iovec>>& taken) {
  if (transport_) return call([&] { carry(given, taken); });
  call([&] {
    for (size_t host = 0; host < peers_.size(); ++host) {
      if (!is_other(host)) continue;
      begin_send(peers_[host], given);
      begin_receive(peers_[host], taken[host]);
    }
  });
}

void HostLinks::send(int host, const std::vector<iovec>& given) {
  call([&] { begin_send(peers_[static_cast<size_t>(host)], given); });
}

void HostLinks::receive(int host, const std::vector<iovec>& taken) {
  call([&] { begin_receive(peers_[static_cast<size_t>(host)], taken); });
}

// Header and pieces as one message, since each message of a library costs.
void HostLinks::carry(const std::vector<iovec>& given, const std::vector<std::vector<iovec>>& taken) {
  const Header header{kMagic, Kind::data, ++carried_, total_bytes(given)};
  own_.resize(sizeof header + header.bytes);
  std::memcpy(own_.data(), &header, sizeof header);
  char* to = own_.data() + sizeof header;
  for (const iovec& piece : given) to = std::copy_n(static_cast<const char*>(piece.iov_base), piece.iov_len, to);
  for (size_t host = 0; host < peers_.size(); ++host)
    if (is_other(host)) others_[host].resize(sizeof header + total_bytes(taken[host]));
  transport_->begin(own_, others_);
  wait_until([&] { return transport_->done(); }, nap);
  for (size_t host = 0; host < peers_.size(); ++host) {
    if (!is_other(host)) continue;
    Peer& peer = peers_[host];
    std::memcpy(&peer.in, others_[host].data(), sizeof peer.in);
    check(peer, carried_, total_bytes(taken[host]));
    const char* from = others_[host].data() + sizeof header;
    for (const iovec& piece : taken[host]) {
      std::memcpy(piece.iov_base, from, piece.iov_len);
      from += piece.iov_len;
    }
  }
}

void HostLinks::move_all() {
  wait_until(
      [&] {
        bool done = true;
        for (size_t host = 0; host < peers_.size(); ++host) {
          if (!is_other(host)) continue;
          const bool sent = push(peers_[host]);
          const bool came = pull(peers_[host]);
          done = done && sent && came;
        }
        return done;
      },
      [&] { sleep(); });
}

template <class Done, class Sleep>
void HostLinks::wait_until(Done done, Sleep rest) {
  const int64_t start = now_ns();
  int64_t checked = start;
  while (!done()) {
    const int64_t now = now_ns();
    if (now - start < (core_is_shared(now) ? kSharedYieldNs : kYieldNs)) {
      sched_yield();
    } else {
      rest();
      look_around();
    }
    if (interrupt_check_ && now - checked > int64_t{kSleepMs} * 1'000'000) {
      checked = now;
      interrupt_check_();
    }
    if (static_cast<double>(now - start) * 1e-9 > timeout_s_ + grace()) time_out();
  }
}

bool HostLinks::push(Peer& peer) {
  while (!peer.sending.done()) {
    const msghdr message = peer.sending.message();
    const ssize_t sent = sendmsg(peer.fd.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      peer.sending.advance(static_cast<size_t>(sent));
    } else if (would_wait(errno)) {
      return false;
    } else if ((errno == EPIPE || errno == ECONNRESET) && !peer.receiving.done()) {
      return false;  // it may have said why before it left, which pull() finds
    } else if (const int error = errno; error != EINTR) {
      look_around();  // the same where only this host sends
      gone(peer, error);
    }
  }
  return true;
}

bool HostLinks::pull(Peer& peer) {
  while (!peer.receiving.done()) {
    msghdr message = peer.receiving.message();
    const ssize_t came = recvmsg(peer.fd.get(), &message, MSG_DONTWAIT);
    if (came > 0) {
      peer.receiving.advance(static_cast<size_t>(came));
      if (!peer.checked && peer.receiving.moved() >= sizeof(Header)) check_header(peer);
    } else if (came < 0 && would_wait(errno)) {
      return false;
    } else if (came == 0 || errno != EINTR) {
      gone(peer, came == 0 ? ECONNRESET : errno);
    }
  }
  return true;
}

void HostLinks::check_header(Peer& peer) {
  peer.checked = true;
  if (peer.in.magic == kMagic && peer.in.kind == Kind::error) pass_on(peer);
  check(peer, peer.received, peer.receiving.bytes());
}

void HostLinks::check(const Peer& peer, uint64_t sequence, size_t expected) const {
  const Header& header = peer.in;
  if (header.magic != kMagic || header.kind != Kind::data || header.sequence != sequence)
    throw CommError(CommError::Kind::broken, peer.name + " sent what is no message of this job");
  if (header.bytes != expected)
    throw CommError(CommError::Kind::broken,
                    "ranks disagree: " + peer.name + " processes other tokens than this one (" +
                        std::to_string(header.bytes) + " bytes came, " + std::to_string(expected) + " were expected)");
}

// A host is not read from while it is sent to alone, or waited for by nobody: what it says then is an error, or comes
// before one.
void HostLinks::look_around() {
  for (size_t host = 0; host < peers_.size(); ++host) {
    Peer& peer = peers_[host];
    if (!peer.fd || !peer.receiving.done()) continue;
    Header header{};
    const ssize_t came = recv(peer.fd.get(), &header, sizeof header, MSG_PEEK | MSG_DONTWAIT);
    // One that has all that it needs may end in peace while others are waited for.
    if (came == 0 && !peer.sending.done()) gone(peer, ECONNRESET);
    if (came == 0 && transport_ && transport_->waits_for(static_cast<int>(host))) {
      if (peer.left == 0) peer.left = now_ns();
      if (now_ns() - peer.left > kTransportNs) gone(peer, ECONNRESET);
    }
    if (came < 0 && !would_wait(errno) && errno != EINTR) gone(peer, errno);
    if (came == static_cast<ssize_t>(sizeof header) && header.magic == kMagic && header.kind == Kind::error) {
      begin_receive(peer, {});
      pull(peer);
    }
  }
}

// The other host's error: what came of it lies in the pieces, the rest is on its way.
void HostLinks::pass_on(Peer& peer) {
  const size_t length = std::min<size_t>(peer.in.bytes, kMostText);
  std::string text = peer.receiving.text();
  const int64_t until = now_ns() + kTextNs;
  while (text.size() < length && now_ns() < until) {
    char more[kMostText];
    pollfd state{peer.fd.get(), POLLIN, 0};
    poll(&state, 1, kSleepMs);
    const ssize_t came = recv(peer.fd.get(), more, length - text.size(), MSG_DONTWAIT);
    if (came > 0) text.append(more, static_cast<size_t>(came));
    if (came == 0) break;
  }
  text.resize(std::min(text.size(), length));
  throw CommError(CommError::Kind::broken, peer.name + " gave up: " + text);
}

void HostLinks::gone(const Peer& peer, int error) const {
  const bool closed = error == ECONNRESET || error == EPIPE;
  throw CommError(CommError::Kind::peer_lost,
                  peer.name +
                      (closed ? " ended or left: the connection was closed"
                              : std::string(" cannot be reached any more: ") + std::strerror(error)) +
                      ", while this rank waited for it");
}

void HostLinks::sleep() const {
  std::vector<pollfd> looked_at;
  for (const Peer& peer : peers_) {
    const int events = (peer.sending.done() ? 0 : POLLOUT) | (peer.receiving.done() ? 0 : POLLIN);
    if (peer.fd && events != 0) looked_at.push_back({peer.fd.get(), static_cast<short>(events), 0});
  }
  poll(looked_at.data(), looked_at.size(), kSleepMs);
}

bool HostLinks::waits_for(size_t host) const {
  const Peer& peer = peers_[host];
  return !(peer.sending.done() && peer.receiving.done()) ||
         (transport_ && transport_->waits_for(static_cast<int>(host)));
}

void HostLinks::time_out() const {
  std::string missing;
  for (size_t host = 0; host < peers_.size(); ++host)
    if (is_other(host) && waits_for(host)) missing += (missing.empty() ? "" : ", ") + peers_[host].name;
  throw CommError(CommError::Kind::timeout,
                  missing + " did not come within the timeout of " + seconds_text(timeout_s_));
}

void HostLinks::leave_all() noexcept {
  const std::lock_guard<std::mutex> lock(with_transports().mutex);
  for (const HostLinks* each : with_transports().hosts)
    for (const Peer& peer : each->peers_)
      if (peer.fd) shutdown(peer.fd.get(), SHUT_WR);
}

void HostLinks::fail(const std::string& why) noexcept {
  if (!broken_.empty()) return;
  try {
    broken_ = why.empty() ? "an error" : why;
    if (transport_) transport_->give_up();
    const std::string text = broken_.substr(0, kMostText);
    Header header{kMagic, Kind::error, 0, text.size()};
    for (Peer& peer : peers_) {
      if (!peer.fd) continue;
      if (!peer.sending.begun() || peer.sending.done()) {  // else it would be taken for a part of the message
        iovec pieces[] = {{&header, sizeof header}, {const_cast<char*>(text.data()), text.size()}};
        msghdr message{};
        message.msg_iov = pieces;
        message.msg_iovlen = 2;
        sendmsg(peer.fd.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      }
      shutdown(peer.fd.get(), SHUT_WR);
    }
  } catch (...) {  // no memory for the words: the connections still end with this object
    broken_ = "!";
  }
}

}  // namespace anyaccel::comm
