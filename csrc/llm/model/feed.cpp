// SPDX-License-Identifier: Apache-2.0
#include "llm/model/feed.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace anyaccel::llm {

TokenFeed::TokenFeed() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

TokenFeed::~TokenFeed() { close(fd_); }

void TokenFeed::add(int64_t tag, const std::vector<int64_t>& tokens) {
  const std::lock_guard<std::mutex> lock(mutex_);
  steps_.emplace_back(tag, tokens);
  const uint64_t one = 1;
  // It fails when the counter is at its end only, and is readable then as well.
  [[maybe_unused]] const auto written = write(fd_, &one, sizeof(one));
}

std::vector<TokenFeed::Step> TokenFeed::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  uint64_t count = 0;
  [[maybe_unused]] const auto got = read(fd_, &count, sizeof(count));  // fails where there is nothing to take
  return std::exchange(steps_, {});
}

}  // namespace anyaccel::llm
