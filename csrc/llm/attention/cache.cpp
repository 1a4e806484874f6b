// SPDX-License-Identifier: Apache-2.0
#include "llm/attention/cache.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "common/huge_pages.h"

namespace anyaccel::llm {
namespace {

constexpr size_t kLeastChunk = size_t{8} << 20, kMostChunk = size_t{256} << 20;
constexpr size_t kLeastPage = 1024;               // of a model without attention, whose tokens take nothing
constexpr size_t kMostUnused = size_t{64} << 20;  // kept for the next sequence

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

std::string megabytes(size_t bytes) { return std::to_string((bytes + (size_t{1} << 20) - 1) >> 20) + " MiB"; }

int64_t pages_of(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

}  // namespace

OutOfCache::OutOfCache(size_t needed_bytes, size_t free_bytes, size_t limit_bytes)
    : std::runtime_error("the key/value cache needs " + megabytes(needed_bytes) + " more and has " +
                         std::to_string(free_bytes >> 20) + " MiB left of its limit of " + megabytes(limit_bytes)),
      needed(needed_bytes),
      free(free_bytes),
      limit(limit_bytes) {}

HeadLayout head_layout(const AttentionShape& shape, CacheFormat format) {
  const auto bytes_of = [format](size_t values) {
    switch (format) {
      case CacheFormat::f32:
        return values * 4;
      case CacheFormat::bf16:
        return values * 2;
      case CacheFormat::i8:
        return values;
      case CacheFormat::i4:
        return values / 2;
    }
    return size_t{0};
  };
  HeadLayout layout{};
  layout.format = format;
  layout.head_dim = shape.head_dim;
  layout.value_dim = shape.value_dim;
  const int multiple = format == CacheFormat::i4 ? 8 : 4;
  layout.padded_head_dim = (shape.head_dim + multiple - 1) / multiple * multiple;
  layout.padded_value_dim = (shape.value_dim + 15) / 16 * 16;
  layout.key_block_bytes = bytes_of(static_cast<size_t>(layout.padded_head_dim) * 16);
  layout.value_block_bytes = bytes_of(size_t{kPageTokens} * 16);
  layout.values = layout.key_block_bytes * (kPageTokens / 16);
  layout.scales = layout.values + layout.value_block_bytes * static_cast<size_t>(layout.padded_value_dim / 16);
  size_t scales = 0;
  if (format == CacheFormat::i8) scales = 2 * kPageTokens * sizeof(float);
  if (format == CacheFormat::i4)
    scales = static_cast<size_t>(layout.key_groups() + layout.value_groups()) * kGroupScaleBytes;
  layout.bytes = layout.scales + scales;
  return layout;
}

CacheState::CacheState(size_t count, size_t& all) : used(&all), bytes(std::max<size_t>(count, 64)) {
  // Small ones are no whole huge page.
  if (bytes >= kHugePage)
    data = reinterpret_cast<float*>(map_huge_pages(round_up(bytes, kHugePage), MAP_NORESERVE));
  else if ((data = static_cast<float*>(std::aligned_alloc(64, round_up(bytes, 64)))) != nullptr)
    std::memset(data, 0, bytes);
  if (data == nullptr) throw std::bad_alloc();
  ++*used;
}

CacheState::~CacheState() {
  if (bytes >= kHugePage)
    munmap(data, round_up(bytes, kHugePage));
  else
    std::free(data);
  --*used;
}

KvCache::Impl::~Impl() {
  sequences.clear();
  for (const auto& chunk : chunks) munmap(chunk->memory, chunk->bytes);
}

size_t KvCache::Impl::wanted_pages(const CacheSequence& sequence, int64_t tokens, bool& copy) const {
  copy = tokens > 0 && sequence.length % kPageTokens != 0 && sequence.pages.back()->references > 1;
  return static_cast<size_t>(pages_of(sequence.length + tokens)) - sequence.pages.size() + (copy ? 1 : 0);
}

void KvCache::Impl::own_state(CacheSequence& sequence) {
  const size_t wanted = state_pages * page_bytes;
  if (left() < state_pages) {  // rather one that goes on than one that is kept
    std::erase_if(sequence.kept, [&](const KeptState& kept) { return kept.state == sequence.state; });
    if (sequence.state.use_count() == 1) return;
  }
  if (left() < state_pages) throw OutOfCache(wanted, left() * page_bytes, limit_bytes);
  try {
    auto own = std::make_shared<CacheState>(state_bytes, used_states);
    if (sequence.state != nullptr && state_bytes > 0) std::memcpy(own->data, sequence.state->data, state_bytes);
    sequence.state = std::move(own);
  } catch (const std::bad_alloc&) {
    throw OutOfCache(wanted, left() * page_bytes, limit_bytes);
  }
}

void KvCache::Impl::add_chunk(size_t least_pages) {
  // Chunks grow with the cache: a large one has few of them, a small one little memory that it does not use.
  const size_t target = std::clamp(reserved_bytes / 4, kLeastChunk, kMostChunk);
  const size_t taken = reserved_pages + used_states * state_pages;
  const size_t most = std::max(least_pages, limit_pages() - std::min(limit_pages(), taken));
  const size_t count = std::min(most, std::max({least_pages, target / page_bytes, size_t{1}}));
  auto chunk = std::make_unique<CacheChunk>();
  chunk->pages.resize(count);
  chunk->free.reserve(count);
  chunks.reserve(chunks.size() + 1);
  chunk->bytes = round_up(count * page_bytes, kHugePage);
  chunk->memory = map_huge_pages(chunk->bytes, MAP_NORESERVE);
  if (chunk->memory == nullptr)
    throw OutOfCache(least_pages * page_bytes, (reserved_pages - used_pages) * page_bytes, limit_bytes);
  for (size_t i = count; i-- > 0;) {
    chunk->pages[i] = {chunk->memory + i * page_bytes, 0, chunk.get()};
    chunk->free.push_back(&chunk->pages[i]);
  }
  reserved_pages += count;
  reserved_bytes += chunk->bytes;
  chunks.push_back(std::move(chunk));
}

void KvCache::Impl::allocate(size_t count, std::vector<CachePage*>& pages) {
  if (count > left()) throw OutOfCache(count * page_bytes, left() * page_bytes, limit_bytes);
  pages.reserve(count);
  if (reserved_pages - used_pages < count) add_chunk(count - (reserved_pages - used_pages));
  // The oldest chunks first, so that the others may become empty.
  for (const auto& chunk : chunks) {
    while (pages.size() < count && !chunk->free.empty()) {
      pages.push_back(chunk->free.back());
      chunk->free.pop_back();
      pages.back()->references = 1;
    }
  }
  used_pages += count;
}

void KvCache::Impl::release(CachePage* page) {
  if (--page->references > 0) return;
  page->chunk->free.push_back(page);
  --used_pages;
}

// Gives empty chunks back while more than kMostUnused bytes and more than a quarter of the memory are unused.
void KvCache::Impl::shrink() {
  for (size_t i = chunks.size(); i-- > 0;) {
    CacheChunk& chunk = *chunks[i];
    const size_t unused = (reserved_pages - used_pages) * page_bytes;
    if (unused <= std::max(reserved_bytes / 4, kMostUnused)) return;
    if (chunk.free.size() != chunk.pages.size()) continue;
    munmap(chunk.memory, chunk.bytes);
    reserved_pages -= chunk.pages.size();
    reserved_bytes -= chunk.bytes;
    chunks.erase(chunks.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

namespace {

// Null: that of no tokens.
std::shared_ptr<CacheState> kept_at(const CacheSequence& sequence, int64_t tokens) {
  for (const KeptState& kept : sequence.kept)
    if (kept.tokens == tokens) return kept.state;
  return sequence.checkpoint.tokens == tokens ? sequence.checkpoint.state : nullptr;
}

// The state of a sequence of `length` tokens becomes that of its first ones, of which there is one.
void go_back(CacheSequence& sequence, int64_t length, int64_t tokens) {
  if (tokens == length) return;
  while (!sequence.kept.empty() && sequence.kept.back().tokens > tokens) sequence.kept.pop_back();
  sequence.state = kept_at(sequence, tokens);
  if (sequence.checkpoint.tokens > tokens) sequence.checkpoint = {};
}

}  // namespace

KvCache::KvCache(std::vector<AttentionShape> layers, CacheFormat format, size_t limit_bytes, int64_t state_floats)
    : impl_(std::make_unique<Impl>()) {
  size_t bytes = 0;
  for (const AttentionShape& shape : layers) {
    if (shape.kv_heads < 1 || shape.heads < shape.kv_heads || shape.heads % shape.kv_heads != 0 || shape.head_dim < 1 ||
        shape.value_dim < 0 || shape.head_dim > 4096 || shape.value_dim > 4096 || shape.heads > 65536)
      throw std::invalid_argument("impossible attention shape: " + std::to_string(shape.heads) + " heads, " +
                                  std::to_string(shape.kv_heads) + " key/value heads, of " +
                                  std::to_string(shape.head_dim) + " and " + std::to_string(shape.value_dim));
    // An indexer's keys choose tokens: with four bits they are as DeepSeek has them, of eight.
    const bool keys_only = shape.value_dim == 0 && format == CacheFormat::i4;
    impl_->layouts.push_back(head_layout(shape, keys_only ? CacheFormat::i8 : format));
    if (shape.same_as >= 0) {
      const auto of = static_cast<size_t>(shape.same_as);
      if (of >= impl_->offsets.size() || layers[of].same_as >= 0 || layers[of].kv_heads != shape.kv_heads ||
          layers[of].head_dim != shape.head_dim || layers[of].value_dim != shape.value_dim)
        throw std::invalid_argument("keys and values of layer " + std::to_string(of) + " are not those of a later one");
      impl_->offsets.push_back(impl_->offsets[of]);
      continue;
    }
    impl_->offsets.push_back(bytes);
    bytes += impl_->layouts.back().bytes * static_cast<size_t>(shape.kv_heads);
  }
  impl_->shapes = std::move(layers);
  impl_->format = format;
  impl_->page_bytes = round_up(bytes > 0 ? bytes : kLeastPage, 64);
  impl_->state_bytes = static_cast<size_t>(state_floats) * sizeof(float);
  impl_->state_pages = (impl_->state_bytes + impl_->page_bytes - 1) / impl_->page_bytes;
  impl_->limit_bytes = limit_bytes;
}

KvCache::~KvCache() = default;

size_t KvCache::page_bytes() const { return impl_->page_bytes; }
size_t KvCache::state_pages() const { return impl_->state_pages; }
void KvCache::set_state_pages(size_t pages) { impl_->state_pages = std::max(impl_->state_pages, pages); }
size_t KvCache::used_bytes() const { return impl_->used() * impl_->page_bytes; }
size_t KvCache::reserved_bytes() const {
  return impl_->reserved_bytes + impl_->used_states * impl_->state_pages * impl_->page_bytes;
}
size_t KvCache::limit_bytes() const { return impl_->limit_bytes; }
void KvCache::set_limit_pages(size_t pages) {
  if (pages < impl_->limit_pages()) impl_->limit_bytes = pages * impl_->page_bytes;
}
bool KvCache::exists(int sequence) const { return impl_->sequences.count(sequence) != 0; }
size_t KvCache::sequences() const { return impl_->sequences.size(); }
int64_t KvCache::length(int sequence) const { return impl_->at(sequence).length; }

int KvCache::create() {
  while (exists(impl_->next_sequence)) impl_->next_sequence = (impl_->next_sequence + 1) & 0x7fffffff;
  const int sequence = impl_->next_sequence;
  impl_->sequences.emplace(sequence, CacheSequence{});
  impl_->next_sequence = (sequence + 1) & 0x7fffffff;
  return sequence;
}

void KvCache::destroy(int sequence) {
  truncate(sequence, 0);
  impl_->sequences.erase(sequence);
}

int KvCache::fork(int sequence, int64_t tokens) {
  if (tokens < 0 || tokens > length(sequence)) throw std::invalid_argument("fork beyond the sequence's end");
  if (reachable(sequence, tokens) != tokens) throw std::invalid_argument("fork where no state was kept");
  const int copy = create();
  const CacheSequence& from = impl_->sequences.at(sequence);
  CacheSequence& to = impl_->sequences.at(copy);
  try {
    to.pages.assign(from.pages.begin(), from.pages.begin() + pages_of(tokens));
    to.data.assign(from.data.begin(), from.data.begin() + pages_of(tokens));
    to.state = tokens == from.length ? from.state : kept_at(from, tokens);
  } catch (...) {
    impl_->sequences.erase(copy);
    throw;
  }
  to.length = tokens;
  for (CachePage* page : to.pages) ++page->references;
  return copy;
}

void KvCache::truncate(int sequence, int64_t tokens) {
  CacheSequence& state = impl_->sequences.at(sequence);
  if (tokens < 0 || tokens > state.length) throw std::invalid_argument("truncate beyond the sequence's end");
  if (reachable(sequence, tokens) != tokens) throw std::invalid_argument("truncate where no state was kept");
  go_back(state, state.length, tokens);
  const size_t kept = static_cast<size_t>(pages_of(tokens));
  const bool fewer = kept < state.pages.size();
  while (state.pages.size() > kept) {
    impl_->release(state.pages.back());
    state.pages.pop_back();
    state.data.pop_back();
  }
  state.length = tokens;
  if (fewer) impl_->shrink();
}

int64_t KvCache::reachable(int sequence, int64_t tokens) const {
  const CacheSequence& state = impl_->at(sequence);
  if (impl_->state_pages == 0 || tokens == state.length) return tokens;
  int64_t last = 0;
  for (const KeptState& kept : state.kept)
    if (kept.tokens <= tokens) last = kept.tokens;
  if (state.checkpoint.state != nullptr && state.checkpoint.tokens <= tokens)
    last = std::max(last, state.checkpoint.tokens);
  return last;
}

void KvCache::checkpoint(int sequence, bool take) {
  CacheSequence& state = impl_->sequences.at(sequence);
  state.checkpoint = take ? KeptState{state.length, state.state} : KeptState{};
}

bool KvCache::can_checkpoint(int64_t sequences) const {
  return impl_->left() > static_cast<size_t>(sequences) * impl_->state_pages + impl_->limit_pages() / 8;
}

void KvCache::keep(int sequence, bool anyway) {
  CacheSequence& state = impl_->sequences.at(sequence);
  if (state.state == nullptr || (!state.kept.empty() && state.kept.back().tokens == state.length)) return;
  if (!anyway && impl_->left() <= 2 * impl_->state_pages + impl_->limit_pages() / 8) return;
  if (state.kept.size() == 2) state.kept.pop_back();
  state.kept.push_back({state.length, state.state});
}

std::vector<uint8_t*> KvCache::pages(int sequence, int64_t first, int64_t count) const {
  const auto& data = impl_->at(sequence).data;
  return {data.begin() + first, data.begin() + first + count};
}

CacheFormat KvCache::format() const { return impl_->format; }

float* KvCache::state(int sequence) const { return impl_->at(sequence).state->data; }

size_t KvCache::extend_bytes(int sequence, int64_t tokens) const {
  bool copy;
  const CacheSequence& state = impl_->at(sequence);
  const size_t states = impl_->wants_state(state, tokens) ? impl_->state_pages : 0;
  return (impl_->wanted_pages(state, tokens, copy) + states) * impl_->page_bytes;
}

void KvCache::extend(int sequence, int64_t tokens) {
  CacheSequence& state = impl_->sequences.at(sequence);
  if (tokens < 0) throw std::invalid_argument("a negative number of tokens");
  if (impl_->state_pages > 0 && tokens > 0 && state.state.use_count() != 1) impl_->own_state(state);
  bool copy;
  const size_t wanted = impl_->wanted_pages(state, tokens, copy);
  if (wanted > 0) {
    state.pages.reserve(state.pages.size() + wanted);
    state.data.reserve(state.pages.size() + wanted);
    std::vector<CachePage*> pages;
    impl_->allocate(wanted, pages);
    auto next = pages.begin();
    if (copy) {
      CachePage* const shared = state.pages.back();
      CachePage* const own = *next++;
      std::memcpy(own->data, shared->data, impl_->page_bytes);
      impl_->release(shared);
      state.pages.back() = own;
      state.data.back() = own->data;
    }
    for (; next != pages.end(); ++next) {
      state.pages.push_back(*next);
      state.data.push_back((*next)->data);
    }
  }
  state.length += tokens;
}

}  // namespace anyaccel::llm
