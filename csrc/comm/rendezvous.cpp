// SPDX-License-Identifier: Apache-2.0
#include "comm/rendezvous.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <system_error>

#include "comm/errors.h"
#include "common/waiting.h"

namespace anyaccel::comm {
namespace {

constexpr char kMagic[8] = {'a', 'n', 'y', 'a', 'c', 'c', 'e', 'l'};
constexpr uint32_t kVersion = 1;  // of the greeting and of what goes over the connection
constexpr size_t kMostArrivals = 64;
constexpr int kBacklog = 128;
constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kCallNs = 3 * kSecond;     // until an address counts as one that leads nowhere
constexpr int64_t kAnswerNs = 10 * kSecond;  // until whoever is at an address counts as a stranger
constexpr int64_t kVisitNs = 10 * kSecond;   // until a caller has said who it is
constexpr int64_t kPauseNs = kSecond / 10;   // after all addresses of a host were tried in vain
constexpr int kLookMs = 50;

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
  int family() const { return storage.ss_family; }
};

SocketAddress parse(const std::string& text, int port) {
  SocketAddress result;
  auto* four = reinterpret_cast<sockaddr_in*>(&result.storage);
  auto* six = reinterpret_cast<sockaddr_in6*>(&result.storage);
  if (inet_pton(AF_INET, text.c_str(), &four->sin_addr) == 1) {
    four->sin_family = AF_INET;
    four->sin_port = htons(static_cast<uint16_t>(port));
    result.length = sizeof *four;
  } else if (inet_pton(AF_INET6, text.c_str(), &six->sin6_addr) == 1) {
    six->sin6_family = AF_INET6;
    six->sin6_port = htons(static_cast<uint16_t>(port));
    result.length = sizeof *six;
  } else {
    throw std::invalid_argument("'" + text + "' is not an address");
  }
  return result;
}

int port_of(int fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &length) != 0)
    throw std::system_error(errno, std::generic_category(), "getsockname");
  return ntohs(storage.ss_family == AF_INET ? reinterpret_cast<sockaddr_in*>(&storage)->sin_port
                                            : reinterpret_cast<sockaddr_in6*>(&storage)->sin6_port);
}

Descriptor new_socket(int family) {
  Descriptor fd(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) throw std::system_error(errno, std::generic_category(), "socket");
  return fd;
}

void set(int fd, int level, int name, int value) { setsockopt(fd, level, name, &value, sizeof value); }

// Each message goes at once. A connection that nothing uses for long stays known to what is on its way, and a host that
// has gone meanwhile is noticed.
void prepare(int fd) {
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
#ifdef TCP_KEEPIDLE
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 60);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 15);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
#endif
}

std::string hex(const uint8_t* bytes, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    text += "0123456789abcdef"[bytes[i] >> 4];
    text += "0123456789abcdef"[bytes[i] & 15];
  }
  return text;
}

// In a time that does not tell how much of it is right.
bool same_bytes(const uint8_t* a, const uint8_t* b, size_t count) {
  uint8_t differs = 0;
  for (size_t i = 0; i < count; ++i) differs |= a[i] ^ b[i];
  return differs == 0;
}

std::string this_host() {
  char name[256] = {};
  if (gethostname(name, sizeof name - 1) != 0 || name[0] == 0) return "a-host";
  for (char* at = name; *at; ++at)
    if (*at <= ' ' || *at == ';' || *at == ',') *at = '_';
  return name;
}

}  // namespace

Rendezvous::Rendezvous(int host, int hosts, const std::vector<std::string>& addresses) : host_(host), hosts_(hosts) {
  if (host < 0 || host >= hosts)
    throw std::invalid_argument("host " + std::to_string(host) + " of " + std::to_string(hosts));
  if (addresses.empty()) throw std::invalid_argument("a host without an address");
  if (getrandom(key_.bytes, kKeyBytes, 0) != static_cast<ssize_t>(kKeyBytes))
    throw std::system_error(errno, std::generic_category(), "getrandom");
  endpoint_ = this_host() + ";" + hex(key_.bytes, kKeyBytes);
  for (const std::string& text : addresses) {
    const SocketAddress address = parse(text, 0);
    Descriptor fd = new_socket(address.family());
    if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.length) != 0 ||
        listen(fd.get(), kBacklog) != 0)
      throw std::system_error(errno, std::generic_category(), "listening on " + text);
    endpoint_ += ";" + text + "," + std::to_string(port_of(fd.get()));
    listeners_.push_back(std::move(fd));
  }
}

Rendezvous::Endpoint Rendezvous::read(const std::string& text) {
  const std::invalid_argument wrong("'" + text.substr(0, text.find(';')) + "...' is not the endpoint of a host");
  std::istringstream stream(text);
  std::string key, address;
  Endpoint endpoint;
  if (!std::getline(stream, endpoint.name, ';') || !std::getline(stream, key, ';') || key.size() != 2 * kKeyBytes)
    throw wrong;
  for (size_t i = 0; i < kKeyBytes; ++i) {
    size_t used = 0;
    const std::string digits = key.substr(2 * i, 2);
    if (digits.find_first_not_of("0123456789abcdef") != std::string::npos) throw wrong;
    endpoint.key.bytes[i] = static_cast<uint8_t>(std::stoi(digits, &used, 16));
  }
  while (std::getline(stream, address, ';')) {
    const size_t at = address.find(',');
    const std::string port = at == std::string::npos ? "" : address.substr(at + 1);
    if (port.empty() || port.size() > 5 || port.find_first_not_of("0123456789") != std::string::npos) throw wrong;
    endpoint.addresses.push_back({address.substr(0, at), std::stoi(port)});
    parse(endpoint.addresses.back().text, 0);
  }
  if (endpoint.name.empty() || endpoint.addresses.empty()) throw wrong;
  return endpoint;
}

std::string Rendezvous::name_of(const std::string& endpoint) { return read(endpoint).name; }

Rendezvous::Hello Rendezvous::hello(int from, const Key& to) {
  Hello result{};
  std::memcpy(result.magic, kMagic, sizeof kMagic);
  result.version = kVersion;
  result.host = static_cast<uint32_t>(from);
  result.key = to;
  return result;
}

struct Rendezvous::Call {
  int host;
  const Endpoint& endpoint;
  size_t address = 0;
  Descriptor fd{};
  bool connected = false;
  int64_t until = 0;  // of this attempt, or of the pause before the next one
  Hello answer{};
  size_t got = 0;
  std::string problem{};  // of the last attempt
};

struct Rendezvous::Incoming {
  Descriptor fd;
  int64_t until;
  Hello hello{};
  size_t got = 0;
};

// One call of connect().
struct Rendezvous::Handshake {
  Rendezvous& self;
  std::vector<Endpoint> endpoints{};
  std::vector<Descriptor> connections{};
  std::list<Call> calls{};
  std::list<Incoming> arrivals{};

  // Reads a greeting as far as it has come; true once it is whole, nothing when the connection has ended.
  static std::optional<bool> receive(int fd, Hello& hello, size_t& got) {
    while (got < sizeof hello) {
      const ssize_t n = recv(fd, reinterpret_cast<char*>(&hello) + got, sizeof hello - got, 0);
      if (n > 0) {
        got += static_cast<size_t>(n);
      } else if (n < 0 && errno == EINTR) {
        continue;
      } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        return false;
      } else {
        return std::nullopt;
      }
    }
    return true;
  }

  // A new connection has room for so little.
  static bool send(int fd, const Hello& hello) {
    return ::send(fd, &hello, sizeof hello, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof hello);
  }

  bool is_right(const Hello& hello) const {
    return std::memcmp(hello.magic, kMagic, sizeof kMagic) == 0 && hello.version == kVersion &&
           same_bytes(hello.key.bytes, self.key_.bytes, kKeyBytes) && hello.host < static_cast<uint32_t>(self.hosts_);
  }

  void begin(Call& call, int64_t now) {
    const Address& address = call.endpoint.addresses[call.address];
    call.connected = false;
    call.got = 0;
    call.until = now + kCallNs;
    const SocketAddress to = parse(address.text, address.port);
    call.fd = new_socket(to.family());
    if (::connect(call.fd.get(), reinterpret_cast<const sockaddr*>(&to.storage), to.length) == 0)
      greet(call, now);
    else if (errno != EINPROGRESS && errno != EINTR)
      give_up(call, now, std::strerror(errno));
  }

  void greet(Call& call, int64_t now) {
    prepare(call.fd.get());
    call.connected = true;
    call.until = now + kAnswerNs;
    if (!send(call.fd.get(), hello(self.host_, call.endpoint.key))) give_up(call, now, std::strerror(errno));
  }

  void give_up(Call& call, int64_t now, const std::string& why) {
    const Address& address = call.endpoint.addresses[call.address];
    call.problem = address.text + " port " + std::to_string(address.port) + ": " + why;
    call.fd = Descriptor();
    call.address = (call.address + 1) % call.endpoint.addresses.size();
    call.until = now + (call.address == 0 ? kPauseNs : 0);
  }

  // False once it is done.
  bool go_on(Call& call, int64_t now) {
    if (!call.fd) {
      if (now >= call.until) begin(call, now);
      return true;
    }
    if (!call.connected) {
      pollfd state{call.fd.get(), POLLOUT, 0};
      int error = 0;
      socklen_t length = sizeof error;
      if (poll(&state, 1, 0) == 1) {
        getsockopt(call.fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
        if (error == 0)
          greet(call, now);
        else
          give_up(call, now, std::strerror(error));
      } else if (now >= call.until) {
        give_up(call, now, std::strerror(ETIMEDOUT));
      }
      return true;
    }
    const std::optional<bool> whole = receive(call.fd.get(), call.answer, call.got);
    if (whole == true && is_right(call.answer) && call.answer.host == static_cast<uint32_t>(call.host)) {
      connections[static_cast<size_t>(call.host)] = std::move(call.fd);
      return false;
    }
    if (whole == true)
      give_up(call, now, "somebody else answers");
    else if (!whole)
      give_up(call, now, "the connection was closed");
    else if (now >= call.until)
      give_up(call, now, "no answer");
    return true;
  }

  void accept_new(int64_t now) {
    for (const Descriptor& listener : self.listeners_) {
      for (;;) {
        Descriptor fd(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (!fd) break;
        if (arrivals.size() >= kMostArrivals) arrivals.pop_front();  // who has been silent for longest
        arrivals.push_back({std::move(fd), now + kVisitNs});
      }
    }
  }

  // False when it can go: its connection is kept, or it is a stranger.
  bool hear(Incoming& incoming, int64_t now) {
    const std::optional<bool> whole = receive(incoming.fd.get(), incoming.hello, incoming.got);
    if (whole == false) return now < incoming.until;
    if (!whole || !is_right(incoming.hello)) return false;
    const size_t from = incoming.hello.host;
    if (static_cast<int>(from) <= self.host_) return false;
    prepare(incoming.fd.get());
    // One that comes again has given up its first call.
    if (send(incoming.fd.get(), hello(self.host_, endpoints[from].key))) connections[from] = std::move(incoming.fd);
    return false;
  }

  bool all_here() const {
    for (int host = 0; host < self.hosts_; ++host)
      if (host != self.host_ && !connections[static_cast<size_t>(host)]) return false;
    return true;
  }

  // Until something happens, but not for long.
  void wait() {
    std::vector<pollfd> looked_at;
    for (const Descriptor& listener : self.listeners_) looked_at.push_back({listener.get(), POLLIN, 0});
    for (const Incoming& incoming : arrivals) looked_at.push_back({incoming.fd.get(), POLLIN, 0});
    for (const Call& call : calls)
      if (call.fd) looked_at.push_back({call.fd.get(), static_cast<short>(call.connected ? POLLIN : POLLOUT), 0});
    poll(looked_at.data(), looked_at.size(), kLookMs);
  }
};

std::vector<Descriptor> Rendezvous::connect(const std::vector<std::string>& texts, const std::vector<std::string>& who,
                                            double timeout_s, const std::function<void()>& check) {
  if (texts.size() != static_cast<size_t>(hosts_) || who.size() != texts.size())
    throw std::invalid_argument("connect: needs one endpoint a host, of " + std::to_string(hosts_));
  Handshake handshake{*this};
  for (const std::string& text : texts) handshake.endpoints.push_back(read(text));
  handshake.connections.resize(texts.size());
  for (const Descriptor& listener : listeners_) fcntl(listener.get(), F_SETFL, O_NONBLOCK);
  for (int host = 0; host < host_; ++host)
    handshake.calls.push_back({host, handshake.endpoints[static_cast<size_t>(host)]});
  const int64_t start = now_ns();
  for (;;) {
    const int64_t now = now_ns();
    handshake.calls.remove_if([&](Call& call) { return !handshake.go_on(call, now); });
    handshake.accept_new(now);
    handshake.arrivals.remove_if([&](Incoming& incoming) { return !handshake.hear(incoming, now); });
    if (handshake.all_here()) break;
    if (static_cast<double>(now - start) * 1e-9 > timeout_s) {
      std::string missing;
      for (size_t host = 0; host < texts.size(); ++host) {
        if (static_cast<int>(host) == host_ || handshake.connections[host]) continue;
        const auto call = std::find_if(handshake.calls.begin(), handshake.calls.end(),
                                       [&](const Call& each) { return each.host == static_cast<int>(host); });
        const bool called = call != handshake.calls.end() && !call->problem.empty();
        missing += (missing.empty() ? "" : ", ") + who[host] + (called ? " (" + call->problem + ")" : "");
      }
      throw CommError(CommError::Kind::timeout,
                      "no connection with " + missing + " within the timeout of " + seconds_text(timeout_s));
    }
    if (check) check();
    handshake.wait();
  }
  listeners_.clear();
  return std::move(handshake.connections);
}

}  // namespace anyaccel::comm
