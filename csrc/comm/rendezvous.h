// SPDX-License-Identifier: Apache-2.0
// How hosts find each other: each listens, tells the others where by an endpoint that goes through what the job has
// already (a store, a process group), and connects to those with a lower number. An endpoint has a random key: who
// connects shows that it has read the endpoint of whom it calls, and who answers that it has read the caller's.
// Strangers get no answer.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/descriptor.h"

namespace anyaccel::comm {

class Rendezvous {
 public:
  // `addresses`: IPv4 and IPv6 addresses of this host, those first that others should try first. Listens on them, at
  // any free port. Throws std::system_error, std::invalid_argument.
  Rendezvous(int host, int hosts, const std::vector<std::string>& addresses);

  // For the other hosts only: it has the key. Without blanks.
  const std::string& endpoint() const { return endpoint_; }
  // The name of the host that an endpoint is of. Throws std::invalid_argument.
  static std::string name_of(const std::string& endpoint);

  // A socket to each other host, in their order; none at the own place. Nothing listens any more then. `who`: what
  // errors call the hosts. `check` is called now and then, and may throw. Throws CommError (`timeout` names who did not
  // come), std::invalid_argument, std::system_error.
  std::vector<Descriptor> connect(const std::vector<std::string>& endpoints, const std::vector<std::string>& who,
                                  double timeout_s, const std::function<void()>& check);

 private:
  static constexpr size_t kKeyBytes = 32;
  struct Key {
    uint8_t bytes[kKeyBytes];
  };
  struct Address {
    std::string text;
    int port;
  };
  struct Endpoint {
    std::string name;
    Key key;
    std::vector<Address> addresses;
  };
  // What both ends send first.
  struct Hello {
    char magic[8];
    uint32_t version, host;
    Key key;  // of the receiver's endpoint
  };
  struct Call;      // to a host with a lower number
  struct Incoming;  // who has come and not said yet who it is
  struct Handshake;

  static Endpoint read(const std::string& endpoint);
  static Hello hello(int from, const Key& to);

  const int host_, hosts_;
  Key key_;
  std::string endpoint_;
  std::vector<Descriptor> listeners_;
};

}  // namespace anyaccel::comm
