// SPDX-License-Identifier: Apache-2.0
// Experts that stay in the file of packed weights, where memory has no room for all of them: the ones in use are in
// slots of memory, which are read by csrc/aio. Those that are used often and lately keep their slots.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/descriptor.h"
#include "llm/pack/matrix.h"

namespace anyaccel::aio {
class Handle;
}

namespace anyaccel::llm {

// Begins and sizes of experts, in the file and in memory: what direct reads need, whatever the system's page is.
constexpr size_t kExpertAlign = size_t{4} << 10;

// The matrices of an expert, which lie one after another.
struct ExpertPlace {
  struct Part {
    Matrix* matrix;
    size_t offset;  // behind the expert's begin
  };
  size_t offset = 0, bytes = 0;  // in the weights; multiples of kExpertAlign
  Part parts[3];
  int count = 0;
};

class ExpertCache {
 public:
  struct Stats {
    int64_t used = 0;           // experts that steps have asked for, each once a layer and run
    int64_t missed = 0;         // of them, those that were read then
    int64_t ahead = 0;          // experts that were read ahead
    int64_t ahead_used = 0;     // of them, those that were asked for next
    int64_t bytes = 0;          // that were read
    int64_t slot_bytes = 0;     // of the largest expert
    double waited_seconds = 0;  // by the first thread of a run, for reads
  };

  // `places`: of all layers' experts, those of layer i from first[i] on; its last entry is their number. `slots`: at
  // least the experts of any layer. The matrices' memory is that of the first slot until they are read. Throws
  // std::bad_alloc.
  ExpertCache(std::vector<ExpertPlace> places, std::vector<size_t> first, size_t slots);
  ~ExpertCache();
  ExpertCache(const ExpertCache&) = delete;
  ExpertCache& operator=(const ExpertCache&) = delete;

  static size_t slot_bytes(const std::vector<ExpertPlace>& places);
  size_t bytes() const { return slots_.size() * slot_bytes_; }
  Stats stats() const;

  // --- packing: one expert after the other is made in the first slot
  const std::shared_ptr<void>& memory() const { return memory_; }
  uint8_t* first_slot() const { return slot(0); }
  // The next one finds zeros there.
  void clear_packed(size_t expert);

  // --- steps
  // Where experts are read from: a file that nobody changes, with the checksum of each. Throws std::system_error.
  void open(int fd, int64_t offset, std::vector<uint64_t> checksums);
  bool is_open() const { return file_.get() >= 0; }

  // By one thread: the experts of a layer whose rows begin[e] to begin[e + 1] are not empty are given memory, and are
  // being read where they were not there. They stay until the next call. Other threads see it behind a barrier.
  void need(size_t layer, const int32_t* begin) noexcept;
  // By the same thread, behind need() of a layer before: chosen[tokens][top_k] will probably be needed, of a token's
  // the first ones most. They are read while there is room, those in places that were mostly right.
  void read_ahead(size_t layer, const int32_t* chosen, int64_t tokens, int top_k) noexcept;
  // By any thread: whether an expert that is needed has been read, and waiting until it is. After an error its memory
  // has anything, and failure() says what has happened.
  bool is_ready(size_t layer, size_t expert) const noexcept;
  void wait(size_t layer, size_t expert, bool counts) noexcept;
  // What went wrong since the last call; null: nothing.
  std::exception_ptr take_failure() noexcept;

 private:
  enum class State : int { empty, reading, ready, failed };
  struct Slot {
    std::atomic<State> state{State::empty};
    int64_t expert = -1;
    int64_t request = 0;
    uint64_t pinned = 0;  // the call of need() that it must outlive
    bool ahead = false;   // it was read ahead, and has not been asked for
    bool cancelled = false;
  };

  uint8_t* slot(size_t index) const { return static_cast<uint8_t*>(memory_.get()) + index * slot_bytes_; }
  void touch(size_t expert) noexcept;
  // A slot for another expert; -1: all are being read or pinned.
  int64_t free_slot() noexcept;
  bool fetch(size_t expert, size_t slot) noexcept;
  bool finish(Slot& slot, std::chrono::milliseconds timeout) noexcept;
  void fail(const std::string& what) noexcept;

  std::vector<ExpertPlace> places_;
  std::vector<size_t> first_;
  size_t slot_bytes_;
  std::shared_ptr<void> memory_;
  std::vector<Slot> slots_;
  std::vector<int32_t> slot_of_;  // of each expert; -1: none
  std::vector<double> heat_;      // of each expert: the logarithm of its uses, the later the more
  uint64_t calls_ = 0;            // of need()

  Descriptor file_;
  int64_t offset_ = 0;
  std::vector<uint64_t> checksums_;
  std::vector<bool> checked_;
  int64_t next_request_ = 1;

  size_t ahead_layer_ = 0;
  std::vector<int32_t> ahead_;  // what the last call of read_ahead() has said of it
  int ahead_top_k_ = 1;
  std::vector<double> ahead_right_;  // of each place in a token's list, the share of them that was right lately
  Stats stats_;
  std::atomic<double> waited_{0};

  std::mutex finish_mutex_;
  mutable std::mutex failure_mutex_;
  std::exception_ptr failure_;
  std::unique_ptr<aio::Handle> handle_;  // the last: reads end before their memory
};

}  // namespace anyaccel::llm
