// SPDX-License-Identifier: Apache-2.0
// The instructions that few machines have, in one place: dot products of pairs of bfloat16 and of quadruples of bytes,
// and AMX tiles. With ANYACCEL_EMULATE they are plain code that gives what the instructions give, bit by bit as Intel's
// manual defines them, so that the kernels that use them are tested on any machine with AVX-512.
// Everything is in an anonymous namespace: kernel files include it.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace anyaccel::llm {
namespace {

#ifdef ANYACCEL_EMULATE

// Subnormal numbers count as zero (DAZ) and become zero (FTZ), whatever MXCSR says.
inline float flushed(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline float from_half_of(uint32_t pair, int half) {
  const uint32_t bits = half == 0 ? pair << 16 : pair & 0xffff0000u;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return flushed(value);
}
inline float fused(float a, float b, float c) { return flushed(__builtin_fmaf(a, b, flushed(c))); }

// VDPBF16PS: the odd products first.
inline __m512 dot_bf16(__m512 sums, __m512i a, __m512i b) {
  float sum[16];
  uint32_t x[16], y[16];
  std::memcpy(sum, &sums, 64);
  std::memcpy(x, &a, 64);
  std::memcpy(y, &b, 64);
  for (int i = 0; i < 16; ++i) {
    sum[i] = fused(from_half_of(x[i], 1), from_half_of(y[i], 1), sum[i]);
    sum[i] = fused(from_half_of(x[i], 0), from_half_of(y[i], 0), sum[i]);
  }
  std::memcpy(&sums, sum, 64);
  return sums;
}

struct EmulatedTile {
  uint32_t lane[16][16];
};
thread_local EmulatedTile emulated[8];

inline void tiles_begin() {
  for (EmulatedTile& tile : emulated) std::memset(&tile, 0, sizeof tile);
}
inline void tiles_end() {}
template <int kTile>
void tile_zero() {
  std::memset(&emulated[kTile], 0, sizeof(EmulatedTile));
}
template <int kTile>
void tile_load(const void* from, int64_t stride) {
  for (int row = 0; row < 16; ++row)
    std::memcpy(emulated[kTile].lane[row], static_cast<const uint8_t*>(from) + row * stride, 64);
}
template <int kTile>
void tile_store(void* to, int64_t stride) {
  for (int row = 0; row < 16; ++row)
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, emulated[kTile].lane[row], 64);
}
// TDPBF16PS: even and odd products are summed apart.
template <int kSums, int kA, int kB>
void tile_dot_bf16() {
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      float even = 0, odd = 0, sum;
      for (int k = 0; k < 16; ++k) {
        const uint32_t a = emulated[kA].lane[m][k], b = emulated[kB].lane[k][n];
        even = fused(from_half_of(a, 0), from_half_of(b, 0), even);
        odd = fused(from_half_of(a, 1), from_half_of(b, 1), odd);
      }
      std::memcpy(&sum, &emulated[kSums].lane[m][n], sizeof sum);
      sum = flushed(flushed(sum) + flushed(even + odd));
      std::memcpy(&emulated[kSums].lane[m][n], &sum, sizeof sum);
    }
}

#else

#ifdef __AVX512BF16__
inline __m512 dot_bf16(__m512 sums, __m512i a, __m512i b) {
  __m512bh x, y;
  std::memcpy(&x, &a, sizeof x);
  std::memcpy(&y, &b, sizeof y);
  return _mm512_dpbf16_ps(sums, x, y);
}
#endif

#ifdef __AMX_TILE__
// Eight tiles of 16 rows of 64 bytes.
inline void tiles_begin() {
  alignas(64) uint8_t config[64] = {};
  config[0] = 1;  // palette
  for (int tile = 0; tile < 8; ++tile) {
    config[16 + 2 * tile] = 64;
    config[48 + tile] = 16;
  }
  // GCC 12's _tile_loadconfig reads 8 bytes of it as far as the compiler knows, which would drop the other stores.
  __asm__ volatile("" : : "r"(config) : "memory");
  _tile_loadconfig(config);
  __asm__ volatile("" : : "r"(config) : "memory");
}
// Without it the kernel saves 8 KiB at each switch of threads.
inline void tiles_end() { _tile_release(); }
// GCC's intrinsics for tiles take literal numbers only: they make the register's name of the text.
template <int kTile>
inline void tile_zero() {
  __asm__ volatile("tilezero\t%%tmm%c0" : : "i"(kTile));
}
template <int kTile>
inline void tile_load(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd\t(%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline void tile_store(void* to, int64_t stride) {
  __asm__ volatile("tilestored\t%%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
}
template <int kSums, int kA, int kB>
inline void tile_dot_bf16() {
  __asm__ volatile("tdpbf16ps\t%%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}
#endif

#endif  // ANYACCEL_EMULATE

#if defined(__AVX512VNNI__) && !defined(ANYACCEL_EMULATE)
inline __m512i dot_u8s8(__m512i sums, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(sums, a, b); }
#else
// VPDPBUSD: `a` unsigned, `b` signed, sums wrap around.
inline __m512i dot_u8s8(__m512i sums, __m512i a, __m512i b) {
  int32_t sum[16];
  uint8_t x[64];
  int8_t y[64];
  std::memcpy(sum, &sums, 64);
  std::memcpy(x, &a, 64);
  std::memcpy(y, &b, 64);
  for (int i = 0; i < 64; ++i)
    sum[i / 4] = static_cast<int32_t>(static_cast<uint32_t>(sum[i / 4]) + static_cast<uint32_t>(x[i] * y[i]));
  std::memcpy(&sums, sum, 64);
  return sums;
}
#endif

}  // namespace
}  // namespace anyaccel::llm
