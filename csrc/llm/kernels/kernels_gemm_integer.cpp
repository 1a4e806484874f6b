// SPDX-License-Identifier: Apache-2.0
// ISA: avx2 avx_vnni avx512 avx512_vnni neon
// Matrix products (gemm) of quantised weights with activations rounded to 8 bits, which have a scale for each token and
// unit of 32 columns (as in gemv.h): sums of a unit are integers. VNNI multiplies int8 and 4-bit weights at four times
// the rate of floats. Without it sums of 4-bit weights fit 16 bits, at twice the rate; those of 5 and 6 bits are added
// up as 32 bits after each two products; int8 is not for here, and codes are with AVX2 only.
//
// Weights in groups of 16 have two parts of a unit, each with a scale of its own; others have one part.
//
// A panel of activations: for each unit [token][32 columns] int8, then [token] scale, then of each part [token] sum: an
// integer, or for weights with minima a float times the scale. Unpacked weights: for each unit 8 lines [16 rows][4
// columns], then of each part what write_scales() has.
#include <numeric>

#include "llm/kernels/expand.h"
#include "llm/kernels/gemm_integer.h"
#include "simd/pick.h"
#include "simd/simd.h"

namespace anyaccel::llm {
namespace {

using namespace simd::ANYACCEL_ISA_VARIANT;

constexpr int kTokens = 32;  // of a panel
// What turns a product of integers into values: a scale of each group of columns, with or without a minimum, or one of
// each row, by which sums are multiplied once, at their end.
enum class Scaled : uint8_t { groups, with_minima, rows };
constexpr int kLines = 8;  // of weights a unit
template <int kParts>
constexpr int64_t kTokenBytes = kUnit + 4 + 4 * kParts;
template <int kParts>
constexpr int64_t kPanelUnit = kTokens * kTokenBytes<kParts>;
template <int kParts>
constexpr int64_t kWeightUnit = (kLines + 2 * kParts) * 64;        // scales and minima too
constexpr int kBlocks = kLanes == 16 ? 2 : 1;                      // of a tile
constexpr int kWidth = kBlocks * kRows;                            // rows of a tile
constexpr int kVecs = kWidth / kLanes;                             // vectors of them
constexpr int64_t kVecBytes = 4 * kLanes;                          // of a line
constexpr int kAtOnce = sizeof(NibbleSum) > sizeof(IVec) ? 2 : 4;  // tokens whose sums fit the registers

// Sums that take turns within a unit. A processor waits for the last product before it adds another: with one sum, more
// products wait than its schedulers hold.
template <class Sum>
constexpr int kChains = kLanes == 16 && !Sum::kOf16Bits ? 2 : 1;

// Sums of weights of 5 and 6 bits where NibbleSum has 16 bits.
struct WideSum {
  static constexpr bool kOf16Bits = false;
  IVec v;
  static WideSum zero() { return {broadcast(int32_t{0})}; }
  WideSum plus(Nibbles w, const int8_t* x) const { return {add(v, NibbleSum::zero().plus(w, x).total())}; }
  IVec total() const { return v; }
};

#if ANYACCEL_LANES == 8
// Sums of codes, which have a sign, where a product of bytes wants one without: it is moved to the activation. (For
// int8 this is no faster than gemv's 16 bits.)
struct ByteSum {
  static constexpr bool kOf16Bits = false;
  IVec v;
  static ByteSum zero() { return {broadcast(int32_t{0})}; }
  static IVec products(IVec w, IVec x) {
    return madd_halves(madd_bytes(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)), broadcast_half(1));
  }
  ByteSum plus(Nibbles w, const int8_t* x) const {
    return {add(v, add(products(w.low, quad_at(x)), products(w.high, quad_at(x + 4))))};
  }
  IVec total() const { return v; }
};
#endif

template <int kParts, bool kMinimum>
void pack(const float* x, int64_t stride, const int32_t* rows, int tokens, int64_t cols, int64_t total, void* panel) {
  for (int t = 0; t < tokens; ++t) {
    const float* row = x + (rows != nullptr ? rows[t] : t) * stride;
    auto* out = static_cast<uint8_t*>(panel);
    for (int64_t u = 0; u < total; ++u, out += kPanelUnit<kParts>) {
      auto* q = reinterpret_cast<int8_t*>(out + t * kUnit);
      const QuantisedUnit unit = quantise_unit(row + u * kUnit, cols - u * kUnit, q);
      uint8_t* values = out + kTokens * kUnit + t * 4;
      std::memcpy(values, &unit.scale, 4);
      for (int part = 0; part < kParts; ++part) {
        QuantisedUnit own = unit;
        if constexpr (kParts == 2) own.sum = std::accumulate(q + part * kUnit / 2, q + (part + 1) * kUnit / 2, 0);
        const float scaled = own.scaled_sum();
        std::memcpy(values + kTokens * 4 * (part + 1), kMinimum ? static_cast<const void*>(&scaled) : &own.sum, 4);
      }
    }
  }
}

template <int kParts>
void unpack(const BlockLayout& layout, const uint8_t* block, int64_t unit, int64_t units, uint8_t* to) {
  const FormatRow& format = row_of(layout.format);
  int8_t codes[16] = {};
  if (format.codes != nullptr)
    for (int i = 0; i < 16; ++i) codes[i] = static_cast<int8_t>(format.codes[i] + kAdded);
  const Table table = load_table(codes);
  for (int64_t u = unit; u < unit + units; ++u, to += kWeightUnit<kParts>) {
    const uint8_t* from = block + layout.unit_at(u * kUnit);
    if (layout.format == Format::i8) {
      for (int b = 0; b < kLines * 64; ++b) to[b] = from[b] ^ kAdded;
    } else if (format.codes != nullptr) {
      expand_unit(format, from, to, [&](Nibbles index) { return look_up(table, index); });
    } else {
      expand_unit(format, from, to, [](Nibbles values) { return values; });
    }
    for (int part = 0; part < kParts; ++part)
      write_scales(layout, block, u * kUnit + part * kUnit / 2, to + (kLines + 2 * part) * 64);
  }
}

using Sums = float[kTokens][kWidth];

// Some of a tile's vectors of weights.
struct UnitWeights {
  const uint8_t* data;  // of a unit
  int64_t stride;       // to the next block

  const uint8_t* at(int vec) const { return data + vec * kLanes / kRows * stride + vec * kLanes % kRows * 4; }
  Nibbles lines(int vec, int pair) const {
    return {load_ints(at(vec) + 2 * pair * 64), load_ints(at(vec) + (2 * pair + 1) * 64)};
  }
  Vec scale(int vec, int part) const {
    return load(reinterpret_cast<const float*>(at(vec) + (kLines + 2 * part) * 64));
  }
  Vec minimum(int vec, int part) const {
    return load(reinterpret_cast<const float*>(at(vec) + (kLines + 2 * part + 1) * 64));
  }
  int32_t added() const {  // to q, without minima
    int32_t number;
    std::memcpy(&number, data + (kLines + 1) * 64, 4);
    return number;
  }
};

// Of a part of a unit.
struct PartScales {
  Vec scale[kVecs], minimum[kVecs];
};

// Adds kCount tokens' products over a unit. `held`: the unit's weights, in registers; null: they are loaded.
template <class Sum, int kParts, Scaled kScaled, int kCount>
inline void add_unit(const Nibbles (*held)[kLines / 2], const UnitWeights& weights, const PartScales (&scales)[kParts],
                     int32_t added, const uint8_t* x, int token, Sums& sums) {
  constexpr bool kMinimum = kScaled == Scaled::with_minima;
  const auto* q = reinterpret_cast<const int8_t*>(x + token * kUnit);
  float scale_x[kCount];
  std::memcpy(scale_x, x + kTokens * kUnit + token * 4, sizeof scale_x);
#pragma GCC unroll 2
  for (int part = 0; part < kParts; ++part) {
    Sum unit[kCount][kVecs][kChains<Sum>];
    std::conditional_t<kMinimum, float, int32_t> sum_x[kCount];
    std::memcpy(sum_x, x + kTokens * (kUnit + 4 + 4 * part) + token * 4, sizeof sum_x);
#pragma GCC unroll 4
    for (int t = 0; t < kCount; ++t)
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        for (Sum& sum : unit[t][v]) sum = Sum::zero();
        if constexpr (!kMinimum && !Sum::kOf16Bits) unit[t][v][0].v = broadcast(added * sum_x[t]);
      }
#pragma GCC unroll 4
    for (int j = 0; j < kLines / 2 / kParts; ++j) {
      const int i = part * kLines / 2 / kParts + j;
      Nibbles w[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) w[v] = held != nullptr ? held[v][i] : weights.lines(v, i);
#pragma GCC unroll 4
      for (int t = 0; t < kCount; ++t)
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          Sum& sum = unit[t][v][j % kChains<Sum>];
          sum = sum.plus(w[v], q + t * kUnit + 8 * i);
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < kCount; ++t)
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        IVec total = unit[t][v][0].total();
#pragma GCC unroll 4
        for (int c = 1; c < kChains<Sum>; ++c) total = add(total, unit[t][v][c].total());
        float* at = &sums[token + t][v * kLanes];
        Vec result = load(at);
        if constexpr (kMinimum)
          result = fma(scales[part].minimum[v], broadcast(sum_x[t]), result);
        else if constexpr (Sum::kOf16Bits)
          total = add(total, broadcast(added * sum_x[t]));
        const Vec scale =
            kScaled == Scaled::rows ? broadcast(scale_x[t]) : mul(scales[part].scale[v], broadcast(scale_x[t]));
        store(at, fma(convert(total), scale, result));
      }
  }
}

// A unit of a tile times all tokens of a panel, whose sums are in the L1 cache. Registers hold the unit's weights where
// there are 32 of them, and else the sums of a few tokens.
template <class Sum, int kParts, Scaled kScaled>
void multiply_unit(const uint8_t* x, int tokens, const UnitWeights& weights, int32_t added, Sums& sums) {
  PartScales scales[kParts];
#pragma GCC unroll 2
  for (int part = 0; part < kParts && kScaled != Scaled::rows; ++part)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      scales[part].scale[v] = weights.scale(v, part);
      if constexpr (kScaled == Scaled::with_minima) scales[part].minimum[v] = weights.minimum(v, part);
    }
  int t = 0;
  if constexpr (kLanes == 16) {
    Nibbles held[kVecs][kLines / 2];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v)
#pragma GCC unroll 4
      for (int i = 0; i < kLines / 2; ++i) held[v][i] = weights.lines(v, i);
    for (; t < tokens; ++t) add_unit<Sum, kParts, kScaled, 1>(held, weights, scales, added, x, t, sums);
  } else {
    for (; t + kAtOnce <= tokens; t += kAtOnce)
      add_unit<Sum, kParts, kScaled, kAtOnce>(nullptr, weights, scales, added, x, t, sums);
    for (; t < tokens; ++t) add_unit<Sum, kParts, kScaled, 1>(nullptr, weights, scales, added, x, t, sums);
  }
}

// out = scale * (sums + bias), or added to it; `weights`: by whose scales of rows sums are multiplied; or null.
void write(const Sums& sums, int tokens, const UnitWeights* weights, const GemmTile& to) {
  const Vec none = broadcast(0.0f);
  for (int r = 0; r < kWidth && r < to.rows; r += kLanes) {
    const int64_t valid = std::min<int64_t>(kLanes, to.rows - r);
    const Vec bias = to.bias != nullptr ? load_n(to.bias + r, valid, none) : none;
    const Vec of_rows = weights != nullptr ? weights->scale(r / kLanes, 0) : broadcast(1.0f);
    for (int t = 0; t < tokens; ++t) {
      float* out = to.out + t * to.stride + r;
      Vec sum = mul(fma(load(&sums[t][r]), of_rows, bias), broadcast(to.scale));
      if (to.add) sum = add(sum, load_n(out, valid, none));
      store_n(out, valid, sum);
    }
  }
}

template <class Sum, int kParts, Scaled kScaled>
void multiply_tile(const uint8_t* x, int tokens, int64_t units, UnitWeights weights, const GemmTile& to) {
  alignas(64) Sums sums;
  for (int t = 0; t < tokens; ++t) {
    for (int r = 0; r < kWidth; r += kLanes) store(&sums[t][r], broadcast(0.0f));
    for (int r = 0; r < kWidth; r += kRows) __builtin_prefetch(to.out + t * to.stride + r, 1);
  }
  const UnitWeights first = weights;
  for (int64_t u = 0; u < units; ++u, x += kPanelUnit<kParts>, weights.data += kWeightUnit<kParts>) {
    fetch_share(to, u, units);
    const int32_t added = kScaled == Scaled::rows ? first.added() : weights.added();
    multiply_unit<Sum, kParts, kScaled>(x, tokens, weights, added, sums);
  }
  write(sums, tokens, kScaled == Scaled::rows ? &first : nullptr, to);
}

// The last block of a matrix may have no second one: it is multiplied twice, and written once.
template <class Sum, int kParts, Scaled kScaled>
void multiply(const void* panel, int tokens, int64_t total, int64_t unit, int64_t units, const uint8_t* weights,
              int64_t weight_stride, int64_t blocks, const GemmTile& to) {
  (void)total;
  const uint8_t* x = static_cast<const uint8_t*>(panel) + unit * kPanelUnit<kParts>;
  GemmTile tile = to;
  for (int64_t b = 0; b < blocks; b += kBlocks) {
    multiply_tile<Sum, kParts, kScaled>(x, tokens, units, {weights, blocks - b >= kBlocks ? weight_stride : 0}, tile);
    tile.next_weights += tile.next_stride;
    weights += kBlocks * weight_stride;
    tile.out += kWidth;
    tile.rows -= kWidth;
    if (tile.bias != nullptr) tile.bias += kWidth;
  }
}

// Measured on Zen 5: fewer tokens are multiplied faster by gemv in turns. It is the faster, the less unpacking a format
// takes, which it does again for every few tokens.
int from_tokens(const Shape& shape) {
  const bool simple = shape.format == Format::i4 || (shape.format == Format::i8 && shape.group != kUnit / 2);
  const bool halves = shape.scales == ScaleKind::halves;
  if (kLanes == 16) return simple && halves ? 65 : 33;
  return !simple ? 17 : halves ? 129 : 65;
}

template <class Sum, int kParts, Scaled kScaled>
constexpr GemmKernels kGemm{.operands = GemmKernels::Operands::bytes,
                            .full_panels = true,
                            .panel_tokens = kTokens,
                            .tile_blocks = kBlocks,
                            .units = 256,
                            .cache_bytes = size_t{kLanes == 16 ? 512 : 160} << 10,
                            .activation_bytes = kTokenBytes<kParts>,
                            .weight_bytes = kWeightUnit<kParts>,
                            .unpack_cost = 8,
                            .pack = pack<kParts, kScaled == Scaled::with_minima>,
                            .unpack = unpack<kParts>,
                            .multiply = multiply<Sum, kParts, kScaled>,
                            .begin = nullptr,
                            .end = nullptr,
                            .from_tokens = from_tokens};
template <class Sum>
const GemmKernels* of_group(const Shape& shape) {
  using enum Scaled;
  if (shape.group == 0) return &kGemm<Sum, 1, rows>;
  if (shape.group == kUnit / 2) return shape.minimum ? &kGemm<Sum, 2, with_minima> : &kGemm<Sum, 2, groups>;
  return shape.minimum ? &kGemm<Sum, 1, with_minima> : &kGemm<Sum, 1, groups>;
}
const GemmKernels* find(const Shape& shape) {
  const FormatRow& format = row_of(shape.format);
  if constexpr (NibbleSum::kOf16Bits) {
#if ANYACCEL_LANES == 8
    if (format.codes != nullptr) return of_group<ByteSum>(shape);
#endif
    if (format.bits == 8 || format.codes != nullptr) return nullptr;
    if (format.bits > 4) return of_group<WideSum>(shape);
  }
  return of_group<NibbleSum>(shape);
}

constexpr IntegerGemmKernels kKernels{find};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::IntegerGemmKernels, anyaccel::llm::kKernels)
