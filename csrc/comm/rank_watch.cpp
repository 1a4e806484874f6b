// SPDX-License-Identifier: Apache-2.0
#include "comm/rank_watch.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "common/heartbeat.h"
#include "common/waiting.h"

namespace anyaccel::comm {
namespace {

constexpr double kSliceS = 0.25;  // of a wait, and of what a process that was paused itself counts of its pause

bool would_wait(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

RankWatch::RankWatch(int rank, int size, const std::vector<std::string>& addresses, double beat_s)
    : rank_(rank), beat_s_(beat_s), rendezvous_(rank, size, addresses), peers_(static_cast<size_t>(size)) {
  if (!(beat_s > 0)) throw std::invalid_argument("the time between beats must be above 0");
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) throw std::system_error(errno, std::generic_category(), "pipe2");
  woken_ = Descriptor(ends[0]);
  waking_ = Descriptor(ends[1]);
}

RankWatch::~RankWatch() { close(); }

void RankWatch::connect(const std::vector<std::string>& endpoints, double timeout_s,
                        const std::function<void()>& check) {
  for (size_t rank = 0; rank < endpoints.size(); ++rank)
    names_.push_back("rank " + std::to_string(rank) + " on " + Rendezvous::name_of(endpoints[rank]));
  std::vector<Descriptor> found = rendezvous_.connect(endpoints, names_, timeout_s, check);
  for (size_t rank = 0; rank < peers_.size(); ++rank) peers_[rank].fd = std::move(found[rank]);
  // Signals are for the threads that wait for them.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  try {
    thread_ = std::thread(&RankWatch::run, this);
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

std::vector<RankWatch::Seen> RankWatch::look() {
  std::vector<Seen> found;
  const std::lock_guard lock(mutex_);
  for (const Peer& peer : peers_) found.push_back(peer.seen);
  return found;
}

void RankWatch::arrive(uint64_t place) {
  {
    const std::lock_guard lock(mutex_);
    place_ = place;
    told_ = false;
  }
  wake();
}

bool RankWatch::arrived(int rank, uint64_t place) {
  const std::lock_guard lock(mutex_);
  if (rank == rank_) return place_ == place;
  const Peer& peer = peers_.at(static_cast<size_t>(rank));
  return std::find(peer.places.begin(), peer.places.end(), place) != peer.places.end();
}

void RankWatch::wake() noexcept {
  const char byte = 0;
  // Where the pipe is full, the thread wakes up anyway.
  [[maybe_unused]] const ssize_t done = ::write(waking_.get(), &byte, 1);
}

void RankWatch::close() noexcept {
  if (getpid() != owner_) {  // a child of fork() has no such thread, and its parent's connections
    if (thread_.joinable()) thread_.detach();
    return;
  }
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  wake();
  thread_.join();
  for (Peer& peer : peers_)
    if (peer.fd) shutdown(peer.fd.get(), SHUT_RDWR);  // a child of fork() may have it open
}

void RankWatch::run() {
  Work before = Work::now();
  int64_t last = now_ns(), next = last;
  std::vector<pollfd> polled;
  std::vector<size_t> whose;
  for (;;) {
    const int64_t now = now_ns();
    bool tell = now >= next;
    Beat beat{};
    {
      const std::lock_guard lock(mutex_);
      if (closed_) return;
      pass(std::min(static_cast<double>(now - last) * 1e-9, kSliceS));
      last = now;
      tell = tell || !told_;
      told_ = true;
      beat.place = place_;
    }
    if (tell) {
      const Work work = Work::now();
      beat.worked = work.exceeds(before) ? 1 : 0;
      if (beat.worked != 0) before = work;
      next = now + static_cast<int64_t>(beat_s_ * 1e9);
    }
    polled.assign(1, {woken_.get(), POLLIN, 0});
    whose.assign(1, 0);
    {
      const std::lock_guard lock(mutex_);
      for (size_t rank = 0; rank < peers_.size(); ++rank) {
        Peer& peer = peers_[rank];
        if (!peer.fd || peer.seen.left_s >= 0) continue;
        if (tell) write(peer, beat);
        polled.push_back({peer.fd.get(), static_cast<short>(POLLIN | (peer.unsent > 0 ? POLLOUT : 0)), 0});
        whose.push_back(rank);
      }
    }
    const double wait_s = std::clamp(static_cast<double>(next - now_ns()) * 1e-9, 0.0, kSliceS);
    if (poll(polled.data(), polled.size(), static_cast<int>(wait_s * 1e3) + 1) <= 0) continue;
    if (polled[0].revents != 0) {
      char bytes[64];
      while (::read(woken_.get(), bytes, sizeof bytes) > 0) {
      }
    }
    const std::lock_guard lock(mutex_);
    for (size_t i = 1; i < polled.size(); ++i) {
      Peer& peer = peers_[whose[i]];
      if ((polled[i].revents & POLLOUT) != 0) flush(peer);
      if ((polled[i].revents & ~POLLOUT) != 0) read(peer);
    }
  }
}

void RankWatch::pass(double seconds) {
  for (Peer& peer : peers_) {
    if (!peer.fd) continue;
    peer.seen.silent_s += seconds;
    if (peer.seen.left_s >= 0) peer.seen.left_s += seconds;
  }
}

void RankWatch::read(Peer& peer) {
  for (;;) {
    const ssize_t came =
        recv(peer.fd.get(), reinterpret_cast<char*>(&peer.in) + peer.got, sizeof(Beat) - peer.got, MSG_DONTWAIT);
    if (came < 0 && would_wait(errno)) return;
    if (came <= 0) {
      peer.seen.left_s = 0;
      return;
    }
    peer.got += static_cast<size_t>(came);
    if (peer.got < sizeof(Beat)) continue;
    peer.got = 0;
    ++peer.seen.beats;
    peer.seen.works += peer.in.worked != 0 ? 1 : 0;
    peer.seen.silent_s = 0;
    const size_t latest = (peer.next_place + kPlaces - 1) % kPlaces;
    if (peer.in.place != 0 && peer.places[latest] != peer.in.place) {
      peer.places[peer.next_place] = peer.in.place;
      peer.next_place = (peer.next_place + 1) % kPlaces;
    }
  }
}

// A beat for which there is no room behind an earlier one is left out: the next one says what it would have said.
void RankWatch::write(Peer& peer, const Beat& beat) {
  if (peer.unsent > 0) flush(peer);
  if (peer.unsent > 0) {
    told_ = told_ && beat.place == peer.out.place;
    return;
  }
  peer.out = beat;
  peer.unsent = sizeof(Beat);
  flush(peer);
}

void RankWatch::flush(Peer& peer) {
  const char* end = reinterpret_cast<const char*>(&peer.out + 1);
  const ssize_t sent = send(peer.fd.get(), end - peer.unsent, peer.unsent, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent > 0) peer.unsent -= static_cast<size_t>(sent);
  // What has failed is seen by what comes from there, which may lie there still.
}

}  // namespace anyaccel::comm
