// SPDX-License-Identifier: Apache-2.0
// Loops over 16 rows in the innermost place, for the compiler to vectorise. No fused multiply-adds (-ffp-contract=off):
// all variants give the same bits.
#include <cstdint>

#include "llm/pack.h"
#include "simd/convert.h"
#include "simd/pick.h"

namespace anyaccel::llm {
namespace {

using namespace simd;

constexpr int kRows = 16;
constexpr int kCandidates = 11;  // on each side of the obvious scale
constexpr float kStep = 0.1f;    // by which candidates for 1 / scale * largest value differ

struct Row {
  float v[kRows];
};

// To the nearest integer, ties to even, of |x| < 2^22.
float nearest(float x) {
  constexpr float kMagic = 12582912.0f;
  return (x + kMagic) - kMagic;
}
float clamped(float x, float low, float high) {
  const float above = x > low ? x : low;
  return above < high ? above : high;
}
// 1 / x, or zero for what has no finite inverse.
float inverse(float x) {
  const float magnitude = x < 0 ? -x : x;
  return magnitude > 1e-30f ? 1.0f / x : 0.0f;
}

struct Sums {
  Row l{}, ll{}, xl{};
};
// With q = nearest(x * inverse + offset) clamped to low .. high.
void sums_of(const float* x, int count, const Row& inv, const Row& offset, float low, float high, Sums& sums) {
  Row l{}, ll{}, xl{};
  for (int k = 0; k < count; ++k)
    for (int r = 0; r < kRows; ++r) {
      const float value = x[k * kRows + r];
      const float q = clamped(nearest(value * inv.v[r] + offset.v[r]), low, high);
      l.v[r] += q;
      ll.v[r] += q * q;
      xl.v[r] += value * q;
    }
  sums = {l, ll, xl};
}

void best_symmetric(const float* x, int count, Row& scale) {
  Row largest{};  // the value with the largest magnitude, with its sign: it becomes -8 * scale
  for (int k = 0; k < count; ++k)
    for (int r = 0; r < kRows; ++r) {
      const float value = x[k * kRows + r], old = largest.v[r];
      largest.v[r] = (value < 0 ? -value : value) > (old < 0 ? -old : old) ? value : old;
    }
  Row best{};  // the part of the squared sum that is explained
  scale = {};
  const Row zero{};
  Sums sums;
  for (int c = -kCandidates; c <= kCandidates; ++c) {
    Row inv;
    for (int r = 0; r < kRows; ++r) inv.v[r] = -(8.0f + kStep * static_cast<float>(c)) * inverse(largest.v[r]);
    sums_of(x, count, inv, zero, -8.0f, 7.0f, sums);
    for (int r = 0; r < kRows; ++r) {
      const float ll = sums.ll.v[r], xl = sums.xl.v[r];
      const float candidate = xl / (ll > 0 ? ll : 1.0f);
      const float explained = xl * candidate;
      const bool better = explained > best.v[r];
      best.v[r] = better ? explained : best.v[r];
      scale.v[r] = better ? candidate : scale.v[r];
    }
  }
}

void best_with_minimum(const float* x, int count, Row& scale, Row& minimum) {
  Row low, high, sum{};
  for (int r = 0; r < kRows; ++r) low.v[r] = high.v[r] = x[r];
  for (int k = 0; k < count; ++k)
    for (int r = 0; r < kRows; ++r) {
      const float value = x[k * kRows + r];
      low.v[r] = value < low.v[r] ? value : low.v[r];
      high.v[r] = value > high.v[r] ? value : high.v[r];
      sum.v[r] += value;
    }
  // Where all values are equal, any scale holds them.
  for (int r = 0; r < kRows; ++r) {
    scale.v[r] = (high.v[r] - low.v[r]) * (1.0f / 15.0f);
    minimum.v[r] = low.v[r];
  }
  const float n = static_cast<float>(count);
  Row best{};  // the part of the variance that is explained, times n
  Sums sums;
  for (int c = -kCandidates; c <= kCandidates; ++c) {
    // Candidates keep the middle of the range where it is.
    Row inv, offset;
    for (int r = 0; r < kRows; ++r) {
      inv.v[r] = (15.0f + 2 * kStep * static_cast<float>(c)) * inverse(high.v[r] - low.v[r]);
      offset.v[r] = 7.5f - (0.5f * low.v[r] + 0.5f * high.v[r]) * inv.v[r];
    }
    sums_of(x, count, inv, offset, 0.0f, 15.0f, sums);
    for (int r = 0; r < kRows; ++r) {
      const float l = sums.l.v[r];
      const float variance = n * sums.ll.v[r] - l * l;
      const float covariance = n * sums.xl.v[r] - l * sum.v[r];
      const float candidate = covariance / (variance > 0 ? variance : 1.0f);
      const float explained = covariance * candidate;
      const bool better = explained > best.v[r];
      best.v[r] = better ? explained : best.v[r];
      scale.v[r] = better ? candidate : scale.v[r];
      minimum.v[r] = better ? (sum.v[r] - candidate * l) / n : minimum.v[r];
    }
  }
}

void quantise4(const float* x, int count, uint8_t* q, uint16_t* scales, uint16_t* minima) {
  Row scale, minimum{}, bad{};
  for (int k = 0; k < count; ++k)
    for (int r = 0; r < kRows; ++r) bad.v[r] += x[k * kRows + r] * 0.0f;
  if (minima != nullptr)
    best_with_minimum(x, count, scale, minimum);
  else
    best_symmetric(x, count, scale);
  Row inv, offset;
  for (int r = 0; r < kRows; ++r) {
    const uint16_t bits = to_f16(scale.v[r] + bad.v[r]);
    scales[r] = bits;
    inv.v[r] = inverse(from_f16(bits));
    offset.v[r] = 8.0f;
    if (minima != nullptr) {
      minima[r] = to_f16(minimum.v[r]);
      offset.v[r] = -from_f16(minima[r]) * inv.v[r];
    }
  }
  for (int k = 0; k < count; ++k)
    for (int r = 0; r < kRows; ++r) {
      const float value = nearest(x[k * kRows + r] * inv.v[r] + offset.v[r]);
      q[k * kRows + r] = static_cast<uint8_t>(static_cast<int>(clamped(value, 0.0f, 15.0f)));
    }
}

constexpr PackKernels kKernels{quantise4};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::PackKernels, anyaccel::llm::kKernels)
