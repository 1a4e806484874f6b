// SPDX-License-Identifier: Apache-2.0
// Whether the other ranks of a group on several hosts live: a thread of each rank tells all others every second that
// its process is not stopped, and whether it has computed or read since, over a connection a pair. What carries the
// data of such a group notices the end of a rank, or nothing at all, and knows no ranks.
//
// The thread takes no lock of Python, so it goes on while a rank loads or computes. A rank that ends or is killed
// closes its connections; one that is stopped, or whose host is cut off, is silent.
#pragma once

#include <unistd.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/rendezvous.h"
#include "common/descriptor.h"

namespace anyaccel::comm {

class RankWatch {
 public:
  struct Seen {
    uint64_t beats, works;  // what has been heard of the rank, and how often it had worked
    double silent_s;        // since then, of the time in which this process ran
    double left_s;          // for how long it has been gone; below 0: it is there
  };

  // `addresses`: of this host, see Rendezvous. `beat_s`: seconds between two beats. Throws as Rendezvous.
  RankWatch(int rank, int size, const std::vector<std::string>& addresses, double beat_s);
  ~RankWatch();

  const std::string& endpoint() const { return rendezvous_.endpoint(); }
  // Call it on every rank, with the endpoints of all. Throws as Rendezvous::connect; std::system_error where there can
  // be no thread.
  void connect(const std::vector<std::string>& endpoints, double timeout_s, const std::function<void()>& check);
  // "rank 2 on node1". After connect().
  const std::string& name(int rank) const { return names_[static_cast<size_t>(rank)]; }
  // By rank; the own one is there and not silent.
  std::vector<Seen> look();

  // Tells all ranks that this one has come to a place, which is not 0.
  void arrive(uint64_t place);
  // Whether a rank has come there, as one of its latest places.
  bool arrived(int rank, uint64_t place);

  // The others see that this rank has left.
  void close() noexcept;

 private:
  struct Beat {
    uint64_t worked;  // 0 or 1
    uint64_t place;
  };
  static constexpr size_t kPlaces = 8;
  struct Peer {
    Descriptor fd;
    Beat in, out;
    size_t got = 0, unsent = 0;  // bytes
    Seen seen{0, 0, 0, -1};
    std::array<uint64_t, kPlaces> places{};
    size_t next_place = 0;
  };

  void run();
  void read(Peer& peer);
  void write(Peer& peer, const Beat& beat);
  void flush(Peer& peer);
  void pass(double seconds);
  void wake() noexcept;

  const int rank_;
  const double beat_s_;
  const pid_t owner_ = getpid();
  Rendezvous rendezvous_;
  std::vector<std::string> names_;
  std::vector<Peer> peers_;
  Descriptor woken_, waking_;
  std::mutex mutex_;
  uint64_t place_ = 0;
  bool told_ = true, closed_ = false;
  std::thread thread_;
};

}  // namespace anyaccel::comm
