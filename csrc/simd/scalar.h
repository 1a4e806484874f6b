// SPDX-License-Identifier: Apache-2.0
// One lane: the reference. simd.h says what the names mean.
#pragma once

#undef ANYACCEL_LANES
#define ANYACCEL_LANES 1
#undef ANYACCEL_REGISTERS
#define ANYACCEL_REGISTERS 16

#include <math.h>

#include "simd/convert.h"

namespace anyaccel::simd::ANYACCEL_ISA_VARIANT {
namespace {

using Vec = float;
using IVec = int32_t;
using Mask = bool;
constexpr int kLanes = ANYACCEL_LANES;

inline Vec broadcast(float x) { return x; }
inline IVec broadcast(int32_t x) { return x; }
inline Vec load(const float* p) { return *p; }
inline void store(float* p, Vec v) { *p = v; }
inline Vec load_n(const float* p, int64_t, Vec) { return *p; }
inline void store_n(float* p, int64_t, Vec v) { *p = v; }
inline Vec add(Vec a, Vec b) { return a + b; }
inline IVec add(IVec a, IVec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec sqrt(Vec a) { return __builtin_sqrtf(a); }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec fnma(Vec a, Vec b, Vec c) { return c - a * b; }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }
inline Vec abs(Vec a) { return float_of(bits_of(a) & 0x7fffffffu); }
inline Vec sign(Vec a) { return a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : a; }
inline Mask less(Vec a, Vec b) { return a < b; }
inline Mask equal(Vec a, Vec b) { return a == b; }
inline Mask is_nan(Vec a) { return a != a; }
inline Vec select(Mask m, Vec yes, Vec no) { return m ? yes : no; }
inline Mask either(Mask a, Mask b) { return a || b; }
inline Mask no_lanes() { return false; }
inline unsigned lanes(Mask m) { return m; }
inline float sum(Vec v) { return v; }
inline float largest(Vec v) { return v; }
inline Vec iota() { return 0; }
inline Vec convert(IVec v) { return static_cast<float>(v); }
inline Vec nearest(Vec v) { return (v + 12582912.0f) - 12582912.0f; }

// There are no pairs of lanes here: these three are named by code that is not run.
inline Vec load_twice(const float* p) { return *p; }
inline Vec swap_pairs(Vec v) { return v; }
inline Vec fma_addsub(Vec a, Vec b, Vec c) { return a * b - c; }

inline uint16_t half_at(const void* p) {
  uint16_t half;
  std::memcpy(&half, p, sizeof half);
  return half;
}
inline void store(void* p, IVec v) { std::memcpy(p, &v, sizeof v); }
inline void stream(void* p, IVec v) { store(p, v); }
inline void stream_fence() {}
inline Vec load_bf16(const void* p) { return from_bf16(half_at(p)); }
[[gnu::always_inline]] inline Vec load_f16(const void* p) { return from_f16(half_at(p)); }
inline Vec load_power(const void* p) { return float_of(uint32_t{*static_cast<const uint8_t*>(p)} << 23); }
inline Vec load_i8(const void* p) { return static_cast<float>(*static_cast<const int8_t*>(p)); }
inline void store_bf16(uint16_t* p, Vec v) { *p = to_bf16(v); }
inline void store_f16(uint16_t* p, Vec v) { *p = to_f16(v); }
inline Vec even_bf16(const void* p) { return from_bf16(half_at(p)); }
inline Vec odd_bf16(const void* p) { return from_bf16(half_at(static_cast<const char*>(p) + 2)); }
// As they lie in memory, whatever the order of a number's bytes.
inline IVec pair_of(uint16_t first, uint16_t second) {
  const uint16_t halves[2] = {first, second};
  IVec pair;
  std::memcpy(&pair, halves, sizeof pair);
  return pair;
}
[[gnu::always_inline]] inline IVec pack_bf16(Vec a, Vec b) { return pair_of(to_bf16(a), to_bf16(b)); }
[[gnu::always_inline]] inline IVec pack_f16(Vec a, Vec b) { return pair_of(to_f16(a), to_f16(b)); }
[[gnu::always_inline]] inline IVec interleave_bf16(Vec even, Vec odd) { return pack_bf16(even, odd); }

// libm: what the polynomials of math.h are tested against.
inline Vec exp(Vec x) { return x < -87.3365447f ? 0.0f : ::expf(x); }
inline Vec exp2(Vec x) { return x < -126.0f ? 0.0f : ::exp2f(x); }
inline Vec tanh(Vec x) { return ::tanhf(x); }
inline Vec normal_cdf(Vec x) { return 0.5f * ::erfcf(-x * 0.70710678118654752f); }
inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(0.0f - x)); }

constexpr bool kPairs8 = false, kShift8 = false;
struct Quads {
  int8_t v[4];
};
inline Quads load_quads(const uint8_t* p) {
  Quads quads;
  std::memcpy(quads.v, p, sizeof quads.v);
  return quads;
}
inline IVec dot(IVec sum, const Quads& w, const int8_t* x) {
  for (int i = 0; i < 4; ++i) sum += w.v[i] * x[i];
  return sum;
}
struct Nibbles {
  uint8_t low[4], high[4];
};
template <int kBits, int kFirst>
inline Nibbles load_bits(const uint8_t* p) {
  constexpr int kMask = (1 << kBits) - 1;
  Nibbles result;
  for (int i = 0; i < 4; ++i) {
    result.low[i] = static_cast<uint8_t>(p[i] >> kFirst & kMask);
    result.high[i] = static_cast<uint8_t>(p[i] >> (kFirst + kBits) & kMask);
  }
  return result;
}
inline Nibbles load_nibbles(const uint8_t* p) { return load_bits<4, 0>(p); }
template <int kShift>
inline Nibbles join(Nibbles a, const Nibbles& b) {
  for (int i = 0; i < 4; ++i) {
    a.low[i] = static_cast<uint8_t>(a.low[i] | b.low[i] << kShift);
    a.high[i] = static_cast<uint8_t>(a.high[i] | b.high[i] << kShift);
  }
  return a;
}
using Table = const int8_t*;
inline Table load_table(const int8_t* codes) { return codes; }
struct Codes {
  Quads low, high;
};
inline Codes load_codes(const uint8_t* p, Table table) {
  const Nibbles index = load_nibbles(p);
  Codes codes;
  for (int i = 0; i < 4; ++i) {
    codes.low.v[i] = table[index.low[i]];
    codes.high.v[i] = table[index.high[i]];
  }
  return codes;
}
struct NibbleSum {
  static constexpr bool kOf16Bits = false;
  IVec v;
  static NibbleSum zero() { return {0}; }
  NibbleSum plus(const Nibbles& w, const int8_t* x) const {
    int32_t result = v;
    for (int i = 0; i < 4; ++i) result += w.low[i] * x[i] + w.high[i] * x[i + 4];
    return {result};
  }
  IVec total() const { return v; }
};
template <int I>
inline IVec column8(const uint8_t* p) {
  return static_cast<int8_t>(p[I]);
}
template <int I>
inline IVec column4(const uint8_t* p) {
  return I < 4 ? p[I % 4] & 15 : p[I % 4] >> 4;
}

}  // namespace
}  // namespace anyaccel::simd::ANYACCEL_ISA_VARIANT

#include "simd/quantise.h"
