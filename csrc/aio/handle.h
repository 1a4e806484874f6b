// SPDX-License-Identifier: Apache-2.0
// The worker threads of a handle, each with its own queue of transfers. All of them take chunks of the oldest request
// that has some left, so that one large request and many small ones both use every thread and keep the queues full.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "aio/queue.h"
#include "aio/request.h"

namespace anyaccel::aio {

struct Config {
  int64_t block_bytes = 1 << 20;
  unsigned depth = 32;  // transfers in flight in one thread
  unsigned threads = 1;
  bool single_submit = false;
  Engine engine = Engine::automatic;
};

class Handle {
 public:
  // Throws std::system_error when the machine does not have the requested engine.
  explicit Handle(const Config& config);
  // Cancels the requests that are not done, and returns once the kernel no longer uses their memory.
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  Engine engine() const { return engine_; }
  int64_t block_bytes() const { return config_.block_bytes; }

  // The caller chooses `number`, which must be new. The memory of the segments must stay until the request is done.
  void submit(int64_t number, std::unique_ptr<Request> request);

  // Returns the request once it is done, or null after `timeout`. Throws std::out_of_range for an unknown number.
  std::shared_ptr<Request> wait(int64_t number, std::chrono::milliseconds timeout);
  std::shared_ptr<Request> find(int64_t number);

  // Does nothing for a request that is not done, or that does not exist.
  void forget(int64_t number);

 private:
  class Worker;

  // Takes the next chunk for a thread; returns null when there is none. With `block`, waits for one, and returns null
  // only when the handle is being destroyed.
  std::shared_ptr<Request> take(bool block, size_t& chunk);
  void finish_chunk(const std::shared_ptr<Request>& request, int64_t bytes);
  void make_queues();

  const Config config_;
  Engine engine_ = Engine::automatic;
  std::vector<std::unique_ptr<Queue>> queues_;
  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<std::shared_ptr<Request>> waiting_;
  std::map<int64_t, std::shared_ptr<Request>> requests_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace anyaccel::aio
