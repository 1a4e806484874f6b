// SPDX-License-Identifier: Apache-2.0
// 16-bit floating point, one value at a time: exact, and rounded to nearest even. A NaN stays one and becomes quiet.
// This is the definition that the vectors of every instruction set match bit by bit. Without branches, so that the
// compiler makes vectors of loops. Static: kernel files of every instruction set use it.
#pragma once

#include <cstdint>
#include <cstring>

namespace anyaccel::simd {

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float from_bf16(uint16_t value) { return float_of(static_cast<uint32_t>(value) << 16); }

static inline uint16_t to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

static inline float from_f16(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value & 0x7fffu) << 13;
  // Zero and subnormal halves as whole numbers of 2^-24: no subnormal float is made, which a program may have flushed.
  const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(value & 0x3ffu)) * 0x1p-24f);
  const uint32_t finite = magnitude >= 0x00800000u ? magnitude + (112u << 23) : small;
  const uint32_t special = magnitude | 0x7f800000u | (magnitude > 0x0f800000u ? 0x400000u : 0u);
  return float_of(sign | (magnitude >= 0x0f800000u ? special : finite));
}

static inline uint16_t to_f16(float value) {
  const uint32_t bits = bits_of(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t result;
  if (magnitude > 0x7f800000u)
    result = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  else if (magnitude >= 0x477ff000u)  // 65520 and above round to infinity
    result = 0x7c00u;
  else if (magnitude >= 0x38800000u)  // a normal half
    result = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  else  // a subnormal one: adding 0.5 rounds to a multiple of 2^-24
    result = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  return static_cast<uint16_t>(sign | result);
}

}  // namespace anyaccel::simd
