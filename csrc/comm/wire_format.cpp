// SPDX-License-Identifier: Apache-2.0
#include "comm/wire_format.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "simd/convert.h"

namespace anyaccel::comm {
namespace {

using simd::bits_of;
using simd::float_of;

constexpr size_t kBlock = 32;
constexpr const char* kNames[] = {"f32", "bf16", "i8"};
constexpr uint32_t kAbsolute = 0x7fffffff, kInfinity = 0x7f800000;
// Below it 1/scale is not a float; such values count as zeros, which are off by less than 2^-119.
constexpr float kLeast = 0x1p-119f;
// Added to a float below 2^22 and taken away again, it rounds to the nearest whole number, ties to even.
constexpr float kRound = 12582912.0f;

struct Block {
  float scale;    // of all values but the largest; NaN where one of them is NaN or infinite
  float largest;  // takes the place of the value that is kLargest
  int8_t values[kBlock];
};
static_assert(sizeof(Block) == 40);
constexpr int8_t kLargest = -128;

size_t blocks(size_t count) { return (count + kBlock - 1) / kBlock; }

// The largest absolute value, as bits: floats without their sign are ordered as those are, infinity and NaN last.
int32_t most_of(const float* values) {
  int32_t most = 0;
  for (size_t i = 0; i < kBlock; ++i) most = std::max(most, static_cast<int32_t>(bits_of(values[i]) & kAbsolute));
  return most;
}

void encode_block(const float* in, size_t count, Block& out) {
  float values[kBlock] = {};
  std::memcpy(values, in, count * sizeof(float));
  std::memset(&out, 0, sizeof out);
  const auto largest = static_cast<uint32_t>(most_of(values));
  if (largest >= kInfinity) {
    out.scale = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  size_t at = 0;
  while ((bits_of(values[at]) & kAbsolute) != largest) ++at;
  out.largest = values[at];
  values[at] = 0;
  const float most = float_of(static_cast<uint32_t>(most_of(values)));
  const bool tiny = most < kLeast;
  out.scale = tiny ? 0.0f : most / 127.0f;
  const float factor = tiny ? 0.0f : 127.0f / most;
  for (size_t i = 0; i < kBlock; ++i) {
    const float whole = values[i] * factor + kRound;
    out.values[i] = static_cast<int8_t>(static_cast<int32_t>(bits_of(whole) - bits_of(kRound)));
  }
  out.values[at] = kLargest;
}

void decode_block(const Block& in, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] = in.scale * static_cast<float>(in.values[i]);
  const void* largest = std::memchr(in.values, static_cast<uint8_t>(kLargest), count);
  if (largest != nullptr) out[static_cast<const int8_t*>(largest) - in.values] = in.largest;
}

}  // namespace

WireFormat read_wire_format(const std::string& name) {
  for (const WireFormat format : {WireFormat::f32, WireFormat::bf16, WireFormat::i8})
    if (name == wire_format_name(format)) return format;
  throw std::invalid_argument("'" + name + "' is no format between hosts; it can be f32, bf16 or i8");
}

const char* wire_format_name(WireFormat format) { return kNames[static_cast<size_t>(format)]; }

size_t encoded_bytes(WireFormat format, size_t count) {
  if (format == WireFormat::f32) return count * sizeof(float);
  return format == WireFormat::bf16 ? count * sizeof(uint16_t) : blocks(count) * sizeof(Block);
}

void encode(WireFormat format, const float* in, size_t count, uint8_t* out) {
  if (format == WireFormat::f32) {
    if (count > 0) std::memcpy(out, in, count * sizeof(float));  // of nothing, an address may be null
  } else if (format == WireFormat::bf16) {
    auto* to = reinterpret_cast<uint16_t*>(out);
    for (size_t i = 0; i < count; ++i) to[i] = simd::to_bf16(in[i]);
  } else {
    auto* to = reinterpret_cast<Block*>(out);
    for (size_t i = 0; i < count; i += kBlock) encode_block(in + i, std::min(kBlock, count - i), to[i / kBlock]);
  }
}

void decode(WireFormat format, const uint8_t* in, size_t count, float* out) {
  if (format == WireFormat::f32) {
    if (count > 0) std::memcpy(out, in, count * sizeof(float));  // of nothing, an address may be null
  } else if (format == WireFormat::bf16) {
    const auto* from = reinterpret_cast<const uint16_t*>(in);
    for (size_t i = 0; i < count; ++i) out[i] = simd::from_bf16(from[i]);
  } else {
    const auto* from = reinterpret_cast<const Block*>(in);
    for (size_t i = 0; i < count; i += kBlock) decode_block(from[i / kBlock], std::min(kBlock, count - i), out + i);
  }
}

}  // namespace anyaccel::comm
