// SPDX-License-Identifier: Apache-2.0
// Messages between two ranks of a group, apart from its collectives.
//
// For each pair of ranks and direction the sender's segment has a mailbox: a ring of slots that the sender fills and
// the receiver empties, each counting its own. A message is a header and bytes, over as many slots as it takes. A send
// is done when its last bytes are in the ring. What arrives with another tag than those that are waited for is set
// aside; what nobody waits for stays in the ring.
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
  int peer = -1;  // a receive from any rank: -1 until it is known
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
  // Room for all mailboxes of a rank when one pair may use `pair_bytes`.
  static size_t bytes_a_rank(int size, size_t pair_bytes);

  // The group must be connected, have mailboxes, and live longer.
  explicit Messages(ShmGroup& group);

  // The memory must stay until the message is done. `peer` -1: receive from any rank. Throws std::invalid_argument.
  std::shared_ptr<Message> send(const void* data, uint64_t count, DType dtype, int peer, int tag);
  std::shared_ptr<Message> receive(void* data, uint64_t count, DType dtype, int peer, int tag);

  // Waits for it; every message that is under way moves on meanwhile. Throws CommError when it failed.
  void wait(Message& message);
  // Moves all on until one more is done, or for so long.
  void pump(double seconds);

 private:
  struct Header {
    uint64_t count, bytes;
    int32_t dtype, tag;
  };
  struct alignas(64) Ring {
    alignas(64) std::atomic<uint64_t> filled;   // slots, by the sender
    alignas(64) std::atomic<uint64_t> emptied;  // by the receiver
  };
  // A message that is being received.
  struct Incoming {
    bool active = false;
    Header header{};
    uint64_t moved = 0;
    std::shared_ptr<Message> into;  // null: set aside in `aside`, or thrown away
    bool kept = false;
    std::vector<char> aside;
  };
  struct Aside {
    int peer;
    Header header;
    std::vector<char> data;
  };

  Ring& ring(int owner, int receiver) const;
  char* slot(int owner, int receiver, uint64_t number) const;
  int rank() const { return group_.rank(); }
  bool step();
  bool push(int peer);
  bool pull(int peer);
  void arrived(int peer, Incoming& incoming);
  std::shared_ptr<Message> take_waiting(int peer, int tag);
  bool accept(Message& message, int peer, const Header& header);
  void check() const;
  void finish(Message& message);
  void fail(Message& message, CommError::Kind kind, const std::string& why);
  void look_around();
  std::string describe(const Message& message) const;
  std::shared_ptr<Message> make(char* data, uint64_t count, DType dtype, int peer, int tag, bool sending);
  template <class Ready>
  void move_until(Ready ready);

  ShmGroup& group_;
  const size_t pair_bytes_;
  const size_t slot_bytes_;
  std::mutex mutex_;
  std::vector<std::deque<std::shared_ptr<Message>>> sends_;  // by peer
  std::list<std::shared_ptr<Message>> receives_;
  std::vector<Incoming> incoming_;
  std::list<Aside> aside_;
  std::atomic<uint64_t> finished_{0};
  bool broken_ = false;
};

}  // namespace anyaccel::comm
