// SPDX-License-Identifier: Apache-2.0
#include "comm/messages.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "common/waiting.h"

namespace anyaccel::comm {
namespace {

constexpr uint64_t kSlots = 4;
constexpr size_t kHeaderBytes = 64;
constexpr size_t kMinPairBytes = 768;  // a ring and four slots, each with room for a header and as much data
constexpr int kSpins = 200;
constexpr int64_t kSleepNs = 2'000'000;
constexpr int64_t kPeerCheckNs = 1'000'000;
constexpr int64_t kInterruptCheckNs = 50'000'000;

}  // namespace

size_t Messages::bytes_a_rank(int size, size_t pair_bytes) {
  const size_t pair = std::max(pair_bytes / 64 * 64, kMinPairBytes);
  return pair * static_cast<size_t>(size);
}

Messages::Messages(ShmGroup& group)
    : group_(group),
      pair_bytes_(group.mailbox_bytes() / static_cast<size_t>(group.size())),
      slot_bytes_((pair_bytes_ - std::min(pair_bytes_, sizeof(Ring))) / kSlots / 64 * 64),
      sends_(static_cast<size_t>(group.size())),
      incoming_(static_cast<size_t>(group.size())) {
  static_assert(sizeof(Header) <= kHeaderBytes);
  if (slot_bytes_ <= kHeaderBytes) throw std::invalid_argument("the group has no mailboxes");
}

Messages::Ring& Messages::ring(int owner, int receiver) const {
  return *reinterpret_cast<Ring*>(group_.mailboxes(owner) + static_cast<size_t>(receiver) * pair_bytes_);
}

char* Messages::slot(int owner, int receiver, uint64_t number) const {
  return reinterpret_cast<char*>(&ring(owner, receiver)) + sizeof(Ring) + number % kSlots * slot_bytes_;
}

std::shared_ptr<Message> Messages::make_message(char* data, uint64_t count, DType dtype, int peer, int tag,
                                                bool sending) {
  if (peer == rank() || peer < (sending ? 0 : -1) || peer >= group_.size())
    throw std::invalid_argument(std::string(sending ? "send to" : "receive from") + " rank " + std::to_string(peer) +
                                " by rank " + std::to_string(rank()) + " of " + std::to_string(group_.size()));
  auto message = std::make_shared<Message>();
  message->data = data;
  message->count = count;
  message->bytes = count * dtype_bytes(dtype);
  message->dtype = dtype;
  message->peer = peer;
  message->tag = tag;
  message->sending = sending;
  message->posted_ns = now_ns();
  return message;
}

std::shared_ptr<Message> Messages::send(const void* data, uint64_t count, DType dtype, int peer, int tag) {
  auto message = make_message(static_cast<char*>(const_cast<void*>(data)), count, dtype, peer, tag, true);
  group_.check_process();
  const std::lock_guard<std::mutex> lock(mutex_);
  check_not_broken();
  sends_[static_cast<size_t>(peer)].push_back(message);
  push(peer);
  return message;
}

std::shared_ptr<Message> Messages::receive(void* data, uint64_t count, DType dtype, int peer, int tag) {
  auto message = make_message(static_cast<char*>(data), count, dtype, peer, tag, false);
  group_.check_process();
  const std::lock_guard<std::mutex> lock(mutex_);
  check_not_broken();
  for (auto it = unexpected_.begin(); it != unexpected_.end(); ++it) {
    if ((peer != -1 && it->peer != peer) || it->header.tag != tag) continue;
    if (accept(*message, it->peer, it->header)) {
      std::copy(it->data.begin(), it->data.end(), message->data);
      finish(*message);
    }
    unexpected_.erase(it);
    return message;
  }
  receives_.push_back(message);
  progress();
  return message;
}

void Messages::check_not_broken() const {
  if (broken_) throw CommError(CommError::Kind::broken, "the group is broken by an earlier error of a message");
}

void Messages::finish(Message& message) {
  message.done.store(true, std::memory_order_release);
  finished_.fetch_add(1);
  group_.ring(rank());  // another thread of this rank may wait for it
}

void Messages::fail(Message& message, CommError::Kind kind, const std::string& why) {
  message.failed = true;
  message.kind = kind;
  message.error = why;
  finish(message);
}

// --- progress

bool Messages::progress() {
  bool moved = false;
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == rank()) continue;
    moved = push(peer) || moved;
    moved = pull(peer) || moved;
  }
  return moved;
}

bool Messages::push(int peer) {
  auto& queue = sends_[static_cast<size_t>(peer)];
  if (queue.empty()) return false;
  Ring& to = ring(rank(), peer);
  uint64_t filled = to.filled.load(std::memory_order_relaxed);
  bool moved = false;
  while (!queue.empty() && filled - to.emptied.load() < kSlots) {
    Message& message = *queue.front();
    char* at = slot(rank(), peer, filled);
    size_t room = slot_bytes_;
    if (!message.begun) {
      const Header header{message.count, message.bytes, static_cast<int32_t>(message.dtype), message.tag};
      std::memcpy(at, &header, sizeof header);
      at += kHeaderBytes;
      room -= kHeaderBytes;
    }
    const uint64_t n = std::min<uint64_t>(room, message.bytes - message.moved);
    if (n != 0) std::memcpy(at, message.data + message.moved, n);
    message.moved += n;
    message.begun = true;
    to.filled.exchange(++filled);
    moved = true;
    if (message.moved == message.bytes) {
      finish(message);
      queue.pop_front();
    }
  }
  if (moved) group_.ring(peer);
  return moved;
}

std::shared_ptr<Message> Messages::match_receive(int peer, int tag) {
  for (auto it = receives_.begin(); it != receives_.end(); ++it) {
    if (((*it)->peer != -1 && (*it)->peer != peer) || (*it)->tag != tag) continue;
    auto message = *it;
    receives_.erase(it);
    return message;
  }
  return nullptr;
}

bool Messages::accept(Message& message, int peer, const Header& header) {
  message.peer = peer;
  if (header.count == message.count && header.dtype == static_cast<int32_t>(message.dtype)) return true;
  fail(message, CommError::Kind::broken,
       "ranks disagree: rank " + std::to_string(peer) + " sent " + std::to_string(header.count) + " " +
           dtype_name(static_cast<DType>(header.dtype)) + ", rank " + std::to_string(rank()) + " expects " +
           std::to_string(message.count) + " " + dtype_name(message.dtype));
  return false;
}

bool Messages::pull(int peer) {
  const bool moved = pull_all(peer);
  if (moved) group_.ring(peer);  // it may wait for room
  return moved;
}

bool Messages::pull_all(int peer) {
  Ring& from = ring(peer, rank());
  uint64_t emptied = from.emptied.load(std::memory_order_relaxed);
  Incoming& in = incoming_[static_cast<size_t>(peer)];
  bool moved = false;
  while (from.filled.load() > emptied) {
    const char* at = slot(peer, rank(), emptied);
    size_t room = slot_bytes_;
    if (!in.active) {
      const bool anybody = std::any_of(receives_.begin(), receives_.end(),
                                       [peer](const auto& m) { return m->peer == -1 || m->peer == peer; });
      if (!anybody) return moved;
      std::memcpy(&in.header, at, sizeof in.header);
      in.active = true;
      in.moved = 0;
      in.into = match_receive(peer, in.header.tag);
      in.unexpected = in.into == nullptr;
      if (in.into && !accept(*in.into, peer, in.header)) in.into = nullptr;
      if (in.unexpected) in.data.resize(in.header.bytes);
      at += kHeaderBytes;
      room -= kHeaderBytes;
    }
    const uint64_t n = std::min<uint64_t>(room, in.header.bytes - in.moved);
    char* target = in.into ? in.into->data : in.unexpected ? in.data.data() : nullptr;
    if (n != 0 && target != nullptr) std::memcpy(target + in.moved, at, n);
    in.moved += n;
    from.emptied.exchange(++emptied);
    moved = true;
    if (in.moved == in.header.bytes) complete(peer, in);
  }
  return moved;
}

void Messages::complete(int peer, Incoming& in) {
  in.active = false;
  if (in.into) {
    finish(*in.into);
    in.into = nullptr;
    return;
  }
  if (!in.unexpected) return;
  // A matching receive may have been posted meanwhile.
  if (auto message = match_receive(peer, in.header.tag)) {
    if (accept(*message, peer, in.header)) {
      std::copy(in.data.begin(), in.data.end(), message->data);
      finish(*message);
    }
  } else {
    unexpected_.push_back({peer, in.header, std::move(in.data)});
  }
  in.data = {};
}

// --- waiting

std::string Messages::describe(const Message& message) const {
  const std::string what = std::to_string(message.count) + " " + dtype_name(message.dtype);
  const std::string who = message.peer == -1 ? "any rank" : "rank " + std::to_string(message.peer);
  return (message.sending ? "send of " + what + " to " : "receive of " + what + " from ") + who;
}

void Messages::check_peers() {
  std::vector<std::shared_ptr<Message>> all(receives_.begin(), receives_.end());
  for (const auto& queue : sends_) all.insert(all.end(), queue.begin(), queue.end());
  for (const Incoming& in : incoming_)
    if (in.active && in.into) all.push_back(in.into);
  const int64_t now = now_ns();
  bool failed = false;
  for (const auto& message : all) {
    try {
      // A receive from any rank is not checked, since every rank that is still there may send the message.
      for (int peer = 0; peer < group_.size(); ++peer)
        if (peer != rank() && message->peer == peer) group_.check_peer(peer, describe(*message));
      const double waited = static_cast<double>(now - message->posted_ns) * 1e-9;
      if (waited > group_.timeout()) {
        throw CommError(CommError::Kind::timeout, (message->peer == -1 ? "no rank" : group_.peer_name(message->peer)) +
                                                      " did not come within the timeout of " +
                                                      seconds_text(group_.timeout()) + " for " + describe(*message));
      }
    } catch (const CommError& error) {
      if (progress()) return;  // a peer's messages from before it ended are still received
      if (message->done.load(std::memory_order_acquire)) continue;
      fail(*message, error.kind, error.what());
      failed = true;
    }
  }
  if (!failed) return;
  // The rest of an interrupted message would be read as the header of the next one, so the group is broken.
  broken_ = true;
  group_.give_up();
  const auto is_done = [](const auto& message) { return message->done.load(std::memory_order_acquire); };
  receives_.remove_if(is_done);
  for (auto& queue : sends_) std::erase_if(queue, is_done);
  for (Incoming& in : incoming_)
    if (in.into && is_done(in.into)) in.into = nullptr;
}

template <class Ready>
void Messages::progress_until(Ready ready) {
  int64_t start = 0, peers_checked = 0, interrupt_checked = 0;
  for (int spins = 0; !ready(); ++spins) {
    bool moved;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      moved = progress();
    }
    if (moved) {
      spins = 0;
      start = 0;
      continue;
    }
    if (spins < kSpins) continue;
    const int64_t now = now_ns();
    if (start == 0) start = peers_checked = interrupt_checked = now;
    if (now - start < kYieldNs && !core_is_shared(now)) {
      sched_yield();
    } else {
      group_.sleep_unless(
          [&] {
            const std::lock_guard<std::mutex> lock(mutex_);
            return progress() || ready();
          },
          kSleepNs);
    }
    if (now - peers_checked > kPeerCheckNs) {
      peers_checked = now;
      const std::lock_guard<std::mutex> lock(mutex_);
      check_peers();
    }
    if (group_.interrupt_check() && now - interrupt_checked > kInterruptCheckNs) {
      interrupt_checked = now;
      group_.interrupt_check()();
    }
  }
}

void Messages::wait(Message& message) {
  group_.check_process();
  progress_until([&] { return message.done.load(std::memory_order_acquire); });
  if (message.failed) throw CommError(message.kind, message.error);
}

void Messages::pump(double seconds) {
  const uint64_t before = finished_.load(std::memory_order_acquire);
  const int64_t end = now_ns() + static_cast<int64_t>(seconds * 1e9);
  progress_until([&] { return finished_.load(std::memory_order_acquire) != before || now_ns() >= end; });
}

}  // namespace anyaccel::comm
