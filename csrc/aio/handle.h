// SPDX-License-Identifier: Apache-2.0
// Threads that carry out requests, each with a queue of its own. All of them work on the oldest request that has
// chunks left, so that one large request and many small ones both use every thread and keep the queues full.
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
  unsigned depth = 32;  // transfers under way in one thread
  unsigned threads = 1;
  bool single_submit = false;
  Engine engine = Engine::automatic;
};

class Handle {
 public:
  // Throws std::system_error when the machine does not have the engine that is asked for.
  explicit Handle(const Config& config);
  // Gives up what is not done, and returns once the kernel uses none of the memory any more.
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  Engine engine() const { return engine_; }
  int64_t block_bytes() const { return config_.block_bytes; }

  // `number` is the caller's, and new. The memory of the segments must stay until the request is done.
  void submit(int64_t number, std::unique_ptr<Request> request);

  // The request once it is done; null after `timeout`. Throws std::out_of_range for a number that is not there.
  std::shared_ptr<Request> wait(int64_t number, std::chrono::milliseconds timeout);
  std::shared_ptr<Request> find(int64_t number);

  // Does nothing for a request that is not done, or that does not exist.
  void forget(int64_t number);

 private:
  class Worker;

  // The next chunk for a thread; null when there is none, or at the end. With `block` waits for one.
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
