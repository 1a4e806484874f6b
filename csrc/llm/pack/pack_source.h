// SPDX-License-Identifier: Apache-2.0
// Rows of any source as panels [columns][16 rows] of floats, for pack.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "llm/pack/matrix.h"
#include "simd/convert.h"

namespace anyaccel::llm {
namespace {

using namespace simd;

constexpr int kLanes = static_cast<int>(kBlockRows);
constexpr int kMostColumns = 128;  // of a panel
constexpr int kSourceGroup = 32;   // ggml's blocks

// The rows that are packed into one block: where each lane's row starts, null for lanes that keep what they have.
struct Lanes {
  const uint8_t* row[kLanes] = {};
  bool all = true;
};

template <class T>
T read(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

struct F32 {
  static constexpr int64_t bytes = 4;
  static float at(const uint8_t* from) { return read<float>(from); }
};
struct F64 {
  static constexpr int64_t bytes = 8;
  static float at(const uint8_t* from) { return static_cast<float>(read<double>(from)); }
};
struct F16 {
  static constexpr int64_t bytes = 2;
  static float at(const uint8_t* from) { return from_f16(read<uint16_t>(from)); }
};
struct BF16 {
  static constexpr int64_t bytes = 2;
  static float at(const uint8_t* from) { return from_bf16(read<uint16_t>(from)); }
};

template <class Type>
inline void read_panel(const Lanes& lanes, int64_t col_stride, int64_t k0, int count, float* panel) {
  constexpr int kStep = 16;  // a cache line of each row of the panel is written as a whole before it is left
  for (int k = 0; k < count; k += kStep) {
    const int end = std::min(k + kStep, count);
    for (int r = 0; r < kLanes; ++r) {
      if (lanes.row[r] == nullptr) continue;
      const uint8_t* from = lanes.row[r] + k0 * col_stride;
      if (col_stride == Type::bytes && end == k + kStep) {
        float values[kStep];
        for (int i = 0; i < kStep; ++i) values[i] = Type::at(from + (k + i) * Type::bytes);
        for (int i = 0; i < kStep; ++i) panel[(k + i) * kLanes + r] = values[i];
      } else {
        for (int i = k; i < end; ++i) panel[i * kLanes + r] = Type::at(from + i * col_stride);
      }
    }
  }
}

// The panel of dense rows of bfloat16, for a multiple of kPairs columns. Words of two columns are transposed at a time.
inline void read_bf16_panel(const Lanes& lanes, int64_t k0, int count, float* panel) {
  constexpr int kWords = 16, kPairs = 2 * kWords;  // 64 bytes of each row
  uint32_t line[kWords], words[kWords][kLanes];
  for (int k = 0; k < count; k += kPairs, panel += kPairs * kLanes) {
    for (int r = 0; r < kLanes; ++r) {
      std::memcpy(line, lanes.row[r] + (k0 + k) * 2, sizeof line);
      for (int w = 0; w < kWords; ++w) words[w][r] = line[w];
    }
    for (int w = 0; w < kWords; ++w) {
      float* to = panel + 2 * w * kLanes;
      for (int r = 0; r < kLanes; ++r) to[r] = float_of(words[w][r] << 16);
      for (int r = 0; r < kLanes; ++r) to[kLanes + r] = float_of(words[w][r] & 0xffff0000u);
    }
  }
}

// ggml's blocks of 32: half scale (of mxfp4 a byte) and half minimum, fifth bits, then 16 bytes of nibbles (value i and
// i + 16) or 32 of int8.
struct QuantisedBlock {
  uint16_t scale = 0, minimum = 0;
  uint8_t q[kSourceGroup];  // int8 of q8_0
};
inline int64_t block_bytes_of(SourceType type) {
  switch (type) {
    case SourceType::q8_0:
      return 34;
    case SourceType::q5_0:
      return 22;
    case SourceType::q5_1:
      return 24;
    case SourceType::q4_0:
    case SourceType::iq4_nl:
      return 18;
    case SourceType::mxfp4:
      return 17;
    default:
      return 20;
  }
}

// Low and high nibbles of `count` bytes, a multiple of eight: two runs of values. Of single bytes GCC makes vectors one
// by one where they are few.
inline void read_nibbles(const uint8_t* from, int count, uint8_t* q) {
  constexpr uint64_t kLow = 0x0f0f0f0f0f0f0f0fu;
  for (int i = 0; i < count; i += 8) {
    const auto bytes = read<uint64_t>(from + i);
    const uint64_t low = bytes & kLow, high = bytes >> 4 & kLow;
    std::memcpy(q + i, &low, 8);
    std::memcpy(q + count + i, &high, 8);
  }
}

inline QuantisedBlock read_block(SourceType type, const uint8_t* from) {
  QuantisedBlock block;
  const bool power = type == SourceType::mxfp4;
  block.scale = power ? static_cast<uint16_t>(*from == 0 ? 0 : *from - 1) : read<uint16_t>(from);  // of doubled values
  const uint8_t* values = from + (power ? 1 : 2);
  if (type == SourceType::q8_0) {
    std::memcpy(block.q, values, kSourceGroup);
    return block;
  }
  if (type == SourceType::q4_1 || type == SourceType::q5_1) {
    block.minimum = read<uint16_t>(values);
    values += 2;
  }
  uint32_t fifth = 0;
  if (type == SourceType::q5_0 || type == SourceType::q5_1) {
    fifth = read<uint32_t>(values);
    values += sizeof fifth;
  }
  read_nibbles(values, kSourceGroup / 2, block.q);
  for (int i = 0; fifth != 0 && i < kSourceGroup; ++i) block.q[i] |= static_cast<uint8_t>((fifth >> i & 1) << 4);
  return block;
}

inline void read_quantised_panel(SourceType type, const Lanes& lanes, int64_t k0, int count, float* panel) {
  for (int r = 0; r < kLanes; ++r) {
    if (lanes.row[r] == nullptr) continue;
    for (int k = 0; k < count; k += kSourceGroup) {
      const QuantisedBlock block = read_block(type, lanes.row[r] + (k0 + k) / kSourceGroup * block_bytes_of(type));
      const float scale = from_f16(block.scale), minimum = from_f16(block.minimum);
      const int offset = type == SourceType::q4_0 ? 8 : 0;
      for (int i = 0; i < std::min(kSourceGroup, count - k); ++i) {
        const int q = type == SourceType::q8_0 ? static_cast<int8_t>(block.q[i]) : block.q[i] - offset;
        panel[(k + i) * kLanes + r] = scale * static_cast<float>(q) + minimum;
      }
    }
  }
}

// In blocks of 32.
inline bool is_quantised(SourceType type) { return type >= SourceType::q8_0 && type <= SourceType::mxfp4; }

inline void read_panel(SourceType type, const Lanes& lanes, int64_t col_stride, int64_t k0, int count, float* panel) {
  switch (type) {
    case SourceType::f32:
      return read_panel<F32>(lanes, col_stride, k0, count, panel);
    case SourceType::f64:
      return read_panel<F64>(lanes, col_stride, k0, count, panel);
    case SourceType::f16:
      return read_panel<F16>(lanes, col_stride, k0, count, panel);
    case SourceType::bf16:
      if (lanes.all && col_stride == BF16::bytes && count % 32 == 0) return read_bf16_panel(lanes, k0, count, panel);
      return read_panel<BF16>(lanes, col_stride, k0, count, panel);
    default:
      return read_quantised_panel(type, lanes, k0, count, panel);
  }
}

}  // namespace
}  // namespace anyaccel::llm
