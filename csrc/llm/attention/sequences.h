// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace anyaccel::llm {

// The memory of sequences of tokens, as whoever schedules them sees it: KvCache has keys and values of them.
class Sequences {
 public:
  virtual ~Sequences() = default;

  // A sequence without tokens.
  virtual int create() = 0;
  virtual void destroy(int sequence) = 0;
  // A sequence that has a recurrent state has one for its end, and where it was kept: fork() and truncate() go to these
  // places and to the beginning only. The last one of them up to `tokens`; without such states, `tokens`.
  virtual int64_t reachable(int /*sequence*/, int64_t tokens) const { return tokens; }
  // Keeps the state as it is now, behind the sequence's last token: of those that are kept the second one is given up
  // for it. Not where memory is scarce, unless `anyway`.
  virtual void keep(int /*sequence*/, bool /*anyway*/) {}

  // Keeps the state beside those as it is now, for tokens that may be wrong, until the next call; `take` false: gives
  // up what was kept so.
  virtual void checkpoint(int /*sequence*/, bool /*take*/) {}
  // Whether there is room for it in so many sequences.
  virtual bool can_checkpoint(int64_t /*sequences*/) const { return true; }

  // A new sequence with the first `tokens` tokens of another, whose memory is shared as far as that goes.
  virtual int fork(int sequence, int64_t tokens) = 0;
  // Forgets all tokens from `tokens` on.
  virtual void truncate(int sequence, int64_t tokens) = 0;
  virtual bool exists(int sequence) const = 0;
  virtual int64_t length(int sequence) const = 0;
  // Makes room for `tokens` more tokens and adds them to the length, for every sequence of a run before it begins.
  // Throws OutOfCache, also when the system has no memory, and changes nothing.
  virtual void extend(int sequence, int64_t tokens) = 0;

  // The memory of whole pages, from the first token of each on; none where there is no such memory.
  virtual std::vector<uint8_t*> pages(int /*sequence*/, int64_t /*first*/, int64_t /*count*/) const { return {}; }

  virtual size_t token_bytes() const = 0;           // that a token takes
  virtual size_t state_bytes() const { return 0; }  // and a sequence's recurrent state
  virtual size_t used_bytes() const = 0;            // that sequences have
  virtual size_t reserved_bytes() const = 0;        // taken from the system
  virtual size_t limit_bytes() const = 0;
};

}  // namespace anyaccel::llm
