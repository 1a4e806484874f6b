// SPDX-License-Identifier: Apache-2.0
// 4 lanes of vectors as GCC and clang have them for every machine: NEON, SSE and what others have. simd.h says what the
// names mean. Multiplications and additions are rounded each by itself.
#pragma once

#undef ANYACCEL_LANES
#define ANYACCEL_LANES 4
#undef ANYACCEL_REGISTERS
#define ANYACCEL_REGISTERS 16

#include "simd/convert.h"

namespace anyaccel::simd::ANYACCEL_ISA_VARIANT {
namespace {

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IVec __attribute__((vector_size(16)));
typedef uint32_t UVec __attribute__((vector_size(16)));
using Mask = IVec;  // all bits of a lane
constexpr int kLanes = ANYACCEL_LANES;

// Lanes as bits: the casts of vectors keep these.
template <class To, class From>
inline To bits_as(From v) {
  return reinterpret_cast<To>(v);
}
template <class V>
inline V read(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Vec broadcast(float x) { return Vec{x, x, x, x}; }
inline IVec broadcast(int32_t x) { return IVec{x, x, x, x}; }
inline UVec broadcast(uint32_t x) { return UVec{x, x, x, x}; }
inline Vec load(const float* p) { return read<Vec>(p); }
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec load_n(const float* p, int64_t n, Vec other) {
  for (int i = 0; i < n; ++i) other[i] = p[i];
  return other;
}
inline void store_n(float* p, int64_t n, Vec v) {
  for (int i = 0; i < n; ++i) p[i] = v[i];
}
inline Vec add(Vec a, Vec b) { return a + b; }
inline IVec add(IVec a, IVec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec sqrt(Vec a) {
  return Vec{__builtin_sqrtf(a[0]), __builtin_sqrtf(a[1]), __builtin_sqrtf(a[2]), __builtin_sqrtf(a[3])};
}
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec fnma(Vec a, Vec b, Vec c) { return c - a * b; }
inline Vec select(Mask m, Vec yes, Vec no) { return bits_as<Vec>((m & bits_as<IVec>(yes)) | (~m & bits_as<IVec>(no))); }
inline Mask less(Vec a, Vec b) { return a < b; }
inline Mask not_less(Vec a, Vec b) { return ~(a < b); }
inline Mask equal(Vec a, Vec b) { return a == b; }
inline Mask is_nan(Vec a) { return a != a; }
inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }
inline Vec min(Vec a, Vec b) { return select(a < b, a, b); }
inline Vec abs(Vec a) { return bits_as<Vec>(bits_as<IVec>(a) & broadcast(int32_t{0x7fffffff})); }
inline Vec copysign(Vec magnitude, Vec sign) {
  return bits_as<Vec>(bits_as<IVec>(magnitude) | (bits_as<IVec>(sign) & broadcast(INT32_MIN)));
}
inline Vec sign(Vec a) { return select((a < 0.0f) | (a > 0.0f), copysign(broadcast(1.0f), a), a); }
inline Mask either(Mask a, Mask b) { return a | b; }
inline Mask no_lanes() { return Mask{}; }
inline unsigned lanes(Mask m) {
  const IVec bits = m & IVec{1, 2, 4, 8};
  return static_cast<unsigned>(bits[0] | bits[1] | bits[2] | bits[3]);
}
inline float sum(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline float largest(Vec v) {
  const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
}
inline Vec iota() { return Vec{0, 1, 2, 3}; }
inline Vec convert(IVec v) { return __builtin_convertvector(v, Vec); }
inline Vec nearest(Vec v) { return (v + 12582912.0f) - 12582912.0f; }
inline Vec limited_power(Vec n) { return min(broadcast(128.0f), max(broadcast(-126.0f), n)); }
// In two steps: n may be 128.
inline Vec times_power(Vec v, Vec n) {
  n = select(is_nan(n), broadcast(0.0f), n);  // then v is a NaN too
  const IVec whole = __builtin_convertvector(n, IVec);
  const IVec half = whole >> 1;
  return (v * bits_as<Vec>((half + 127) << 23)) * bits_as<Vec>((whole - half + 127) << 23);
}
inline Vec times_power(Mask some, Vec v, Vec n) { return bits_as<Vec>(some & bits_as<IVec>(times_power(v, n))); }

inline Vec load_twice(const float* p) { return Vec{p[0], p[0], p[1], p[1]}; }
inline Vec swap_pairs(Vec v) { return Vec{v[1], v[0], v[3], v[2]}; }
inline Vec fma_addsub(Vec a, Vec b, Vec c) { return a * b + Vec{-c[0], c[1], -c[2], c[3]}; }

// --- 16 bits

typedef uint16_t Halves __attribute__((vector_size(8)));

inline UVec load_halves(const void* p) { return __builtin_convertvector(read<Halves>(p), UVec); }
inline void store(void* p, IVec v) { std::memcpy(p, &v, sizeof v); }
inline void stream(void* p, IVec v) { store(p, v); }
inline void stream_fence() {}
inline Vec load_bf16(const void* p) { return bits_as<Vec>(load_halves(p) << 16); }
// As from_f16() of convert.h.
[[gnu::always_inline]] inline Vec load_f16(const void* p) {
  const UVec half = load_halves(p);
  const UVec magnitude = (half & 0x7fffu) << 13;
  const Vec small = convert(bits_as<IVec>(half & 0x3ffu)) * 0x1p-24f;
  const Mask normal = magnitude >= 0x00800000u;
  const Mask endless = magnitude >= 0x0f800000u;
  const UVec quiet = bits_as<UVec>(magnitude > 0x0f800000u) & 0x400000u;
  const Vec finite = select(normal, bits_as<Vec>(magnitude + (112u << 23)), small);
  const Vec result = select(endless, bits_as<Vec>(magnitude | 0x7f800000u | quiet), finite);
  return bits_as<Vec>(bits_as<UVec>(result) | (half & 0x8000u) << 16);
}
inline Vec load_power(const void* p) {
  const auto* byte = static_cast<const uint8_t*>(p);
  return bits_as<Vec>(UVec{byte[0], byte[1], byte[2], byte[3]} << 23);
}
inline Vec load_i8(const void* p) {
  const auto* q = static_cast<const int8_t*>(p);
  return convert(IVec{q[0], q[1], q[2], q[3]});
}
inline Vec even_bf16(const void* p) { return bits_as<Vec>(read<UVec>(p) << 16); }
inline Vec odd_bf16(const void* p) { return bits_as<Vec>(read<UVec>(p) & 0xffff0000u); }
// As to_bf16() and to_f16() of convert.h, in the lower half of each lane.
[[gnu::always_inline]] inline UVec round_bf16(Vec v) {
  const UVec bits = bits_as<UVec>(v);
  const UVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const UVec nan = bits_as<UVec>(is_nan(v));
  return (nan & ((bits >> 16) | 0x40u)) | (~nan & rounded);
}
[[gnu::always_inline]] inline UVec round_f16(Vec v) {
  const UVec bits = bits_as<UVec>(v);
  const UVec magnitude = bits & 0x7fffffffu;
  const UVec nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const UVec normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  const UVec small = bits_as<UVec>(bits_as<Vec>(magnitude) + 0.5f) - 0x3f000000u;
  const auto choose = [](IVec m, UVec yes, UVec no) { return (bits_as<UVec>(m) & yes) | (~bits_as<UVec>(m) & no); };
  const UVec finite = choose(magnitude >= 0x38800000u, normal, small);
  const UVec endless = choose(magnitude >= 0x477ff000u, broadcast(uint32_t{0x7c00}), finite);
  return choose(magnitude > 0x7f800000u, nan, endless) | ((bits >> 16) & 0x8000u);
}
inline void store_halves(uint16_t* p, UVec v) {
  const Halves halves = __builtin_convertvector(v, Halves);
  std::memcpy(p, &halves, sizeof halves);
}
inline void store_bf16(uint16_t* p, Vec v) { store_halves(p, round_bf16(v)); }
inline void store_f16(uint16_t* p, Vec v) { store_halves(p, round_f16(v)); }
[[gnu::always_inline]] inline IVec interleave_bf16(Vec even, Vec odd) {
  return bits_as<IVec>(round_bf16(even) | round_bf16(odd) << 16);
}
[[gnu::always_inline]] inline IVec pack_halves(UVec a, UVec b) {
  uint16_t halves[8];
  store_halves(halves, a);
  store_halves(halves + 4, b);
  return read<IVec>(halves);
}
[[gnu::always_inline]] inline IVec pack_bf16(Vec a, Vec b) { return pack_halves(round_bf16(a), round_bf16(b)); }
[[gnu::always_inline]] inline IVec pack_f16(Vec a, Vec b) { return pack_halves(round_f16(a), round_f16(b)); }

// --- 8 and 4 bits

constexpr bool kPairs8 = false, kShift8 = false;
template <int I>
inline IVec column_of(IVec line) {
  return (line << (24 - 8 * I)) >> 24;
}
struct Quads {
  IVec v[4];
};
inline Quads load_quads(const uint8_t* p) {
  const IVec line = read<IVec>(p);
  return {{column_of<0>(line), column_of<1>(line), column_of<2>(line), column_of<3>(line)}};
}
inline IVec dot(IVec sum, const Quads& w, const int8_t* x) {
  return sum + (w.v[0] * int32_t{x[0]} + w.v[1] * int32_t{x[1]}) + (w.v[2] * int32_t{x[2]} + w.v[3] * int32_t{x[3]});
}
struct Nibbles {
  IVec v[8];
};
template <int kBits, int kFirst>
inline Nibbles load_bits(const uint8_t* p) {
  constexpr int kNext = kFirst + kBits;
  const UVec line = read<UVec>(p);
  const auto column = [&](int shift) { return bits_as<IVec>((line >> shift) & ((1u << kBits) - 1)); };
  return {{column(kFirst), column(kFirst + 8), column(kFirst + 16), column(kFirst + 24), column(kNext),
           column(kNext + 8), column(kNext + 16), column(kNext + 24)}};
}
inline Nibbles load_nibbles(const uint8_t* p) { return load_bits<4, 0>(p); }
template <int kShift>
inline Nibbles join(Nibbles a, const Nibbles& b) {
  for (int i = 0; i < 8; ++i) a.v[i] |= b.v[i] << kShift;
  return a;
}
using Table = const int8_t*;
inline Table load_table(const int8_t* codes) { return codes; }
struct Codes {
  Quads low, high;
};
inline Codes load_codes(const uint8_t* p, Table table) {
  const Nibbles index = load_nibbles(p);
  const auto value = [&](int i) {
    const IVec at = index.v[i];
    return IVec{table[at[0]], table[at[1]], table[at[2]], table[at[3]]};
  };
  return {{{value(0), value(1), value(2), value(3)}}, {{value(4), value(5), value(6), value(7)}}};
}
struct NibbleSum {
  static constexpr bool kOf16Bits = false;
  IVec v;
  static NibbleSum zero() { return {IVec{}}; }
  NibbleSum plus(const Nibbles& w, const int8_t* x) const {
    IVec result = v;
    for (int i = 0; i < 8; ++i) result += w.v[i] * int32_t{x[i]};
    return {result};
  }
  IVec total() const { return v; }
};
template <int I>
inline IVec column8(const uint8_t* p) {
  return column_of<I>(read<IVec>(p));
}
template <int I>
inline IVec column4(const uint8_t* p) {
  return bits_as<IVec>((read<UVec>(p) >> (8 * (I % 4) + I / 4 * 4)) & 15u);
}

}  // namespace
}  // namespace anyaccel::simd::ANYACCEL_ISA_VARIANT

#include "simd/math.h"
#include "simd/quantise.h"
