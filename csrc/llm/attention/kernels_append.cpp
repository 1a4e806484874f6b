// SPDX-License-Identifier: Apache-2.0
// New keys and values into the cache. The compiler vectorises the conversions.
#include "llm/attention/kernels_attention.h"
#include "llm/attention/rotate_groups.h"
#include "simd/convert.h"
#include "simd/pick.h"

namespace anyaccel::llm {
namespace {

using namespace simd;

constexpr int kMostValues = 4096;  // of a head: KvCache checks it

void keys_f32(const float* k, int n, uint8_t* block, int lane) {
  float* const to = reinterpret_cast<float*>(block) + lane;
  for (int i = 0; i < n; ++i) to[16 * i] = k[i];
}

void values_f32(const float* v, int n, uint8_t* values, size_t block_bytes, int slot) {
  for (int i = 0; i < n; i += 16, values += block_bytes)
    std::memcpy(values + slot * 64, v + i, static_cast<size_t>(n - i < 16 ? n - i : 16) * sizeof(float));
}

void keys_bf16(const float* k, int n, uint8_t* block, int lane) {
  uint32_t pairs[kMostValues / 2];
  for (int i = 0; i < n / 2; ++i)
    pairs[i] = static_cast<uint32_t>(to_bf16(k[2 * i])) | static_cast<uint32_t>(to_bf16(k[2 * i + 1])) << 16;
  if (n % 2 != 0) pairs[n / 2] = to_bf16(k[n - 1]);
  uint32_t* const to = reinterpret_cast<uint32_t*>(block) + lane;
  for (int i = 0; i < (n + 1) / 2; ++i) to[16 * i] = pairs[i];
}

// `second`: the next token's values, or null; `slot` is even then.
void values_bf16(const float* v, const float* second, int n, uint8_t* values, size_t block_bytes, int slot) {
  for (int i = 0; i < n; i += 16, values += block_bytes) {
    const int count = n - i < 16 ? n - i : 16;
    uint32_t* const to = reinterpret_cast<uint32_t*>(values) + slot / 2 * 16;
    if (second != nullptr)
      for (int j = 0; j < count; ++j)
        to[j] = static_cast<uint32_t>(to_bf16(v[i + j])) | static_cast<uint32_t>(to_bf16(second[i + j])) << 16;
    else if (slot % 2 == 0)
      for (int j = 0; j < count; ++j) to[j] = to_bf16(v[i + j]);
    else
      for (int j = 0; j < count; ++j) to[j] = (to[j] & 0xffffu) | static_cast<uint32_t>(to_bf16(v[i + j])) << 16;
  }
}

// x = scale * q; returns the scale, NaN when a value is not finite.
float quantise(const float* x, int n, int8_t* q) {
  uint32_t most = 0;  // the order of bits is that of magnitudes, with NaN above all
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(x[i]) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  if (most >= 0x7f800000u) {
    std::memset(q, 0, static_cast<size_t>(n));
    return __builtin_nanf("");
  }
  const float largest = float_of(most);
  const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
  for (int i = 0; i < n; ++i) {
    const float scaled = x[i] * inverse;
    q[i] = static_cast<int8_t>(static_cast<int>(scaled + (scaled < 0 ? -0.5f : 0.5f)));
  }
  return largest / 127.0f;
}

void append_token_i8(const HeadLayout& layout, const float* k, const float* v, uint8_t* head, int slot) {
  int8_t q[kMostValues];
  float* const scales = reinterpret_cast<float*>(head + layout.scales);
  scales[slot] = quantise(k, layout.head_dim, q);
  uint8_t* const block = head + static_cast<size_t>(slot / 16) * layout.key_block_bytes + slot % 16;
  for (int i = 0; i < layout.head_dim; ++i) block[16 * i] = static_cast<uint8_t>(q[i]);
  scales[kPageTokens + slot] = quantise(v, layout.value_dim, q);
  uint8_t* to = head + layout.values + slot * 16;
  for (int i = 0; i < layout.value_dim; i += 16, to += layout.value_block_bytes)
    std::memcpy(to, q + i, static_cast<size_t>(layout.value_dim - i < 16 ? layout.value_dim - i : 16));
}

constexpr float kMostHalf = 65504.0f;

// x[count] = minimum + scale * q, q in 0..15; scale and minimum are NaN when a value is not finite. They are halves: a
// value below the least half becomes that one, and one above what the largest scale reaches becomes what it reaches.
void quantise4(const float* x, int count, uint8_t* q, uint16_t* scale, uint16_t* minimum) {
  float low = x[0], high = x[0], check = 0;
  for (int i = 0; i < count; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
    check += x[i] * 0.0f;
  }
  low = low < -kMostHalf ? -kMostHalf : low > kMostHalf ? kMostHalf : low;
  const float wanted = high > low ? (high - low) * (1.0f / 15) : 0.0f;
  *scale = to_f16((wanted > kMostHalf ? kMostHalf : wanted) + check);
  *minimum = to_f16(low + check);
  const float step = from_f16(*scale), least = from_f16(*minimum);
  const float inverse = step > 0 && step - step == 0.0f ? 1.0f / step : 0.0f;
  for (int i = 0; i < count; ++i) {
    const float place = (x[i] - least) * inverse + 0.5f;
    q[i] = static_cast<uint8_t>(place >= 0.0f && place < 16.0f ? static_cast<int>(place) : place < 0.0f ? 0 : 15);
  }
}

// All groups of a token's key or value, rotated; `to`: the scales of the first group.
void quantise4_groups(const float* from, int n, uint8_t* q, uint8_t* to, int slot) {
  float x[kMostValues];
  for (int i = 0; i < n; ++i) x[i] = from[i];
  rotate_groups(x, n);
  auto* halves = reinterpret_cast<uint16_t*>(to) + slot;
  for (int i = 0; i < n; i += kCacheGroup, halves += kGroupScaleBytes / sizeof(uint16_t))
    quantise4(x + i, n - i < kCacheGroup ? n - i : kCacheGroup, q + i, halves, halves + kPageTokens);
}

void append_token_i4(const HeadLayout& layout, const float* k, const float* v, uint8_t* head, int slot) {
  constexpr size_t kLine = 64;  // of eight numbers
  uint8_t q[kMostValues + 8];
  uint8_t* const scales = head + layout.scales;
  quantise4_groups(k, layout.head_dim, q, scales, slot);
  for (int i = layout.head_dim; i < layout.padded_head_dim; ++i) q[i] = 0;
  uint8_t* line = head + static_cast<size_t>(slot / 16) * layout.key_block_bytes + slot % 16 * 4;
  for (int i = 0; i < layout.padded_head_dim; i += 8, line += kLine)
    for (int j = 0; j < 4; ++j) line[j] = static_cast<uint8_t>(q[i + j] | q[i + 4 + j] << 4);
  quantise4_groups(v, layout.value_dim, q, scales + static_cast<size_t>(layout.key_groups()) * kGroupScaleBytes, slot);
  const int shift = slot % 8 / 4 * 4;
  uint8_t* to = head + layout.values + static_cast<size_t>(slot / 8) * kLine + slot % 4;
  for (int i = 0; i < layout.value_dim; i += 16, to += layout.value_block_bytes)
    for (int j = 0; j < 16 && i + j < layout.value_dim; ++j)
      to[4 * j] = static_cast<uint8_t>((to[4 * j] & 0xf0 >> shift) | q[i + j] << shift);
}

void append_task(const AppendTask& task) {
  const HeadLayout& layout = *task.layout;
  for (int t = 0; t < task.tokens; ++t) {
    const int64_t position = task.position + t;
    uint8_t* const head = task.pages[position / kPageTokens] + task.offset;
    const int slot = static_cast<int>(position % kPageTokens);
    const float* const k = task.k + t * task.k_stride;
    const float* const v = task.v + t * task.v_stride;
    uint8_t* const block = head + static_cast<size_t>(slot / 16) * layout.key_block_bytes;
    uint8_t* const values = head + layout.values;
    if (t == 0 || slot % 16 == 0) {  // of 16 tokens, whose lines are far from the cache when a page begins
      for (size_t line = 0; line < layout.key_block_bytes; line += 64) __builtin_prefetch(block + line, 1);
      const size_t bytes = layout.value_block_bytes / 4;  // of 16 of a page's 64 tokens
      for (uint8_t* at = values + static_cast<size_t>(slot / 16) * bytes; at < head + layout.scales;
           at += layout.value_block_bytes)
        for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + line, 1);
    }
    switch (layout.format) {
      case CacheFormat::f32:
        keys_f32(k, layout.head_dim, block, slot % 16);
        values_f32(v, layout.value_dim, values, layout.value_block_bytes, slot);
        break;
      case CacheFormat::bf16: {
        keys_bf16(k, layout.head_dim, block, slot % 16);
        const bool both = slot % 2 == 0 && t + 1 < task.tokens;
        if (slot % 2 == 0 || t == 0)  // else written with the token before
          values_bf16(v, both ? v + task.v_stride : nullptr, layout.value_dim, values, layout.value_block_bytes, slot);
        break;
      }
      case CacheFormat::i8:
        append_token_i8(layout, k, v, head, slot);
        break;
      case CacheFormat::i4:
        append_token_i4(layout, k, v, head, slot);
        break;
    }
  }
}

constexpr AppendKernels kKernels{append_task};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::AppendKernels, anyaccel::llm::kKernels)
