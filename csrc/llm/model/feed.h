// SPDX-License-Identifier: Apache-2.0
// Tokens on their way out of a call that takes several steps.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace anyaccel::llm {

// One thread takes steps and adds what each of them brought; another one, which waits for the descriptor to become
// readable, takes it out while the steps go on. Any thread may ask for an early end.
class TokenFeed {
 public:
  // Of one step: what the caller calls these steps, and the token of each request.
  using Step = std::pair<int64_t, std::vector<int64_t>>;

  TokenFeed();  // throws std::system_error
  ~TokenFeed();
  TokenFeed(const TokenFeed&) = delete;
  TokenFeed& operator=(const TokenFeed&) = delete;

  // Readable as long as something has not been taken.
  int fileno() const { return fd_; }
  void add(int64_t tag, const std::vector<int64_t>& tokens);
  // All that has been added since the last call.
  std::vector<Step> take();
  // After the step under way, or, with `value` false, not any more.
  void stop(bool value) { stopped_.store(value, std::memory_order_relaxed); }
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }

 private:
  const int fd_;
  std::mutex mutex_;
  std::vector<Step> steps_;
  std::atomic<bool> stopped_{false};
};

}  // namespace anyaccel::llm
