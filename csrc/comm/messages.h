// SPDX-License-Identifier: Apache-2.0
// Point-to-point messages between the ranks of a group, which are independent of its collectives.
//
// For each pair of ranks and direction the sender's segment has a mailbox: a ring of slots with a counter of those that
// the sender has filled and one of those that the receiver has emptied. A message is a header and its bytes, over as
// many slots as they take. A send is done when its last bytes are in the ring. While no receive from a rank is posted,
// its messages stay in the ring. A message whose tag matches no posted receive is moved to the unexpected ones.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/errors.h"
#include "comm/shm_group.h"

namespace anyaccel::comm {

// One send or receive.
struct Message {
  char* data = nullptr;
  uint64_t count = 0;
  uint64_t bytes = 0;
  DType dtype = DType::u8;
  int peer = -1;  // -1 in a receive from any rank, until a message matches it
  int tag = 0;
  bool sending = false;
  bool begun = false;
  uint64_t moved = 0;  // bytes
  int64_t posted_ns = 0;
  std::atomic<bool> done{false};
  // Valid once done.
  bool failed = false;
  CommError::Kind kind = CommError::Kind::broken;
  std::string error;
};

class Messages {
 public:
  // The bytes of all mailboxes of a rank when each pair may use `pair_bytes`.
  static size_t bytes_a_rank(int size, size_t pair_bytes);

  // The group must be connected, have mailboxes, and outlive this object.
  explicit Messages(ShmGroup& group);

  // The memory must stay until the message is done. With `peer` -1, receives from any rank. Throws
  // std::invalid_argument.
  std::shared_ptr<Message> send(const void* data, uint64_t count, DType dtype, int peer, int tag);
  std::shared_ptr<Message> receive(void* data, uint64_t count, DType dtype, int peer, int tag);

  // Waits for a message while all pending ones progress. Throws CommError when it failed.
  void wait(Message& message);
  // Progresses all messages until one more is done, or `seconds` have passed.
  void pump(double seconds);

 private:
  struct Header {
    uint64_t count, bytes;
    int32_t dtype, tag;
  };
  struct alignas(64) Ring {
    alignas(64) std::atomic<uint64_t> filled;   // slots, counted by the sender
    alignas(64) std::atomic<uint64_t> emptied;  // slots, counted by the receiver
  };
  // A message that is being received from one peer.
  struct Incoming {
    bool active = false;
    Header header{};
    uint64_t moved = 0;
    std::shared_ptr<Message> into;  // null when the message is unexpected, or discarded because its receive failed
    bool unexpected = false;
    std::vector<char> data;  // of an unexpected message
  };
  struct Unexpected {
    int peer;
    Header header;
    std::vector<char> data;
  };

  Ring& ring(int owner, int receiver) const;
  char* slot(int owner, int receiver, uint64_t number) const;
  int rank() const { return group_.rank(); }
  // Each of these returns whether anything was moved.
  bool progress();
  bool push(int peer);
  bool pull(int peer);
  bool pull_all(int peer);
  void complete(int peer, Incoming& incoming);
  // Removes and returns the first posted receive that matches; null when there is none.
  std::shared_ptr<Message> match_receive(int peer, int tag);
  // Whether the header fits the receive, which otherwise fails.
  bool accept(Message& message, int peer, const Header& header);
  void check_not_broken() const;
  void finish(Message& message);
  void fail(Message& message, CommError::Kind kind, const std::string& why);
  // Fails the messages whose peer is gone or whose time is up.
  void check_peers();
  std::string describe(const Message& message) const;
  std::shared_ptr<Message> make_message(char* data, uint64_t count, DType dtype, int peer, int tag, bool sending);
  template <class Ready>
  void progress_until(Ready ready);

  ShmGroup& group_;
  const size_t pair_bytes_;
  const size_t slot_bytes_;
  std::mutex mutex_;
  std::vector<std::deque<std::shared_ptr<Message>>> sends_;  // by peer
  std::list<std::shared_ptr<Message>> receives_;
  std::vector<Incoming> incoming_;
  std::list<Unexpected> unexpected_;
  std::atomic<uint64_t> finished_{0};
  bool broken_ = false;
};

}  // namespace anyaccel::comm
