// SPDX-License-Identifier: Apache-2.0
// Scores of tokens by an indexer's keys, and copies of the chosen ones: see chosen.h.
#include "llm/attention/attention_product.h"
#include "llm/attention/chosen.h"
#include "simd/pick.h"

namespace anyaccel::llm {
namespace {

template <class B>
void score_pages(const ScoreTask& task) {
  constexpr bool kScaled = B::kPairBytes == I8::kPairBytes;
  const HeadLayout& layout = *task.layout;
  const int k = layout.head_dim;
  alignas(64) float products[kTileRows * kPageTokens];
  for (int64_t page = task.begin; page < task.end; ++page) {
    const uint8_t* const keys = task.pages[page] + task.offset;
    const uint8_t* next = page + 1 < task.end ? task.pages[page + 1] + task.offset : nullptr;
    const int64_t left = task.tokens - page * kPageTokens;
    const int blocks = left < kPageTokens ? static_cast<int>((left + 15) / 16) : kPageTokens / 16;
    float* const scores = task.scores + page * kPageTokens;
    for (int j = 0; j < kPageTokens; j += kLanes) store(scores + j, broadcast(0.0f));
    for (int head = 0; head < task.heads; head += kTileRows) {
      const int count = task.heads - head < kTileRows ? task.heads - head : kTileRows;
      multiply<B>({task.q + static_cast<int64_t>(head) * k, k, keys, layout.key_block_bytes, k, products, kPageTokens,
                   nullptr, next},
                  count, blocks);
      next = nullptr;  // fetched already
      for (int j = 0; j < 16 * blocks; j += kLanes) {
        Vec sum = load(scores + j);
        for (int r = 0; r < count; ++r)
          sum = fma(broadcast(task.weights[head + r]), max(load(products + r * kPageTokens + j), broadcast(0.0f)), sum);
        store(scores + j, sum);
      }
    }
    if (!kScaled) continue;
    const float* const scales = reinterpret_cast<const float*>(keys + layout.scales);
    for (int j = 0; j < 16 * blocks; j += kLanes) store(scores + j, mul(load(scores + j), load(scales + j)));
  }
}

void score_task(const ScoreTask& task) {
  switch (task.layout->format) {
    case CacheFormat::f32:
      return score_pages<F32>(task);
    case CacheFormat::bf16:
      return score_pages<BF16>(task);
    case CacheFormat::i8:
    case CacheFormat::i4:  // keys without values are never of four bits
      return score_pages<I8>(task);
  }
}

// --- copies. Elements of a token's key lie 16 elements apart, those of 16 tokens side by side.

template <class T>
void copy_keys(const CopyTask& task, const uint8_t* const* from, int lines) {
  const HeadLayout& layout = *task.layout;
  const T* lanes[16];
  for (int i = 0; i < task.count; ++i) {
    const int slot = static_cast<int>(task.positions[i] % kPageTokens);
    lanes[i] =
        reinterpret_cast<const T*>(from[i] + static_cast<size_t>(slot / 16) * layout.key_block_bytes) + slot % 16;
  }
  for (int i = task.count; i < 16; ++i) lanes[i] = lanes[0];  // nobody sees these
  T* const to = reinterpret_cast<T*>(task.to + static_cast<size_t>(task.lane / 16) * layout.key_block_bytes);
  for (int line = 0; line < 16 * lines; line += 16)
    for (int i = 0; i < 16; ++i) to[line + i] = lanes[i][line];
}

// An element has the values of as many tokens as there are kBits in it.
template <class T, int kBits>
void copy_values(const CopyTask& task, const uint8_t* const* from) {
  constexpr int kPart = static_cast<int>(sizeof(T)) * 8 / kBits;
  constexpr T kMask = static_cast<T>((uint64_t{1} << kBits) - 1);
  const HeadLayout& layout = *task.layout;
  for (int lane = 0; lane < task.count; lane += kPart) {
    const uint8_t* own[kPart];
    int shift[kPart];
    for (int part = 0; part < kPart; ++part) {
      const int token = lane + part < task.count ? lane + part : lane;  // nobody sees the one behind the last
      const int slot = static_cast<int>(task.positions[token] % kPageTokens);
      own[part] = from[token] + layout.values + static_cast<size_t>(slot / kPart * 16) * sizeof(T);
      shift[part] = slot % kPart * kBits;
    }
    uint8_t* to = task.to + layout.values + static_cast<size_t>((task.lane + lane) / kPart * 16) * sizeof(T);
    for (int block = 0; block < layout.padded_value_dim; block += 16, to += layout.value_block_bytes) {
      T elements[16] = {};
      for (int part = 0; part < kPart; ++part) {
        const T* const values = reinterpret_cast<const T*>(own[part]);
        for (int i = 0; i < 16; ++i)
          elements[i] = static_cast<T>(elements[i] | (values[i] >> shift[part] & kMask) << (part * kBits));
        own[part] += layout.value_block_bytes;
      }
      for (int i = 0; i < 16; ++i) reinterpret_cast<T*>(to)[i] = elements[i];
    }
  }
}

// Values of four bits lie [t/8][16 values][4 bytes], byte b having tokens b and 4 + b of the eight.
void copy_nibbles(const CopyTask& task, const uint8_t* const* from) {
  const HeadLayout& layout = *task.layout;
  const auto place = [](int slot, int i) { return (slot / 8 * 16 + i) * 4 + slot % 4; };
  for (int block = 0; block < layout.padded_value_dim / 16; ++block) {
    const size_t at = layout.values + static_cast<size_t>(block) * layout.value_block_bytes;
    uint8_t* const to = task.to + at;
    for (int lane = 0; lane < task.count; ++lane) {
      const int slot = static_cast<int>(task.positions[lane] % kPageTokens), own = task.lane + lane;
      const int from_shift = slot % 8 / 4 * 4, shift = own % 8 / 4 * 4;
      for (int i = 0; i < 16; ++i) {
        const int value = from[lane][at + static_cast<size_t>(place(slot, i))] >> from_shift & 15;
        uint8_t& byte = to[place(own, i)];
        byte = static_cast<uint8_t>((byte & 0xf0 >> shift) | value << shift);
      }
    }
  }
}

// `count` scales of each token, a page's tokens apart.
template <class T>
void copy_scales(const CopyTask& task, const uint8_t* const* from, int count) {
  const size_t at = task.layout->scales;
  for (int lane = 0; lane < task.count; ++lane)
    for (int i = 0; i < count; ++i)
      reinterpret_cast<T*>(task.to + at)[i * kPageTokens + task.lane + lane] =
          reinterpret_cast<const T*>(from[lane] + at)[i * kPageTokens + task.positions[lane] % kPageTokens];
}

void copy_task(const CopyTask& task) {
  const HeadLayout& layout = *task.layout;
  const uint8_t* from[16];
  for (int i = 0; i < task.count; ++i) from[i] = task.pages[task.positions[i] / kPageTokens] + task.offset;
  switch (layout.format) {
    case CacheFormat::f32:
      copy_keys<uint32_t>(task, from, layout.padded_head_dim);
      return copy_values<uint32_t, 32>(task, from);
    case CacheFormat::bf16:
      copy_keys<uint32_t>(task, from, layout.padded_head_dim / 2);
      return copy_values<uint32_t, 16>(task, from);
    case CacheFormat::i8:
      copy_keys<uint8_t>(task, from, layout.padded_head_dim);
      copy_values<uint8_t, 8>(task, from);
      return copy_scales<float>(task, from, 2);
    case CacheFormat::i4:
      copy_keys<uint32_t>(task, from, layout.padded_head_dim / 8);
      copy_nibbles(task, from);
      return copy_scales<uint16_t>(task, from, 2 * (layout.key_groups() + layout.value_groups()));
  }
}

constexpr ChosenKernels kKernels{score_task, copy_task};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::ChosenKernels, anyaccel::llm::kKernels)
