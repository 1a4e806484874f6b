// SPDX-License-Identifier: Apache-2.0
// What the ranks of a tensor-parallel decoder exchange: each writes its part into shared memory of its own, and after
// one synchronisation all read all parts. Two places ("slots") are used in turn, so that one synchronisation an
// exchange is enough: who writes a slot again has passed the synchronisation that everybody posted after reading it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/shm_group.h"
#include "comm/shm_segment.h"

namespace anyaccel::llm {

class ParallelRanks {
 public:
  // What a rank says about itself when they meet: `model` must be equal on all, then its share of the vocabulary.
  struct Header {
    uint64_t model;  // a hash of the sizes
    int64_t vocab_first, vocab_count;
  };

  // `slot_floats`: room for one exchange of a rank.
  ParallelRanks(int rank, int size, size_t slot_floats, double timeout_s, const Header& header,
                comm::ShmSegment::Kind kind = comm::ShmSegment::Kind::posix);

  const std::string& name() const { return name_; }
  // Throws UsageError when the ranks do not fit together; std::system_error.
  void connect(const std::vector<std::string>& names, const std::vector<int>& pids);
  void unlink() noexcept;
  bool connected() const { return connected_; }
  void set_interrupt_check(std::function<void()> check) { group_.set_interrupt_check(std::move(check)); }

  int rank() const { return rank_; }
  int size() const { return size_; }
  const Header& header(int rank) const;
  size_t slot_floats() const { return slot_floats_; }
  float* slot(int rank, unsigned turn) const;

  // Called by one thread; throws comm::CommError, and then the ranks stay broken.
  void synchronise() { group_.barrier(); }

 private:
  const int rank_, size_;
  const size_t slot_floats_;
  comm::ShmGroup group_;
  comm::ShmSegment own_;
  std::vector<comm::ShmSegment> peers_;
  std::vector<uint8_t*> bases_;
  std::string name_;
  bool connected_ = false;
};

}  // namespace anyaccel::llm
