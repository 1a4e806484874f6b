// SPDX-License-Identifier: Apache-2.0
// 32 floats as 8 bits in plain loops, which compilers make vectors of: for headers of instruction sets without shuffles
// of their own for it. Included by them, once for each; simd.h says what the names mean.

namespace anyaccel::simd::ANYACCEL_ISA_VARIANT {
namespace {

// Compared as integers, the bits of a NaN or an infinity are larger than those of any number.
inline uint32_t magnitude_bits(const float* x) {
  uint32_t most = 0;
  for (int i = 0; i < 32; ++i) {
    const uint32_t bits = bits_of(x[i]) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return most;
}
template <class Q>
inline int32_t quantise32(const float* x, float factor, Q* q) {
  int32_t sum = 0;
  for (int i = 0; i < 32; ++i) {
    const float rounded = (x[i] * factor + 12582912.0f) - 12582912.0f;
    const float whole = rounded >= -127.0f && rounded <= 127.0f ? rounded : 0.0f;  // not a NaN
    q[i] = static_cast<Q>(static_cast<int32_t>(whole));
    sum += static_cast<int32_t>(whole);
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
}  // namespace anyaccel::simd::ANYACCEL_ISA_VARIANT
