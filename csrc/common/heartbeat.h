// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>

namespace anyaccel {

// What this process has done until now, apart from the calling thread.
struct Work {
  double processor_s;
  long read;  // pages and blocks that it had to wait for

  static Work now();
  bool exceeds(const Work& before) const;
};

// A thread that tells the other end of a socket, every so many seconds, that this process is not stopped, with one
// byte: kWorked if the process has computed or read since the byte before, else kIdle. Bytes for which the socket has
// no room are left out. The thread takes no lock of its caller, so it goes on while Python waits for a page of a file.
class Heartbeat {
 public:
  static constexpr char kIdle = 0, kWorked = 1;

  // The socket has to stay open until stop(). Throws std::system_error where there can be no thread.
  Heartbeat(int socket, double seconds);
  ~Heartbeat() { stop(); }
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  // Nothing is sent after it.
  void stop();

 private:
  void run(int socket, double seconds);

  const pid_t owner_ = getpid();
  std::mutex mutex_;
  std::condition_variable stopping_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace anyaccel
