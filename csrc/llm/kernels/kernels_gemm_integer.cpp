// SPDX-License-Identifier: Apache-2.0
// ISA: avx2 avx_vnni avx512 avx512_vnni neon
// Matrix products (gemm) of quantised weights with activations rounded to 8 bits, which have a scale for each token and
// unit of 32 columns (as in gemv.h): sums of a unit are integers. VNNI multiplies int8 and 4-bit weights at four times
// the rate of floats. Without it sums of 4-bit weights fit 16 bits, at twice the rate; those of 5 and 6 bits are added
// up as 32 bits after each two products; int8 and codes are not for here.
//
// Weights in groups of 16 have two parts of a unit, each with a scale of its own; others have one part.
//
// A panel of activations: for each unit [token][32 columns] int8, then [token] scale, then of each part [token] scale *
// sum. Unpacked weights: for each unit 8 lines [16 rows][4 columns], then of each part 16 scales, then 16 minima.
#include "llm/kernels/expand.h"
#include "llm/kernels/gemm_integer.h"
#include "simd/pick.h"
#include "simd/simd.h"

namespace anyaccel::llm {
namespace {

using namespace simd::ANYACCEL_ISA_VARIANT;

constexpr int kTokens = 32;  // of a panel
constexpr int kLines = 8;    // of weights a unit
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

// Sums of weights of 5 and 6 bits where NibbleSum has 16 bits.
struct WideSum {
  IVec v;
  static WideSum zero() { return {broadcast(int32_t{0})}; }
  WideSum plus(Nibbles w, const int8_t* x) const { return {add(v, NibbleSum::zero().plus(w, x).total())}; }
  IVec total() const { return v; }
};

template <int kParts>
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
        float sum = unit.sum;
        if constexpr (kParts == 2) {
          int32_t quantised = 0;
          for (int i = 0; i < kUnit / 2; ++i) quantised += q[part * kUnit / 2 + i];
          sum = unit.scale * static_cast<float>(quantised);
        }
        std::memcpy(values + kTokens * 4 * (part + 1), &sum, 4);
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
};

// Of a part of a unit.
struct PartScales {
  Vec scale[kVecs], minimum[kVecs];
};

// Adds kCount tokens' products over a unit. `held`: the unit's weights, in registers; null: they are loaded.
template <class Sum, int kParts, int kCount>
inline void add_unit(const Nibbles (*held)[kLines / 2], const UnitWeights& weights, const PartScales (&scales)[kParts],
                     const uint8_t* x, int token, Sums& sums) {
  const auto* q = reinterpret_cast<const int8_t*>(x + token * kUnit);
#pragma GCC unroll 2
  for (int part = 0; part < kParts; ++part) {
    Sum unit[kCount][kVecs];
#pragma GCC unroll 4
    for (int t = 0; t < kCount; ++t)
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) unit[t][v] = Sum::zero();
#pragma GCC unroll 4
    for (int j = 0; j < kLines / 2 / kParts; ++j) {
      const int i = part * kLines / 2 / kParts + j;
      Nibbles w[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) w[v] = held != nullptr ? held[v][i] : weights.lines(v, i);
#pragma GCC unroll 4
      for (int t = 0; t < kCount; ++t)
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) unit[t][v] = unit[t][v].plus(w[v], q + t * kUnit + 8 * i);
    }
#pragma GCC unroll 4
    for (int t = 0; t < kCount; ++t) {
      float scale_x, sum_x;
      std::memcpy(&scale_x, x + kTokens * kUnit + (token + t) * 4, 4);
      std::memcpy(&sum_x, x + kTokens * (kUnit + 4 + 4 * part) + (token + t) * 4, 4);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        float* at = &sums[token + t][v * kLanes];
        const Vec total = fma(scales[part].minimum[v], broadcast(sum_x), load(at));
        store(at, fma(convert(unit[t][v].total()), mul(scales[part].scale[v], broadcast(scale_x)), total));
      }
    }
  }
}

// A unit of a tile times all tokens of a panel, whose sums are in the L1 cache. Registers hold the unit's weights where
// there are 32 of them, and else the sums of a few tokens.
template <class Sum, int kParts>
void multiply_unit(const uint8_t* x, int tokens, const UnitWeights& weights, Sums& sums) {
  PartScales scales[kParts];
#pragma GCC unroll 2
  for (int part = 0; part < kParts; ++part)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      scales[part].scale[v] = weights.scale(v, part);
      scales[part].minimum[v] = weights.minimum(v, part);
    }
  int t = 0;
  if constexpr (kLanes == 16) {
    Nibbles held[kVecs][kLines / 2];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v)
#pragma GCC unroll 4
      for (int i = 0; i < kLines / 2; ++i) held[v][i] = weights.lines(v, i);
    for (; t < tokens; ++t) add_unit<Sum, kParts, 1>(held, weights, scales, x, t, sums);
  } else {
    for (; t + kAtOnce <= tokens; t += kAtOnce) add_unit<Sum, kParts, kAtOnce>(nullptr, weights, scales, x, t, sums);
    for (; t < tokens; ++t) add_unit<Sum, kParts, 1>(nullptr, weights, scales, x, t, sums);
  }
}

// out = scale * (sums + bias), or added to it.
void write(const Sums& sums, int tokens, const GemmTile& to) {
  const Vec none = broadcast(0.0f);
  for (int r = 0; r < kWidth && r < to.rows; r += kLanes) {
    const int64_t valid = std::min<int64_t>(kLanes, to.rows - r);
    const Vec bias = to.bias != nullptr ? load_n(to.bias + r, valid, none) : none;
    for (int t = 0; t < tokens; ++t) {
      float* out = to.out + t * to.stride + r;
      Vec sum = mul(add(load(&sums[t][r]), bias), broadcast(to.scale));
      if (to.add) sum = add(sum, load_n(out, valid, none));
      store_n(out, valid, sum);
    }
  }
}

template <class Sum, int kParts>
void multiply_tile(const uint8_t* x, int tokens, int64_t units, UnitWeights weights, const GemmTile& to) {
  alignas(64) Sums sums;
  for (int t = 0; t < tokens; ++t) {
    for (int r = 0; r < kWidth; r += kLanes) store(&sums[t][r], broadcast(0.0f));
    for (int r = 0; r < kWidth; r += kRows) __builtin_prefetch(to.out + t * to.stride + r, 1);
  }
  for (int64_t u = 0; u < units; ++u, x += kPanelUnit<kParts>, weights.data += kWeightUnit<kParts>)
    multiply_unit<Sum, kParts>(x, tokens, weights, sums);
  write(sums, tokens, to);
}

// The last block of a matrix may have no second one: it is multiplied twice, and written once.
template <class Sum, int kParts>
void multiply(const void* panel, int tokens, int64_t total, int64_t unit, int64_t units, const uint8_t* weights,
              int64_t weight_stride, int64_t blocks, const GemmTile& to) {
  (void)total;
  const uint8_t* x = static_cast<const uint8_t*>(panel) + unit * kPanelUnit<kParts>;
  GemmTile tile = to;
  for (int64_t b = 0; b < blocks; b += kBlocks) {
    multiply_tile<Sum, kParts>(x, tokens, units, {weights, blocks - b >= kBlocks ? weight_stride : 0}, tile);
    weights += kBlocks * weight_stride;
    tile.out += kWidth;
    tile.rows -= kWidth;
    if (tile.bias != nullptr) tile.bias += kWidth;
  }
}

template <class Sum, int kParts, int kFrom>
constexpr GemmKernels kGemm{.operands = GemmKernels::Operands::bytes,
                            .full_panels = true,
                            .panel_tokens = kTokens,
                            .tile_blocks = kBlocks,
                            .units = 64,
                            .cache_bytes = size_t{kLanes == 16 ? 512 : 160} << 10,
                            .activation_bytes = kTokenBytes<kParts>,
                            .weight_bytes = kWeightUnit<kParts>,
                            .unpack_cost = 8,
                            .pack = pack<kParts>,
                            .unpack = unpack<kParts>,
                            .multiply = multiply<Sum, kParts>,
                            .begin = nullptr,
                            .end = nullptr,
                            .from_tokens = kFrom};
// Measured on Zen 5: fewer tokens are multiplied faster by gemv in turns. It is the faster, the less unpacking a format
// takes, which it does again for every few tokens.
int from_tokens(const Shape& shape) {
  const FormatRow& format = row_of(shape.format);
  if (kLanes == 16) return shape.group == kUnit / 2 ? 65 : 129;
  if (shape.format == Format::i4 || (shape.format == Format::i8 && shape.group != kUnit / 2)) return 129;
  return format.bits == 5 || format.bits == 6 ? 65 : 17;
}
template <class Sum, int kParts>
const GemmKernels* from(int tokens) {
  return tokens == 129 ? &kGemm<Sum, kParts, 129> : tokens == 65 ? &kGemm<Sum, kParts, 65> : &kGemm<Sum, kParts, 17>;
}
template <class Sum>
const GemmKernels* of_group(const Shape& shape) {
  const int tokens = from_tokens(shape);
  return shape.group == kUnit / 2 ? from<Sum, 2>(tokens) : from<Sum, 1>(tokens);
}
const GemmKernels* find(const Shape& shape) {
  const FormatRow& format = row_of(shape.format);
  if constexpr (NibbleSum::kOf16Bits) {
    if (format.bits == 8 || format.codes != nullptr) return nullptr;
    if (format.bits > 4) return of_group<WideSum>(shape);
  }
  return of_group<NibbleSum>(shape);
}

constexpr IntegerGemmKernels kKernels{find};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::IntegerGemmKernels, anyaccel::llm::kKernels)
