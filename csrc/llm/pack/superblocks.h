// SPDX-License-Identifier: Apache-2.0
// ggml's superblocks of 256 columns, as they are in a GGUF file (block_q4_K and others), for pack.cpp.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "llm/pack/pack_source.h"

namespace anyaccel::llm {
namespace {

// Of one row: value = factor * scale * (q - zero of the format) - minimum_factor * minimum. Halves are bits.
struct Superblock {
  uint16_t factor = 0, minimum_factor = 0;
  int8_t scales[16], minima[16];  // of each group, which are 16 or 8
  alignas(64) uint8_t q[kSuperblock];
};

// What a type is, and the format that holds it.
struct SuperblockType {
  int64_t bytes;
  Format format;
  int group;
  bool minimum;
  void (*read)(const uint8_t* from, Superblock& to);
};

// Eight scales and eight minima of 6 bits: the first four of each are the low bits of bytes 0 to 7, the others have
// their low four bits in bytes 8 to 11 and the high two above the first ones.
inline void read_scales_of_6_bits(const uint8_t* packed, Superblock& to) {
  for (int i = 0; i < 4; ++i) {
    to.scales[i] = static_cast<int8_t>(packed[i] & 63);
    to.minima[i] = static_cast<int8_t>(packed[4 + i] & 63);
    to.scales[4 + i] = static_cast<int8_t>((packed[8 + i] & 15) | packed[i] >> 6 << 4);
    to.minima[4 + i] = static_cast<int8_t>(packed[8 + i] >> 4 | packed[4 + i] >> 6 << 4);
  }
}

inline void read_q4_k(const uint8_t* from, Superblock& to) {
  to.factor = read<uint16_t>(from);
  to.minimum_factor = read<uint16_t>(from + 2);
  read_scales_of_6_bits(from + 4, to);
  for (int run = 0; run < 4; ++run) read_nibbles(from + 16 + 32 * run, 32, to.q + 64 * run);
}

// The fifth bits of group g are bits g of 32 bytes.
inline void read_q5_k(const uint8_t* from, Superblock& to) {
  to.factor = read<uint16_t>(from);
  to.minimum_factor = read<uint16_t>(from + 2);
  read_scales_of_6_bits(from + 4, to);
  for (int run = 0; run < 4; ++run) read_nibbles(from + 48 + 32 * run, 32, to.q + 64 * run);
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < 32; ++i) to.q[32 * g + i] |= static_cast<uint8_t>((from[16 + i] >> g & 1) << 4);
}

// In each 128 values, the high two bits of run g of 32 are bits 2 g of 32 bytes.
inline void read_q6_k(const uint8_t* from, Superblock& to) {
  for (int half = 0; half < 2; ++half) {
    uint8_t* q = to.q + 128 * half;
    read_nibbles(from + 64 * half, 64, q);
    const uint8_t* high = from + 128 + 32 * half;
    for (int g = 0; g < 4; ++g)
      for (int i = 0; i < 32; ++i) q[32 * g + i] |= static_cast<uint8_t>((high[i] >> 2 * g & 3) << 4);
  }
  std::memcpy(to.scales, from + 192, 16);
  to.factor = read<uint16_t>(from + 208);
}

// In each 128 values, run g of 32 is bits 2 g of 32 bytes.
inline void read_pairs(const uint8_t* from, uint8_t* q) {
  for (int half = 0; half < 2; ++half)
    for (int g = 0; g < 4; ++g)
      for (int i = 0; i < 32; ++i) q[128 * half + 32 * g + i] = from[32 * half + i] >> 2 * g & 3;
}

// The third bits of run g of 32 are bits g of 32 bytes. Sixteen scales of 6 bits, less 32: the low four bits of scales
// i and i + 8 are those of byte i, the high two of i, i + 4, i + 8 and i + 12 are byte 8 + i.
inline void read_q3_k(const uint8_t* from, Superblock& to) {
  read_pairs(from + 32, to.q);
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < 32; ++i) to.q[32 * g + i] |= static_cast<uint8_t>((from[i] >> g & 1) << 2);
  const uint8_t* packed = from + 96;
  for (int i = 0; i < 16; ++i) {
    const int low = packed[i % 8] >> (i < 8 ? 0 : 4) & 15, high = packed[8 + i % 4] >> 2 * (i / 4) & 3;
    to.scales[i] = static_cast<int8_t>((low | high << 4) - 32);
  }
  to.factor = read<uint16_t>(from + 108);
}

inline void read_q2_k(const uint8_t* from, Superblock& to) {
  read_pairs(from + 16, to.q);
  for (int i = 0; i < 16; ++i) {
    to.scales[i] = static_cast<int8_t>(from[i] & 15);
    to.minima[i] = static_cast<int8_t>(from[i] >> 4);
  }
  to.factor = read<uint16_t>(from + 80);
  to.minimum_factor = read<uint16_t>(from + 82);
}

// Eight scales of 6 bits, less 32: the high two are in a word, the low four after it.
inline void read_iq4_xs(const uint8_t* from, Superblock& to) {
  to.factor = read<uint16_t>(from);
  const int high = read<uint16_t>(from + 2);
  for (int i = 0; i < 8; ++i)
    to.scales[i] = static_cast<int8_t>(((from[4 + i / 2] >> 4 * (i % 2) & 15) | (high >> 2 * i & 3) << 4) - 32);
  for (int run = 0; run < 8; ++run) read_nibbles(from + 8 + 16 * run, 16, to.q + 32 * run);
}

inline constexpr SuperblockType kSuperblockTypes[] = {
    {84, Format::i2, 16, true, read_q2_k},   {110, Format::i3, 16, false, read_q3_k},
    {144, Format::i4, 32, true, read_q4_k},  {176, Format::i5, 32, true, read_q5_k},
    {210, Format::i6, 16, false, read_q6_k}, {136, Format::nl4, 32, false, read_iq4_xs}};
// Null for other types.
constexpr const SuperblockType* superblock_type(SourceType type) {
  return type < SourceType::q2_k ? nullptr
                                 : &kSuperblockTypes[static_cast<int>(type) - static_cast<int>(SourceType::q2_k)];
}

}  // namespace
}  // namespace anyaccel::llm
