// SPDX-License-Identifier: Apache-2.0
#include "common/heartbeat.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>

#include <cerrno>
#include <chrono>

namespace anyaccel {
namespace {

constexpr double kLeastWork_s = 1e-3;

double seconds_of(clockid_t clock) {
  timespec found{};
  clock_gettime(clock, &found);
  return static_cast<double>(found.tv_sec) + 1e-9 * static_cast<double>(found.tv_nsec);
}

}  // namespace

Work Work::now() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return {seconds_of(CLOCK_PROCESS_CPUTIME_ID) - seconds_of(CLOCK_THREAD_CPUTIME_ID), used.ru_majflt + used.ru_inblock};
}

bool Work::exceeds(const Work& before) const {
  return processor_s - before.processor_s > kLeastWork_s || read != before.read;
}

Heartbeat::Heartbeat(int socket, double seconds) {
  // Signals are for the threads that wait for them.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  try {
    thread_ = std::thread(&Heartbeat::run, this, socket, seconds);
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Heartbeat::stop() {
  if (!thread_.joinable()) return;
  if (getpid() != owner_) {  // a child of fork() has no such thread
    thread_.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  stopping_.notify_one();
  thread_.join();
}

void Heartbeat::run(int socket, double seconds) {
  Work before = Work::now();
  std::unique_lock lock(mutex_);
  do {
    const Work now = Work::now();
    const bool worked = now.exceeds(before);
    const char signal = worked ? kWorked : kIdle;
    const ssize_t sent = send(socket, &signal, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) return;  // nobody listens any more
    if (sent == 1 && worked) before = now;
  } while (!stopping_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return stopped_; }));
}

}  // namespace anyaccel
