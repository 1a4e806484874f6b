// SPDX-License-Identifier: Apache-2.0
#include "comm/stage_links.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <sstream>
#include <stdexcept>

#include "comm/errors.h"

namespace anyaccel::comm {
namespace {

constexpr char kNoEndpoint[] = "-";
// Of one member's memory for one other: containers often have no more than 64 MiB of shared memory.
constexpr size_t kMailboxBytes = 512 << 10;

}  // namespace

StageLinks::StageLinks(int member, const std::vector<int>& hosts, const std::vector<std::string>& addresses,
                       double timeout_s, ShmSegment::Kind kind)
    : member_(member), hosts_(hosts) {
  const int count = static_cast<int>(hosts.size());
  if (member < 0 || member >= count) throw std::invalid_argument("no such member of a pipeline");
  for (int other = 0; other < count; ++other)
    if (is_here(other)) here_.push_back(other);
  const int size = static_cast<int>(here_.size());
  std::ostringstream text;
  if (size > 1) {
    group_.emplace(place(member), size, size_t{64} * here_.size(), timeout_s, kind,
                   Messages::bytes_a_rank(size, kMailboxBytes));
    text << group_->name();
  } else {
    text << kNoEndpoint;
  }
  if (size < count) {
    host_links_.emplace(member, count, addresses, timeout_s);
    text << ' ' << host_links_->endpoint();
  } else {
    text << ' ' << kNoEndpoint;
  }
  endpoint_ = text.str();
}

int StageLinks::place(int member) const {
  return static_cast<int>(std::find(here_.begin(), here_.end(), member) - here_.begin());
}

void StageLinks::connect(const std::vector<std::string>& endpoints, const std::vector<int>& pids,
                         const std::vector<int>& ranks) {
  if (endpoints.size() != hosts_.size() || pids.size() != hosts_.size() || ranks.size() != hosts_.size())
    throw std::invalid_argument("connect: needs one endpoint, pid and rank a member");
  ranks_ = ranks;
  std::vector<std::string> groups(endpoints.size()), of_hosts(endpoints.size());
  for (size_t i = 0; i < endpoints.size(); ++i) {
    std::istringstream stream(endpoints[i]);
    stream >> groups[i] >> of_hosts[i];
    if (!stream) throw std::invalid_argument("connect: what is no endpoint of a pipeline");
  }
  if (group_) {
    std::vector<std::string> names;
    std::vector<int> pids_here, numbers;
    for (const int member : here_) {
      names.push_back(groups[static_cast<size_t>(member)]);
      pids_here.push_back(pids[static_cast<size_t>(member)]);
      numbers.push_back(ranks[static_cast<size_t>(member)]);
    }
    group_->set_numbers(numbers);
    group_->connect(names, pids_here);
    messages_ = std::make_unique<Messages>(*group_);
  }
  if (host_links_) {
    std::vector<std::string> names;
    for (const int rank : ranks) names.push_back("rank " + std::to_string(rank));
    host_links_->connect(of_hosts, names);
  }
}

void StageLinks::unlink() noexcept {
  if (group_) group_->unlink();
}

void StageLinks::set_interrupt_check(const std::function<void()>& check) {
  if (group_) group_->set_interrupt_check(check);
  if (host_links_) host_links_->set_interrupt_check(check);
}

template <class Move>
void StageLinks::call(Move move) {
  if (!broken_.empty())
    throw CommError(CommError::Kind::broken, "the stages are broken by an earlier error: " + broken_);
  try {
    move();
  } catch (const std::exception& error) {
    fail(error.what());
    throw;
  } catch (...) {
    fail("it was interrupted");
    throw;
  }
}

void StageLinks::send(int to, uint64_t signature, void* packet, size_t bytes) {
  std::memset(packet, 0, kLine);
  std::memcpy(packet, &signature, sizeof signature);
  call([&] {
    if (!is_here(to)) return host_links_->send(to, {{packet, kLine + bytes}});
    const auto message = messages_->send(packet, kLine + bytes, DType::u8, place(to), 0);
    messages_->wait(*message);
  });
}

void StageLinks::receive(int from, uint64_t signature, void* packet, size_t bytes) {
  call([&] {
    if (!is_here(from)) {
      host_links_->receive(from, {{packet, kLine + bytes}});
    } else {
      const auto message = messages_->receive(packet, kLine + bytes, DType::u8, place(from), 0);
      messages_->wait(*message);
    }
    uint64_t came;
    std::memcpy(&came, packet, sizeof came);
    if (came == signature) return;
    throw CommError(CommError::Kind::broken,
                    "ranks disagree: rank " + std::to_string(ranks_[static_cast<size_t>(from)]) +
                        " processes other tokens than rank " + std::to_string(ranks_[static_cast<size_t>(member_)]));
  });
}

void StageLinks::fail(const char* why) noexcept {
  if (!broken_.empty()) return;
  try {
    broken_ = *why == 0 ? "an error" : why;
  } catch (...) {  // no memory for the words
    broken_ = "!";
  }
  if (host_links_) host_links_->fail(why);
  if (group_) group_->give_up();
}

}  // namespace anyaccel::comm
