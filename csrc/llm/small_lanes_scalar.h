// SPDX-License-Identifier: Apache-2.0
// 16 lanes of plain loops: a part of small_lanes.h, which says what the names mean.
#pragma once

namespace anyaccel::llm {
namespace {

constexpr int kTile = 1, kChains = 1, kUnroll = 1;  // little code

struct Floats {
  float v[16];
};
struct Ints {
  int32_t v[16];
};
template <class Result, class Fn>
inline Result each(const Fn& fn) {
  Result result;
  for (int r = 0; r < 16; ++r) result.v[r] = fn(r);
  return result;
}
inline uint16_t half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, sizeof half);
  return half;
}

inline Floats splat(float x) {
  return each<Floats>([&](int) { return x; });
}
inline Floats zero_floats() { return splat(0.0f); }
inline Floats load(const float* p) {
  return each<Floats>([&](int r) { return p[r]; });
}
inline void store(float* p, const Floats& a) { std::memcpy(p, a.v, sizeof a.v); }
inline Floats add(const Floats& a, const Floats& b) {
  return each<Floats>([&](int r) { return a.v[r] + b.v[r]; });
}
inline Floats mul(const Floats& a, const Floats& b) {
  return each<Floats>([&](int r) { return a.v[r] * b.v[r]; });
}
inline Floats mul_add(const Floats& a, const Floats& b, const Floats& c) {
  return each<Floats>([&](int r) { return a.v[r] * b.v[r] + c.v[r]; });
}
inline Floats load_f16(const uint8_t* p) {
  return each<Floats>([&](int r) { return from_f16(half_at(p + 2 * r)); });
}
inline Floats even_bf16(const uint8_t* p) {
  return each<Floats>([&](int r) { return from_bf16(half_at(p + 4 * r)); });
}
inline Floats odd_bf16(const uint8_t* p) {
  return each<Floats>([&](int r) { return from_bf16(half_at(p + 4 * r + 2)); });
}

inline Ints splat(int32_t x) {
  return each<Ints>([&](int) { return x; });
}
inline Floats to_floats(const Ints& a) {
  return each<Floats>([&](int r) { return static_cast<float>(a.v[r]); });
}
inline Ints add(const Ints& a, const Ints& b) {
  return each<Ints>([&](int r) { return a.v[r] + b.v[r]; });
}

constexpr bool kPairs8 = false, kShift8 = false;
struct Line8 {
  const uint8_t* p;
};
inline Line8 load8(const uint8_t* p) { return {p}; }
inline Ints dot8(const Ints& sum, Line8 w, const int8_t* x) {
  return each<Ints>([&](int r) {
    int32_t result = sum.v[r];
    for (int i = 0; i < 4; ++i) result += static_cast<int8_t>(w.p[4 * r + i]) * x[i];
    return result;
  });
}

struct Line4 {
  const uint8_t* p;
};
inline Line4 load4(const uint8_t* p) { return {p}; }
struct Sum4 {
  Ints sum;
  static Sum4 zero() { return {splat(int32_t{0})}; }
  Sum4 plus(Line4 w, const int8_t* x) const {
    return {each<Ints>([&](int r) {
      int32_t result = sum.v[r];
      for (int i = 0; i < 4; ++i) result += (w.p[4 * r + i] & 15) * x[i] + (w.p[4 * r + i] >> 4) * x[i + 4];
      return result;
    })};
  }
  Ints total() const { return sum; }
};

// Column I of a line of 4 columns of int8, or of 8 columns of 4 bits.
template <int I>
inline Ints column8(const uint8_t* p) {
  return each<Ints>([&](int r) { return static_cast<int8_t>(p[4 * r + I]); });
}
template <int I>
inline Ints column4(const uint8_t* p) {
  return each<Ints>([&](int r) { return I < 4 ? p[4 * r + I] & 15 : p[4 * r + I - 4] >> 4; });
}
// Rounded to bfloat16, in pairs.
inline void store_pairs(uint16_t* p, const Floats& even, const Floats& odd) {
  for (int r = 0; r < 16; ++r) {
    p[2 * r] = to_bf16(even.v[r]);
    p[2 * r + 1] = to_bf16(odd.v[r]);
  }
}

// Largest magnitude of 32 floats as bits: NaN and infinity are above all others.
inline uint32_t magnitude_bits(const float* x) {
  uint32_t most = 0;
  for (int i = 0; i < 32; ++i) {
    const uint32_t bits = bits_of(x[i]) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return most;
}
// q = x * factor to the nearest; returns their sum.
template <class Q>
inline int32_t quantise32(const float* x, float factor, Q* q) {
  int32_t sum = 0;
  for (int i = 0; i < 32; ++i) {
    const float rounded = (x[i] * factor + 12582912.0f) - 12582912.0f;
    q[i] = rounded >= -127.0f && rounded <= 127.0f ? static_cast<Q>(static_cast<int>(rounded)) : Q{0};  // not a NaN
    sum += q[i];
  }
  return sum;
}

inline void magnitudes16(const float* x, uint32_t* most) {
  for (int g = 0; g < 16; ++g) most[g] = magnitude_bits(x + 32 * g);
}
template <class Q>
inline void quantise16(const float* x, const float* factors, Q* q, int64_t stride, int32_t* sums) {
  for (int g = 0; g < 16; ++g) sums[g] = quantise32(x + 32 * g, factors[g], q + g * stride);
}

}  // namespace
}  // namespace anyaccel::llm
