// SPDX-License-Identifier: Apache-2.0
// AMX: products of tiles of pairs of bfloat16, beside all that AVX-512 with BF16 has.
// With ANYACCEL_EMULATE the instructions are plain code that gives what they give, bit by bit as Intel's manual defines
// it.
#pragma once

#include "simd/avx512_bf16.h"

namespace anyaccel::simd::ANYACCEL_ISA_VARIANT {
namespace {

#ifdef ANYACCEL_EMULATE

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

}  // namespace
}  // namespace anyaccel::simd::ANYACCEL_ISA_VARIANT
