// SPDX-License-Identifier: Apache-2.0
// Loops over 16 rows, or over the values of one, in the innermost place. No fused multiply-adds (-ffp-contract=off) but
// of small whole numbers, which are exact: all variants give the same bits.
#include <cstdint>
#include <cstring>
#include <iterator>

#include "llm/pack/bit_planes.h"
#include "llm/pack/pack.h"
#include "llm/pack/pack_source.h"
#include "llm/pack/superblocks.h"
#include "simd/convert.h"
#include "simd/pick.h"
#include "simd/simd.h"
#include "simd/wide.h"

namespace anyaccel::llm {
namespace {

using namespace simd;
using namespace simd::ANYACCEL_ISA_VARIANT;

constexpr int kRows = 16;
constexpr int kCandidates = 11;  // on each side of the obvious scale
constexpr float kStep = 0.1f;    // by which candidates for 1 / scale * largest value differ

struct Row {
  float v[kRows];
};

// The nearest integer to x, ties to even, from low to high: in the low bits of the result. A NaN becomes `low`. Added
// to 1.5 * 2^23, a float has no bits for fractions; limits that are added to it too keep the order.
uint32_t whole(float x, float low, float high) {
  constexpr float kMagic = 12582912.0f;
  const float sum = x + kMagic, above = sum > kMagic + low ? sum : kMagic + low;
  return bits_of(above < kMagic + high ? above : kMagic + high);
}
// 1 / x, or zero for what has no finite inverse.
float inverse(float x) {
  const float magnitude = x < 0 ? -x : x;
  return magnitude > 1e-30f ? 1.0f / x : 0.0f;
}

inline Vec inverses(Vec x) { return select(less(broadcast(1e-30f), abs(x)), div(broadcast(1.0f), x), broadcast(0.0f)); }
// x where it is above zero, else 1.
inline Vec positive_or_one(Vec x) { return select(less(broadcast(0.0f), x), x, broadcast(1.0f)); }

// Two candidates at a time for each vector of rows: what one is waiting for, the other computes.
constexpr int kPair = 2;
using Pair = Many<Vec, kPair>;
struct Sums {
  Pair l, ll, xl;
};
// At which ends of their range whole numbers need a limit: most candidates round none to beyond it.
enum class Limit : uint8_t { none, above, both };

// The sums over a group of q, q * q and x * q, with q = nearest(x * inv + offset) limited to low .. high. Those of
// whole numbers are exact, however they are added up.
template <Limit kLimit, bool kOffset>
[[gnu::always_inline]] inline Sums sums_of(const float* x, int count, const Pair& inv, const Pair& offset, float low,
                                           float high) {
  const Vec least = broadcast(low), most = broadcast(high), zero = broadcast(0.0f);
  const auto limited = [&](Vec whole) {
    if constexpr (kLimit == Limit::both) whole = max(whole, least);
    if constexpr (kLimit != Limit::none) whole = min(whole, most);
    return whole;
  };
  Sums sums{{{zero, zero}}, {{zero, zero}}, {{zero, zero}}};
  for (int k = 0; k < count; ++k) {
    const Vec value = load(x + k * kRows);
    Pair at = mul(inv, value);
    if constexpr (kOffset) at = add(at, offset);
    const Pair q = each<kPair>([&](int i) { return limited(nearest(at.x[i])); });
    if constexpr (kOffset) sums.l = add(sums.l, q);
    sums.ll = fma(q, q, sums.ll);
    sums.xl = add(sums.xl, mul(q, value));
  }
  return sums;
}

constexpr int kLastWithin = 4;  // the last candidate that no value is rounded to beyond the end of the range
// By how much candidate c + i differs from the obvious scale; the last of an odd number is tried twice.
float step_of(int c, int i) { return kStep * static_cast<float>(c + i < kCandidates ? c + i : kCandidates); }

// The scale of symmetric values of the rows at x.
Vec best_symmetric(const float* x, int count) {
  Vec largest = broadcast(0.0f);  // the value with the largest magnitude, with its sign: it becomes -8 * scale
  for (int k = 0; k < count; ++k) {
    const Vec value = load(x + k * kRows);
    largest = select(less(abs(largest), abs(value)), value, largest);
  }
  const Vec inv = inverses(largest);
  Vec best = broadcast(0.0f), found = best;  // the part of the squared sum that is explained, and by which scale
  const auto try_pair = [&]<Limit kLimit>(int c) {
    const Pair candidates = each<kPair>([&](int i) { return mul(broadcast(-(8.0f + step_of(c, i))), inv); });
    const Sums sums = sums_of<kLimit, false>(x, count, candidates, candidates, -8.0f, 7.0f);
    for (int i = 0; i < kPair; ++i) {
      const Vec candidate = div(sums.xl.x[i], positive_or_one(sums.ll.x[i]));
      const Vec explained = mul(sums.xl.x[i], candidate);
      const Mask better = less(best, explained);
      best = select(better, explained, best);
      found = select(better, candidate, found);
    }
  };
  int c = -kCandidates;
  for (; c <= kLastWithin; c += kPair) try_pair.template operator()<Limit::above>(c);
  for (; c <= kCandidates; c += kPair) try_pair.template operator()<Limit::both>(c);
  return found;
}

// The scale and the minimum of the rows at x.
Many<Vec, 2> best_with_minimum(const float* x, int count) {
  Vec low = load(x), high = low, sum = broadcast(0.0f);
  for (int k = 0; k < count; ++k) {
    const Vec value = load(x + k * kRows);
    low = min(value, low);
    high = max(value, high);
    sum = add(sum, value);
  }
  const Vec range = sub(high, low), inv_range = inverses(range);
  const Vec middle = add(mul(broadcast(0.5f), low), mul(broadcast(0.5f), high));
  // Where all values are equal, any scale holds them.
  Vec found = mul(range, broadcast(1.0f / 15.0f)), l = broadcast(0.0f);
  Vec best = broadcast(0.0f);  // the part of the variance that is explained, times n
  const Vec n = broadcast(static_cast<float>(count));
  const auto try_pair = [&]<Limit kLimit>(int c) {
    // Candidates keep the middle of the range where it is.
    const Pair inv = each<kPair>([&](int i) { return mul(broadcast(15.0f + 2 * step_of(c, i)), inv_range); });
    const Pair offset = each<kPair>([&](int i) { return sub(broadcast(7.5f), mul(middle, inv.x[i])); });
    const Sums sums = sums_of<kLimit, true>(x, count, inv, offset, 0.0f, 15.0f);
    for (int i = 0; i < kPair; ++i) {
      const Vec variance = sub(mul(n, sums.ll.x[i]), mul(sums.l.x[i], sums.l.x[i]));
      const Vec covariance = sub(mul(n, sums.xl.x[i]), mul(sums.l.x[i], sum));
      const Vec candidate = div(covariance, positive_or_one(variance));
      const Vec explained = mul(covariance, candidate);
      const Mask better = less(best, explained);
      best = select(better, explained, best);
      found = select(better, candidate, found);
      l = select(better, sums.l.x[i], l);
    }
  };
  // Values that are far from zero by their range lose what is to be rounded in x * inv, and may leave the range by
  // more.
  constexpr float kNear = 512.0f;
  const Vec farthest = mul(max(abs(low), abs(high)), inv_range);
  int c = -kCandidates;
  if (lanes(less(farthest, broadcast(kNear))) == (1u << ANYACCEL_LANES) - 1)
    for (; c <= kLastWithin; c += kPair) try_pair.template operator()<Limit::none>(c);
  for (; c <= kCandidates; c += kPair) try_pair.template operator()<Limit::both>(c);
  const Vec least = div(sub(sum, mul(found, l)), n);
  return {{found, select(less(broadcast(0.0f), best), least, low)}};
}

void quantise4(const float* x, int count, uint32_t* lines, uint16_t* scales, uint16_t* minima) {
  constexpr int kColumns = 8;  // of a line
  Row scale, minimum{};
  for (int r = 0; r < kRows; r += ANYACCEL_LANES) {
    Vec bad = broadcast(0.0f);  // NaN where a value is not finite
    for (int k = 0; k < count; ++k) bad = add(bad, mul(load(x + k * kRows + r), broadcast(0.0f)));
    if (minima != nullptr) {
      const auto [found, least] = best_with_minimum(x + r, count).x;
      store(scale.v + r, add(found, bad));
      store(minimum.v + r, least);
    } else {
      store(scale.v + r, add(best_symmetric(x + r, count), bad));
    }
  }
  Row inv, offset;
  for (int r = 0; r < kRows; ++r) {
    const uint16_t bits = to_f16(scale.v[r]);
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
    return (whole(x[(k + i) * kRows + r] * inv.v[r] + offset.v[r], 0.0f, 15.0f) & 15u) << (i % 4 * 8 + i / 4 * 4);
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
  for_row<64>(type, x,
              [&](int i, float value) { to[i] = static_cast<int8_t>(whole(value * inverse, -127.0f, 127.0f)); });
}

// --- ggml's blocks, whose type is a constant, so that reading them and writing planes are loops over vectors

using Rows = const uint8_t* const (&)[kBlockRows];

template <SourceType kType>
void keep_superblocks(const BlockLayout& layout, Rows rows, int64_t, uint8_t* block) {
  constexpr SuperblockType kSource = *superblock_type(kType);
  Superblock from;
  for (int64_t k0 = 0; k0 < layout.padded_cols; k0 += kSuperblock)
    for (int r = 0; r < kRows; ++r) {
      if (rows[r] == nullptr) continue;
      kSource.read(rows[r] + k0 / kSuperblock * kSource.bytes, from);
      uint8_t* factors = block + layout.factors_at(k0) + static_cast<size_t>(r) * 2;
      put(factors, from.factor);
      // It is subtracted there.
      if (kSource.minimum) put(factors + kRows * 2, static_cast<uint16_t>(from.minimum_factor ^ 0x8000u));
      uint8_t* scales = block + layout.scales_at(k0) + r;
      for (int g = 0; g < kSuperblock / kSource.group; ++g, scales += layout.scale_stride) {
        scales[0] = static_cast<uint8_t>(from.scales[g]);
        if (kSource.minimum) scales[kRows] = static_cast<uint8_t>(from.minima[g]);
      }
      for (int k = 0; k < kSuperblock; k += kUnitColumns)
        put_row(row_of(kSource.format), block + layout.unit_at(k0 + k), r, from.q + k);
    }
}

template <SourceType kType>
void keep_blocks(const BlockLayout& layout, Rows rows, int64_t cols, uint8_t* block) {
  constexpr bool kNibbles = kType == SourceType::q4_0 || kType == SourceType::q4_1;
  const FormatRow& format = row_of(layout.format);
  const bool bytes = layout.format == Format::i8;
  // Bytes have the sign that q4_0 has not; a format of more bits without a minimum takes more from its values.
  int plus = 0;
  if (bytes && kType == SourceType::q4_0) plus = -8;
  if (!bytes && !layout.minimum && kNibbles) plus = (1 << (format.bits - 1)) - 8;
  for (int64_t k0 = 0; k0 < cols; k0 += kSourceGroup) {
    uint8_t* unit = block + layout.unit_at(k0);
    for (int r = 0; r < kRows; ++r) {
      if (rows[r] == nullptr) continue;
      QuantisedBlock from = read_block(kType, rows[r] + k0 / kSourceGroup * block_bytes_of(kType));
      if (kType == SourceType::q4_0 && layout.minimum && !bytes) from.minimum = to_f16(-8.0f * from_f16(from.scale));
      for (int64_t k = k0; k < k0 + kSourceGroup; k += layout.group) {
        if (layout.scales == ScaleKind::powers)
          block[layout.scales_at(k) + static_cast<size_t>(r)] = static_cast<uint8_t>(from.scale);
        else
          put(scale_at(layout, block, k / layout.group, r), from.scale);
        if (layout.minimum) put(minimum_at(layout, block, k / layout.group, r), from.minimum);
      }
      for (int i = 0; i < kSourceGroup; ++i) from.q[i] = static_cast<uint8_t>(from.q[i] + plus);
      if (!bytes)
        put_row(format, unit, r, from.q);
      else
        for (int i = 0; i < kSourceGroup; i += 4) std::memcpy(unit + i8_at(i, r), from.q + i, 4);
    }
  }
}

void keep(const BlockLayout& layout, SourceType type, Rows rows, int64_t cols, uint8_t* block) {
  using enum SourceType;
  constexpr int kFirst = static_cast<int>(q8_0);
  // In the order of SourceType.
  constexpr void (*kKeep[])(const BlockLayout&, Rows, int64_t, uint8_t*) = {
      keep_blocks<q8_0>,       keep_blocks<q4_0>,      keep_blocks<q4_1>,      keep_blocks<q5_0>,
      keep_blocks<q5_1>,       keep_blocks<iq4_nl>,    keep_blocks<mxfp4>,     keep_superblocks<q2_k>,
      keep_superblocks<q3_k>,  keep_superblocks<q4_k>, keep_superblocks<q5_k>, keep_superblocks<q6_k>,
      keep_superblocks<iq4_xs>};
  static_assert(std::size(kKeep) == static_cast<int>(iq4_xs) - kFirst + 1);
  kKeep[static_cast<int>(type) - kFirst](layout, rows, cols, block);
}

constexpr PackKernels kKernels{quantise4, largest, as_bf16, as_i8, keep};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::PackKernels, anyaccel::llm::kKernels)
