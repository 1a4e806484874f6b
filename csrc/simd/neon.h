// SPDX-License-Identifier: Apache-2.0
// 4 lanes of Advanced SIMD (NEON) as every 64-bit Arm processor has it. simd.h says what the names mean; neon_dot.h
// includes this for all but the products of 8 and 4 bits.
#pragma once

#undef ANYACCEL_LANES
#define ANYACCEL_LANES 4
#undef ANYACCEL_REGISTERS
#define ANYACCEL_REGISTERS 32

#include <arm_neon.h>

#include "simd/convert.h"

namespace anyaccel::simd::ANYACCEL_ISA_VARIANT {
namespace {

using Vec = float32x4_t;
using IVec = int32x4_t;
using Mask = uint32x4_t;  // all bits of a lane
constexpr int kLanes = ANYACCEL_LANES;

template <class V>
inline V read(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Vec broadcast(float x) { return vdupq_n_f32(x); }
inline IVec broadcast(int32_t x) { return vdupq_n_s32(x); }
inline Vec load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, Vec v) { vst1q_f32(p, v); }
inline Vec load_n(const float* p, int64_t n, Vec other) {
  if (n >= 4) return load(p);
  other = vld1q_lane_f32(p, other, 0);
  if (n > 1) other = vld1q_lane_f32(p + 1, other, 1);
  if (n > 2) other = vld1q_lane_f32(p + 2, other, 2);
  return other;
}
inline void store_n(float* p, int64_t n, Vec v) {
  if (n >= 4) return store(p, v);
  vst1q_lane_f32(p, v, 0);
  if (n > 1) vst1q_lane_f32(p + 1, v, 1);
  if (n > 2) vst1q_lane_f32(p + 2, v, 2);
}
inline Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
inline IVec add(IVec a, IVec b) { return vaddq_s32(a, b); }
inline Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
inline Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
inline Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
inline Vec sqrt(Vec a) { return vsqrtq_f32(a); }
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline Vec fnma(Vec a, Vec b, Vec c) { return vfmsq_f32(c, a, b); }
inline Vec select(Mask m, Vec yes, Vec no) { return vbslq_f32(m, yes, no); }
inline Mask less(Vec a, Vec b) { return vcltq_f32(a, b); }
inline Mask not_less(Vec a, Vec b) { return vmvnq_u32(vcltq_f32(a, b)); }
inline Mask equal(Vec a, Vec b) { return vceqq_f32(a, b); }
inline Mask is_nan(Vec a) { return vmvnq_u32(vceqq_f32(a, a)); }
// The instructions for these two give a NaN where either is one.
inline Vec max(Vec a, Vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline Vec min(Vec a, Vec b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline Vec abs(Vec a) { return vabsq_f32(a); }
inline Vec copysign(Vec magnitude, Vec sign) { return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude); }
inline Vec sign(Vec a) {
  const Vec zero = broadcast(0.0f);
  return select(vorrq_u32(vcltq_f32(a, zero), vcgtq_f32(a, zero)), copysign(broadcast(1.0f), a), a);
}
inline Mask either(Mask a, Mask b) { return vorrq_u32(a, b); }
inline Mask no_lanes() { return vdupq_n_u32(0); }
inline unsigned lanes(Mask m) {
  const Mask bits = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(m, bits));
}
inline float sum(Vec v) { return vaddvq_f32(v); }
inline float largest(Vec v) {
  v = max(v, vextq_f32(v, v, 2));
  const float a = vgetq_lane_f32(v, 0), b = vgetq_lane_f32(v, 1);
  return a > b ? a : b;
}
inline Vec iota() { return Vec{0, 1, 2, 3}; }
inline Vec convert(IVec v) { return vcvtq_f32_s32(v); }
inline Vec nearest(Vec v) { return vrndnq_f32(v); }
inline Vec limited_power(Vec n) { return min(broadcast(128.0f), max(broadcast(-126.0f), n)); }
// In two steps: n may be 128. A NaN becomes 0 in it, and v is one too then.
inline Vec times_power(Vec v, Vec n) {
  const IVec whole = vcvtnq_s32_f32(n);
  const IVec half = vshrq_n_s32(whole, 1);
  const auto power = [](IVec e) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(e, vdupq_n_s32(127)), 23)); };
  return mul(mul(v, power(half)), power(vsubq_s32(whole, half)));
}
inline Vec times_power(Mask some, Vec v, Vec n) {
  return vreinterpretq_f32_u32(vandq_u32(some, vreinterpretq_u32_f32(times_power(v, n))));
}

inline Vec load_twice(const float* p) {
  const float32x2_t two = vld1_f32(p);
  return vcombine_f32(vdup_lane_f32(two, 0), vdup_lane_f32(two, 1));
}
inline Vec swap_pairs(Vec v) { return vrev64q_f32(v); }
inline Vec fma_addsub(Vec a, Vec b, Vec c) {
  const Mask even = {0x80000000u, 0, 0x80000000u, 0};
  return vfmaq_f32(vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(c), even)), a, b);
}

// --- 16 bits

inline IVec load_ints(const void* p) { return read<IVec>(p); }
inline void store(void* p, IVec v) { std::memcpy(p, &v, sizeof v); }
inline void stream(void* p, IVec v) { store(p, v); }
inline void stream_fence() {}
inline Vec load_bf16(const void* p) { return vreinterpretq_f32_u32(vshll_n_u16(read<uint16x4_t>(p), 16)); }
[[gnu::always_inline]] inline Vec load_f16(const void* p) { return vcvt_f32_f16(read<float16x4_t>(p)); }
inline Vec load_power(const void* p) {
  const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(read<uint32_t>(p)));
  return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))), 23));
}
inline Vec load_i8(const void* p) {
  const int8x8_t bytes = vreinterpret_s8_s32(vdup_n_s32(read<int32_t>(p)));
  return convert(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
}
inline Vec even_bf16(const void* p) { return vreinterpretq_f32_u32(vshlq_n_u32(read<uint32x4_t>(p), 16)); }
inline Vec odd_bf16(const void* p) {
  return vreinterpretq_f32_u32(vandq_u32(read<uint32x4_t>(p), vdupq_n_u32(0xffff0000u)));
}
// In the upper half of each lane; the lower half is undefined.
[[gnu::always_inline]] inline uint32x4_t round_bf16(Vec v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
  return vbslq_u32(vceqq_f32(v, v), rounded, vorrq_u32(bits, vdupq_n_u32(0x400000)));
}
inline void store_bf16(uint16_t* p, Vec v) { vst1_u16(p, vshrn_n_u32(round_bf16(v), 16)); }
inline void store_f16(uint16_t* p, Vec v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
[[gnu::always_inline]] inline IVec interleave_bf16(Vec even, Vec odd) {
  return vreinterpretq_s32_u32(vsriq_n_u32(round_bf16(odd), round_bf16(even), 16));
}
[[gnu::always_inline]] inline IVec pack_bf16(Vec a, Vec b) {
  return vreinterpretq_s32_u16(vshrn_high_n_u32(vshrn_n_u32(round_bf16(a), 16), round_bf16(b), 16));
}
[[gnu::always_inline]] inline IVec pack_f16(Vec a, Vec b) {
  return vreinterpretq_s32_f16(vcvt_high_f16_f32(vcvt_f16_f32(a), b));
}

// --- 8 and 4 bits

// 4 bytes, in each lane.
inline int8x16_t quad_at(const int8_t* x) { return vreinterpretq_s8_s32(vdupq_n_s32(read<int32_t>(x))); }
struct Nibbles {
  IVec low, high;
};
template <int kBits, int kFirst>
inline Nibbles load_bits(const uint8_t* p) {
  const uint8x16_t line = read<uint8x16_t>(p), mask = vdupq_n_u8((1 << kBits) - 1);
  uint8x16_t low = line, high = vshrq_n_u8(line, kFirst + kBits);
  if constexpr (kFirst > 0) low = vshrq_n_u8(line, kFirst);
  if constexpr (kFirst + 2 * kBits < 8) high = vandq_u8(high, mask);
  return {vreinterpretq_s32_u8(vandq_u8(low, mask)), vreinterpretq_s32_u8(high)};
}
inline Nibbles load_nibbles(const uint8_t* p) { return load_bits<4, 0>(p); }
// Whole lanes shifted: no bit of a byte reaches the next.
template <int kShift>
inline Nibbles join(Nibbles a, Nibbles b) {
  return {vorrq_s32(a.low, vshlq_n_s32(b.low, kShift)), vorrq_s32(a.high, vshlq_n_s32(b.high, kShift))};
}

constexpr bool kPairs8 = false, kShift8 = false;
struct Quads {
  int8x16_t v;
};
inline Quads load_quads(const uint8_t* p) { return {read<int8x16_t>(p)}; }
using Table = int8x16_t;
inline Table load_table(const int8_t* codes) { return vld1q_s8(codes); }
inline Nibbles look_up(Table table, Nibbles index) {
  const auto of = [&](IVec v) { return vreinterpretq_s32_s8(vqtbl1q_s8(table, vreinterpretq_u8_s32(v))); };
  return {of(index.low), of(index.high)};
}
struct Codes {
  Quads low, high;
};
inline Codes load_codes(const uint8_t* p, Table table) {
  const Nibbles bytes = look_up(table, load_nibbles(p));
  return {{vreinterpretq_s8_s32(bytes.low)}, {vreinterpretq_s8_s32(bytes.high)}};
}

#ifndef ANYACCEL_NEON_DOT
// Two products fit 16 bits: 2 * 128 * 127 = 32512.
inline IVec dot(IVec sum, Quads w, const int8_t* x) {
  const int8x16_t q = quad_at(x);
  const int16x8_t low = vmull_s8(vget_low_s8(w.v), vget_low_s8(q)), high = vmull_high_s8(w.v, q);
  return vpadalq_s16(sum, vpaddq_s16(low, high));
}

// The sum over 32 columns, of values 0..15 and activations -127..127. Four lanes of 16 bits for each row: they fit, and
// so do the sums of two (16 * 15 * 127 = 30480).
struct NibbleSum {
  static constexpr bool kOf16Bits = true;
  int16x8_t low, high;  // rows 0 and 1, 2 and 3
  static NibbleSum zero() { return {vdupq_n_s16(0), vdupq_n_s16(0)}; }
  static int16x8_t add_low(int16x8_t sum, IVec w, int8x16_t q) {
    return vmlal_s8(sum, vget_low_s8(vreinterpretq_s8_s32(w)), vget_low_s8(q));
  }
  static int16x8_t add_high(int16x8_t sum, IVec w, int8x16_t q) {
    return vmlal_high_s8(sum, vreinterpretq_s8_s32(w), q);
  }
  NibbleSum plus(Nibbles w, const int8_t* x) const {
    const int8x16_t first = quad_at(x), second = quad_at(x + 4);
    return {add_low(add_low(low, w.low, first), w.high, second),
            add_high(add_high(high, w.low, first), w.high, second)};
  }
  IVec total() const { return vpaddlq_s16(vpaddq_s16(low, high)); }
};
#endif
template <int I>
inline IVec column8(const uint8_t* p) {
  return (load_ints(p) << (24 - 8 * I)) >> 24;
}
template <int I>
inline IVec column4(const uint8_t* p) {
  return vreinterpretq_s32_u32((read<uint32x4_t>(p) >> (8 * (I % 4) + I / 4 * 4)) & 15u);
}

// Compared as integers, the bits of a NaN or an infinity are larger than those of any number.
inline uint32_t magnitude_bits(const float* x) {
  uint32x4_t most[2] = {vdupq_n_u32(0), vdupq_n_u32(0)};
  for (int i = 0; i < 8; ++i) most[i % 2] = vmaxq_u32(most[i % 2], vreinterpretq_u32_f32(abs(load(x + 4 * i))));
  return vmaxvq_u32(vmaxq_u32(most[0], most[1]));
}
template <class Q>
inline int32_t quantise32(const float* x, float factor, Q* q) {
  static_assert(sizeof(Q) == 1);
  int16x8_t halves[4];
  for (int i = 0; i < 4; ++i) {
    const auto whole = [&](int at) { return vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(load(x + at), factor))); };
    halves[i] = vcombine_s16(whole(8 * i), whole(8 * i + 4));
  }
  for (int i = 0; i < 4; i += 2)
    vst1q_s8(reinterpret_cast<int8_t*>(q) + 8 * i, vqmovn_high_s16(vqmovn_s16(halves[i]), halves[i + 1]));
  return vaddlvq_s16(vaddq_s16(vaddq_s16(halves[0], halves[1]), vaddq_s16(halves[2], halves[3])));
}
inline void magnitudes16(const float* x, uint32_t* most) {
  for (int g = 0; g < 16; ++g) most[g] = magnitude_bits(x + 32 * g);
}
template <class Q>
inline void quantise16(const float* x, const float* factors, Q* q, int64_t stride, int32_t* sums) {
  for (int g = 0; g < 16; ++g) sums[g] = quantise32(x + 32 * g, factors[g], q + g * stride);
}

}  // namespace
}  // namespace anyaccel::simd::ANYACCEL_ISA_VARIANT

#include "simd/math.h"
