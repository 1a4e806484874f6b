// SPDX-License-Identifier: Apache-2.0
// The inside of a KvCache: what lies where in a page, and who owns the pages.
#pragma once

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

struct CacheSequence {
  int64_t length = 0;
  std::vector<CachePage*> pages;  // ceil(length / kPageTokens)
  std::vector<uint8_t*> data;     // of the pages: what kernels read
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
  std::vector<std::unique_ptr<CacheChunk>> chunks;
  std::unordered_map<int, CacheSequence> sequences;
  int next_sequence = 0;

  ~Impl();
  const CacheSequence& at(int sequence) const { return sequences.at(sequence); }
  size_t limit_pages() const { return limit_bytes / page_bytes; }
  // New pages that a sequence needs for more tokens; `copy`: whether its last page must be copied first.
  size_t wanted_pages(const CacheSequence& sequence, int64_t tokens, bool& copy) const;
  // Throws OutOfCache.
  void allocate(size_t count, std::vector<CachePage*>& pages);
  void add_chunk(size_t least_pages);
  void release(CachePage* page);
  void shrink();
};

HeadLayout head_layout(const AttentionShape& shape, CacheFormat format);

}  // namespace anyaccel::llm
