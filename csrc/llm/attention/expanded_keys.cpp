// SPDX-License-Identifier: Apache-2.0
#include "llm/attention/expanded_keys.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "llm/attention/cache.h"
#include "llm/attention/rotate_groups.h"
#include "simd/convert.h"
#include "simd/pick.h"

namespace anyaccel::llm {
namespace {

constexpr int kRows = 60;  // of a task, as those of other long queries
static_assert(kRows <= kTaskRows);

HeadLayout layout_of_head(int head_dim, int value_dim, CacheFormat format) {
  return head_layout({1, 1, head_dim, value_dim}, format == CacheFormat::f32 ? CacheFormat::f32 : CacheFormat::bf16);
}

template <class T>
std::shared_ptr<T> aligned(size_t bytes) {
  void* memory = ::operator new(bytes, std::align_val_t{64});
  return {static_cast<T*>(memory), [](T* p) { ::operator delete(p, std::align_val_t{64}); }};
}

template <class T>
T read(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Value `k` of the key of a page's token `slot`, before the rotation of four bits.
float key_value(const HeadLayout& layout, const uint8_t* page, int slot, int k) {
  const uint8_t* block = page + static_cast<size_t>(slot / 16) * layout.key_block_bytes;
  const int lane = slot % 16;
  switch (layout.format) {
    case CacheFormat::f32:
      return read<float>(block + (16 * k + lane) * 4);
    case CacheFormat::bf16:
      return simd::from_bf16(read<uint16_t>(block + ((k / 2 * 16 + lane) * 2 + k % 2) * 2));
    case CacheFormat::i8:
      return read<float>(page + layout.scales + static_cast<size_t>(slot) * 4) *
             static_cast<float>(static_cast<int8_t>(block[16 * k + lane]));
    case CacheFormat::i4: {
      const uint8_t* group = page + layout.scales + static_cast<size_t>(k / kCacheGroup) * kGroupScaleBytes;
      const float scale = simd::from_f16(read<uint16_t>(group + static_cast<size_t>(slot) * 2));
      const float minimum = simd::from_f16(read<uint16_t>(group + static_cast<size_t>(kPageTokens + slot) * 2));
      const int byte = block[k / 8 * 64 + lane * 4 + k % 4];
      return scale * static_cast<float>(k % 8 < 4 ? byte & 15 : byte >> 4) + minimum;
    }
  }
  return 0;
}

}  // namespace

size_t ExpandedKeys::token_bytes(int head_dim, int value_dim, CacheFormat format) {
  return layout_of_head(head_dim, value_dim, format).bytes / kPageTokens;
}

void ExpandedKeys::reserve(int head_dim, int value_dim, CacheFormat format, int heads, int64_t tokens) {
  layout_ = layout_of_head(head_dim, value_dim, format);
  const auto count = static_cast<size_t>((tokens + kPageTokens - 1) / kPageTokens);
  const size_t page = layout_.bytes * static_cast<size_t>(heads), bytes = page * count;
  if (bytes > bytes_) {
    memory_ = aligned<uint8_t>(bytes + bytes / 4);
    bytes_ = bytes + bytes / 4;
  }
  const size_t floats = task_scratch_floats(layout_);
  if (floats > scratch_floats_) {
    scratch_ = aligned<float>(floats * sizeof(float));
    scratch_floats_ = floats;
  }
  pages_.resize(count);
  for (size_t i = 0; i < count; ++i) pages_[i] = memory_.get() + i * page;
  // append() does not write the zeros behind a key's values, and what was there may be no numbers.
  if (layout_.padded_head_dim != layout_.head_dim) std::memset(memory_.get(), 0, bytes);
}

void ExpandedKeys::append(int head, int64_t position, int count, const float* k, const float* v,
                          int64_t stride) noexcept {
  static const AppendKernels& kernels = pick<AppendKernels>(selected_isa());
  kernels.append(
      {&layout_, pages_.data(), layout_.bytes * static_cast<size_t>(head), k, v, stride, stride, position, count});
}

void ExpandedKeys::attend(int head, const AttentionOptions& options, const Query& query, const float* q,
                          int64_t q_stride, float* out, int64_t out_stride) noexcept {
  for (int row = 0; row < query.tokens; row += kRows) {
    AttendTask task{};
    task.layout = &layout_;
    task.options = &options;
    task.pages = pages_.data();
    task.offset = layout_.bytes * static_cast<size_t>(head);
    task.q = q;
    task.q_stride = q_stride;
    task.group = 1;
    task.first_row = row;
    task.rows = std::min(kRows, query.tokens - row);
    task.position = query.position;
    const int64_t first = query.position + row;
    task.begin = options.window > 0 ? std::max<int64_t>(first - options.window + 1, 0) / kPageTokens * kPageTokens : 0;
    task.end = first + task.rows;
    task.length = query.position + query.tokens;
    task.many = true;
    task.scratch = scratch_.get();
    task.out = out;
    task.out_stride = out_stride;
    llm::attend(task);
  }
}

void read_keys(const KvCache& cache, int layer, int sequence, int64_t first, int64_t count, float* out,
               int64_t stride) noexcept {
  const KvCache::Impl& impl = cache.impl();
  const HeadLayout& layout = impl.layouts[static_cast<size_t>(layer)];
  const CacheSequence& state = impl.at(sequence);
  for (int64_t t = 0; t < count;) {
    const int64_t position = first + t;
    const uint8_t* page =
        state.data[static_cast<size_t>(position / kPageTokens)] + impl.offsets[static_cast<size_t>(layer)];
    const int slot = static_cast<int>(position % kPageTokens);
    const auto together = static_cast<int>(std::min<int64_t>(16 - slot % 16, count - t));
    float* to = out + t * stride;
    for (int k = 0; k < layout.head_dim; ++k)
      for (int i = 0; i < together; ++i) to[i * stride + k] = key_value(layout, page, slot + i, k);
    if (layout.format == CacheFormat::i4)
      for (int i = 0; i < together; ++i) rotate_groups(to + i * stride, layout.head_dim);
    t += together;
  }
}

}  // namespace anyaccel::llm
