// SPDX-License-Identifier: Apache-2.0
// The inside of a KvCache: what lies where in a page, and who owns the pages.
#pragma once

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <vector>

#include "llm/attention/attention.h"
#include "llm/attention/kernels_attention.h"

namespace anyaccel::llm {

// A piece of memory from the system that pages are cut from.
struct CacheChunk;

struct CachePage {
  uint8_t* data = nullptr;
  int references = 0;
  CacheChunk* chunk = nullptr;
};

struct CacheChunk {
  uint8_t* memory = nullptr;
  size_t bytes = 0;
  std::vector<CachePage> pages;
  std::vector<CachePage*> free;
};

// A recurrent state, which sequences share until one of them changes it.
struct CacheState {
  float* data = nullptr;
  size_t* used = nullptr;  // how many there are
  size_t bytes = 0;

  CacheState(size_t count, size_t& all);  // zeros; throws std::bad_alloc
  ~CacheState();
  CacheState(const CacheState&) = delete;
  CacheState& operator=(const CacheState&) = delete;
};

struct KeptState {
  int64_t tokens = 0;
  std::shared_ptr<CacheState> state;
};

struct CacheSequence {
  int64_t length = 0;
  std::vector<CachePage*> pages;      // ceil(length / kPageTokens)
  std::vector<uint8_t*> data;         // of the pages: what kernels read
  std::shared_ptr<CacheState> state;  // behind the last token; null: there has been none
  std::vector<KeptState> kept;        // by tokens, all before the end or at it
  KeptState checkpoint;               // before tokens that may be wrong; without a state: none
};

struct KvCache::Impl {
  std::vector<AttentionShape> shapes;
  std::vector<HeadLayout> layouts;  // of each layer
  std::vector<size_t> offsets;      // of each layer in a page
  CacheFormat format = CacheFormat::f32;
  size_t page_bytes = 0;
  size_t limit_bytes = 0;
  size_t used_pages = 0;
  size_t reserved_pages = 0;
  size_t reserved_bytes = 0;
  size_t state_bytes = 0, state_pages = 0;  // of one state
  size_t used_states = 0;
  std::vector<std::unique_ptr<CacheChunk>> chunks;
  std::unordered_map<int, CacheSequence> sequences;
  int next_sequence = 0;

  ~Impl();
  const CacheSequence& at(int sequence) const { return sequences.at(sequence); }
  size_t limit_pages() const { return limit_bytes / page_bytes; }
  size_t used() const { return used_pages + used_states * state_pages; }
  size_t left() const { return limit_pages() - std::min(limit_pages(), used()); }
  // Whether a sequence that goes on needs memory for a state of its own; one that only it has kept can be given up.
  bool wants_state(const CacheSequence& sequence, int64_t tokens) const {
    if (state_pages == 0 || tokens == 0) return false;
    const auto own = std::count_if(sequence.kept.begin(), sequence.kept.end(),
                                   [&](const KeptState& kept) { return kept.state == sequence.state; });
    return sequence.state == nullptr || sequence.state.use_count() > 1 + own;  // a checkpoint is not given up
  }
  // New pages that a sequence needs for more tokens; `copy`: whether its last page must be copied first.
  size_t wanted_pages(const CacheSequence& sequence, int64_t tokens, bool& copy) const;
  // Throws OutOfCache.
  void allocate(size_t count, std::vector<CachePage*>& pages);
  // Gives a sequence a state of its own: zeros, or a copy of the one that it shares. Throws OutOfCache.
  void own_state(CacheSequence& sequence);
  void add_chunk(size_t least_pages);
  void release(CachePage* page);
  void shrink();
};

HeadLayout head_layout(const AttentionShape& shape, CacheFormat format);

}  // namespace anyaccel::llm
