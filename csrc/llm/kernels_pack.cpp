// SPDX-License-Identifier: Apache-2.0
// Loops over 16 rows, or over the values of one, in the innermost place, for the compiler to vectorise. No fused
// multiply-adds (-ffp-contract=off): all variants give the same bits.
#include <cstdint>

#include "llm/pack.h"
#include "llm/pack_source.h"
#include "simd/convert.h"
#include "simd/pick.h"
#include "simd/simd.h"
#include "simd/wide.h"

namespace anyaccel::llm {
namespace {

using namespace simd;
using namespace simd::ANYACCEL_ISA_VARIANT;

constexpr int kRows = 16;
constexpr int kVecs = kRows / ANYACCEL_LANES;  // of them
constexpr int kCandidates = 11;                // on each side of the obvious scale
constexpr float kStep = 0.1f;                  // by which candidates for 1 / scale * largest value differ

struct Row {
  float v[kRows];
};

// To the nearest integer, ties to even, of |x| < 2^22.
constexpr float kMagic = 12582912.0f;
float rounded(float x) { return (x + kMagic) - kMagic; }
float clamped(float x, float low, float high) {
  const float above = x > low ? x : low;
  return above < high ? above : high;
}
// 1 / x, or zero for what has no finite inverse.
float inverse(float x) {
  const float magnitude = x < 0 ? -x : x;
  return magnitude > 1e-30f ? 1.0f / x : 0.0f;
}

// A float for each of the 16 rows, in as many vectors as that takes.
using Rows = Many<Vec, kVecs>;
template <class Fn>
inline Rows of_rows(const Fn& fn) {
  return each<kVecs>(fn);
}
inline Rows all_rows(float value) {
  return of_rows([&](int) { return broadcast(value); });
}
inline Rows rows_at(const float* p) {
  return of_rows([&](int i) { return load(p + i * ANYACCEL_LANES); });
}
inline void store_rows(Row& to, const Rows& from) {
  for (int i = 0; i < kVecs; ++i) store(to.v + i * ANYACCEL_LANES, from.x[i]);
}
inline Rows inverse(const Rows& x) {
  return of_rows([&](int i) {
    return select(less(broadcast(1e-30f), abs(x.x[i])), div(broadcast(1.0f), x.x[i]), broadcast(0.0f));
  });
}
// x where it is above zero, else 1.
inline Vec positive_or_one(Vec x) { return select(less(broadcast(0.0f), x), x, broadcast(1.0f)); }

struct Sums {
  Rows l, ll, xl;
};
// The sums over a group of q, q * q and x * q, with q = nearest(x * inv + offset) clamped to low .. high.
inline Sums sums_of(const float* x, int count, const Rows& inv, const Rows& offset, float low, float high) {
  const Vec magic = broadcast(kMagic), least = broadcast(low), most = broadcast(high);
  Sums sums{all_rows(0.0f), all_rows(0.0f), all_rows(0.0f)};
  for (int k = 0; k < count; ++k) {
    const Rows value = rows_at(x + k * kRows);
    const Rows q = of_rows([&](int i) {
      const Vec whole = sub(add(add(mul(value.x[i], inv.x[i]), offset.x[i]), magic), magic);
      return min(max(whole, least), most);
    });
    sums.l = add(sums.l, q);
    sums.ll = add(sums.ll, mul(q, q));
    sums.xl = add(sums.xl, mul(value, q));
  }
  return sums;
}

void best_symmetric(const float* x, int count, Row& scale) {
  Rows largest = all_rows(0.0f);  // the value with the largest magnitude, with its sign: it becomes -8 * scale
  for (int k = 0; k < count; ++k)
    for (int i = 0; i < kVecs; ++i) {
      const Vec value = load(x + k * kRows + i * ANYACCEL_LANES), old = largest.x[i];
      largest.x[i] = select(less(abs(old), abs(value)), value, old);
    }
  const Rows inv = inverse(largest);
  Rows best = all_rows(0.0f), found = best;  // the part of the squared sum that is explained, and by which scale
  for (int c = -kCandidates; c <= kCandidates; ++c) {
    const Sums sums =
        sums_of(x, count, mul(broadcast(-(8.0f + kStep * static_cast<float>(c))), inv), all_rows(0.0f), -8.0f, 7.0f);
    for (int i = 0; i < kVecs; ++i) {
      const Vec candidate = div(sums.xl.x[i], positive_or_one(sums.ll.x[i]));
      const Vec explained = mul(sums.xl.x[i], candidate);
      const Mask better = less(best.x[i], explained);
      best.x[i] = select(better, explained, best.x[i]);
      found.x[i] = select(better, candidate, found.x[i]);
    }
  }
  store_rows(scale, found);
}

void best_with_minimum(const float* x, int count, Row& scale, Row& minimum) {
  Rows low = rows_at(x), high = low, sum = all_rows(0.0f);
  for (int k = 0; k < count; ++k)
    for (int i = 0; i < kVecs; ++i) {
      const Vec value = load(x + k * kRows + i * ANYACCEL_LANES);
      low.x[i] = min(value, low.x[i]);
      high.x[i] = max(value, high.x[i]);
      sum.x[i] = add(sum.x[i], value);
    }
  const Rows range = sub(high, low), inv_range = inverse(range);
  const Rows middle = add(mul(broadcast(0.5f), low), mul(broadcast(0.5f), high));
  // Where all values are equal, any scale holds them.
  Rows found = mul(range, broadcast(1.0f / 15.0f)), least = low;
  Rows best = all_rows(0.0f);  // the part of the variance that is explained, times n
  const Vec n = broadcast(static_cast<float>(count));
  for (int c = -kCandidates; c <= kCandidates; ++c) {
    // Candidates keep the middle of the range where it is.
    const Rows inv = mul(broadcast(15.0f + 2 * kStep * static_cast<float>(c)), inv_range);
    const Sums sums = sums_of(x, count, inv, sub(broadcast(7.5f), mul(middle, inv)), 0.0f, 15.0f);
    for (int i = 0; i < kVecs; ++i) {
      const Vec l = sums.l.x[i];
      const Vec variance = sub(mul(n, sums.ll.x[i]), mul(l, l));
      const Vec covariance = sub(mul(n, sums.xl.x[i]), mul(l, sum.x[i]));
      const Vec candidate = div(covariance, positive_or_one(variance));
      const Vec explained = mul(covariance, candidate);
      const Mask better = less(best.x[i], explained);
      best.x[i] = select(better, explained, best.x[i]);
      found.x[i] = select(better, candidate, found.x[i]);
      least.x[i] = select(better, div(sub(sum.x[i], mul(candidate, l)), n), least.x[i]);
    }
  }
  store_rows(scale, found);
  store_rows(minimum, least);
}

void quantise4(const float* x, int count, uint32_t* lines, uint16_t* scales, uint16_t* minima) {
  constexpr int kColumns = 8;  // of a line
  Row scale, minimum{}, bad;
  Rows zeros = all_rows(0.0f);  // NaN where a value is not finite
  for (int k = 0; k < count; ++k) zeros = add(zeros, mul(rows_at(x + k * kRows), broadcast(0.0f)));
  store_rows(bad, zeros);
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
  // Four bits of column k + i of a row, where its word has them.
  const auto bits_of_word = [&](int k, int i, int r) {
    const float value = rounded(x[(k + i) * kRows + r] * inv.v[r] + offset.v[r]);
    return static_cast<uint32_t>(static_cast<int32_t>(clamped(value, 0.0f, 15.0f))) << (i % 4 * 8 + i / 4 * 4);
  };
  int k = 0;
  for (; k + kColumns <= count; k += kColumns, lines += kRows)
    for (int r = 0; r < kRows; ++r) {
      uint32_t word = 0;
#pragma GCC unroll 8
      for (int i = 0; i < kColumns; ++i) word |= bits_of_word(k, i, r);
      lines[r] = word;
    }
  for (int r = 0; r < kRows && k < count; ++r) {
    lines[r] = 0;
    for (int i = 0; i < count - k; ++i) lines[r] |= bits_of_word(k, i, r);
  }
}

// --- one row

// As integers, magnitudes are in the order of what they mean; what is not finite comes last.
template <class Bits>
Bits largest_bits(const uint8_t* x, int64_t count) {
  constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  Bits most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Bits magnitude = static_cast<Bits>(read<Bits>(x + i * static_cast<int64_t>(sizeof(Bits))) & ~kSign);
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

float largest(SourceType type, const uint8_t* x, int64_t count) {
  float most;
  if (type == SourceType::f32)
    most = float_of(largest_bits<uint32_t>(x, count));
  else if (type == SourceType::f16)
    most = from_f16(largest_bits<uint16_t>(x, count));
  else
    most = from_bf16(largest_bits<uint16_t>(x, count));
  return most + most * 0.0f;
}

// Calls fn(i, value) for `kCount` values.
template <class Type, int kCount, class Fn>
void for_row(const uint8_t* x, const Fn& fn) {
  for (int i = 0; i < kCount; ++i) fn(i, Type::at(x + i * Type::bytes));
}
template <int kCount, class Fn>
void for_row(SourceType type, const uint8_t* x, const Fn& fn) {
  if (type == SourceType::f32)
    for_row<F32, kCount>(x, fn);
  else if (type == SourceType::f16)
    for_row<F16, kCount>(x, fn);
  else
    for_row<BF16, kCount>(x, fn);
}

void as_bf16(SourceType type, const uint8_t* x, uint16_t* to) {
  for_row<32>(type, x, [&](int i, float value) { to[i] = to_bf16(value); });
}

void as_i8(SourceType type, const uint8_t* x, float inverse, int8_t* to) {
  for_row<64>(type, x, [&](int i, float value) {
    to[i] = static_cast<int8_t>(static_cast<int32_t>(clamped(rounded(value * inverse), -127.0f, 127.0f)));
  });
}

constexpr PackKernels kKernels{quantise4, largest, as_bf16, as_i8};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::PackKernels, anyaccel::llm::kKernels)
