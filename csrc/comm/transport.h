// SPDX-License-Identifier: Apache-2.0
// Libraries that carry what hosts exchange in the place of the connections of HostLinks: MPI, where mpirun has
// started the ranks, and oneCCL. They are loaded when they are asked for; nothing is linked with them. What has gone
// wrong on a host still comes over its connection, since these libraries end the job or wait for ever then.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace anyaccel::comm {

class Transport {
 public:
  // What a host tells the others before they connect.
  struct Endpoint {
    char kind[8];
    int32_t rank;
    uint32_t tag;
    char address[512];
  };
  using Bytes = std::vector<char>;

  virtual ~Transport() = default;
  virtual Endpoint endpoint(int host) = 0;
  // Every host calls it, with the endpoints of all, and asks connected() then until it is true.
  virtual void connect(int host, const std::vector<Endpoint>& endpoints) = 0;
  virtual bool connected() { return true; }
  // `own` goes to each other host, and others[host] is filled with what comes from there; those have the sizes that
  // are expected, and both stay where they are until done() is true.
  virtual void begin(const Bytes& own, std::vector<Bytes>& others) = 0;
  virtual bool done() = 0;
  // Whether connected() or done() still waits for that host; true where it cannot be caller_dtype.
  virtual bool waits_for(int host) const = 0;
  // Something is under way that will not end: its memory must stay for good.
  virtual void give_up() noexcept {}
};

// `transport`: "" or "tcp", "mpi:LIBRARY", or "ccl:LIBRARY" with the library of csrc/ccl. All ranks of the job call it
// at the same time, also those that exchange nothing with other hosts: MPI is started on all or none. Throws CommError.
void start_transport(const std::string& transport);
// A new one, of what has been started; none for tcp.
std::unique_ptr<Transport> make_transport(const std::string& transport);
// At the end of the process: ends MPI, where start_transport() has started it and nothing has failed.
void end_transports() noexcept;

}  // namespace anyaccel::comm
