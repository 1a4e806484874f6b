// SPDX-License-Identifier: Apache-2.0
// ISA: avx2 avx_vnni avx512 avx512_vnni neon
// Matrix products (gemm) of quantised weights with activations rounded to 8 bits, which have a scale for each token and
// unit of 32 columns (as in gemv.h): sums of a unit are integers. VNNI multiplies int8 and 4-bit weights at four times
// the rate of floats. Without it sums of 4-bit weights fit 16 bits, at twice the rate; int8 ones do not, and are not
// for here.
//
// A panel of activations: for each unit [token][32 columns] int8, then [token] scale, then [token] scale * sum.
// Unpacked weights: for each unit 8 lines [16 rows][4 columns], then 16 scales, then 16 minima.
#include "llm/kernels/gemm_integer.h"
#include "llm/pack/bit_planes.h"
#include "simd/pick.h"
#include "simd/simd.h"

namespace anyaccel::llm {
namespace {

using namespace simd::ANYACCEL_ISA_VARIANT;

constexpr int kTokens = 32;  // of a panel
constexpr int64_t kTokenBytes = kUnit + 8;
constexpr int64_t kPanelUnit = kTokens * kTokenBytes;
constexpr int kLines = 8;                                          // of weights a unit
constexpr int64_t kWeightUnit = (kLines + 2) * 64;                 // scales and minima too
constexpr int kBlocks = kLanes == 16 ? 2 : 1;                      // of a tile
constexpr int kWidth = kBlocks * kRows;                            // rows of a tile
constexpr int kVecs = kWidth / kLanes;                             // vectors of them
constexpr int64_t kVecBytes = 4 * kLanes;                          // of a line
constexpr int kAtOnce = sizeof(NibbleSum) > sizeof(IVec) ? 2 : 4;  // tokens whose sums fit the registers
// Whether there is an instruction for products of bytes, so that int8 weights are for here.
constexpr bool kBytes = row_of(Isa::ANYACCEL_ISA_VARIANT).variants == Variants::some_kernels;

void pack(const float* x, int64_t stride, const int32_t* rows, int tokens, int64_t cols, int64_t total, void* panel) {
  for (int t = 0; t < tokens; ++t) {
    const float* row = x + (rows != nullptr ? rows[t] : t) * stride;
    auto* out = static_cast<uint8_t*>(panel);
    for (int64_t u = 0; u < total; ++u, out += kPanelUnit) {
      auto* q = reinterpret_cast<int8_t*>(out + t * kUnit);
      const QuantisedUnit unit = quantise_unit(row + u * kUnit, cols - u * kUnit, q);
      std::memcpy(out + kTokens * kUnit + t * 4, &unit.scale, 4);
      std::memcpy(out + kTokens * (kUnit + 4) + t * 4, &unit.sum, 4);
    }
  }
}

void unpack(const BlockLayout& layout, const uint8_t* block, int64_t unit, int64_t units, uint8_t* to) {
  for (int64_t u = unit; u < unit + units; ++u, to += kWeightUnit) {
    const uint8_t* from = block + layout.unit_at(u * kUnit);
    if (layout.format == Format::i8) {
      for (int b = 0; b < kLines * 64; ++b) to[b] = from[b] ^ kAdded;
    } else if (layout.format != Format::i4) {
      const FormatRow& format = row_of(layout.format);
      expand_unit(format, from, format.codes != nullptr ? kAdded : 0, to);
    } else {
      for (int i = 0; i < kLines; i += 2, from += 64)
        for (int64_t b = 0; b < 64; b += kVecBytes) {
          const Nibbles line = load_nibbles(from + b);
          store(static_cast<void*>(to + i * 64 + b), line.low);
          store(static_cast<void*>(to + (i + 1) * 64 + b), line.high);
        }
    }
    write_scales(layout, block, u * kUnit, to + kLines * 64);
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
  Vec scale(int vec) const { return load(reinterpret_cast<const float*>(at(vec) + kLines * 64)); }
  Vec minimum(int vec) const { return load(reinterpret_cast<const float*>(at(vec) + (kLines + 1) * 64)); }
};

// Adds kCount tokens' products over a unit. `held`: the unit's weights, in registers; null: they are loaded.
template <int kCount>
inline void add_unit(const Nibbles (*held)[kLines / 2], const UnitWeights& weights, const Vec (&scale)[kVecs],
                     const Vec (&minimum)[kVecs], const uint8_t* x, int token, Sums& sums) {
  const auto* q = reinterpret_cast<const int8_t*>(x + token * kUnit);
  NibbleSum unit[kCount][kVecs];
#pragma GCC unroll 4
  for (int t = 0; t < kCount; ++t)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) unit[t][v] = NibbleSum::zero();
#pragma GCC unroll 4
  for (int i = 0; i < kLines / 2; ++i) {
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
    std::memcpy(&sum_x, x + kTokens * (kUnit + 4) + (token + t) * 4, 4);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      float* at = &sums[token + t][v * kLanes];
      const Vec total = fma(minimum[v], broadcast(sum_x), load(at));
      store(at, fma(convert(unit[t][v].total()), mul(scale[v], broadcast(scale_x)), total));
    }
  }
}

// A unit of a tile times all tokens of a panel, whose sums are in the L1 cache. Registers hold the unit's weights where
// there are 32 of them, and else the sums of a few tokens.
void multiply_unit(const uint8_t* x, int tokens, const UnitWeights& weights, Sums& sums) {
  Vec scale[kVecs], minimum[kVecs];
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) scale[v] = weights.scale(v), minimum[v] = weights.minimum(v);
  int t = 0;
  if constexpr (kLanes == 16) {
    Nibbles held[kVecs][kLines / 2];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v)
#pragma GCC unroll 4
      for (int i = 0; i < kLines / 2; ++i) held[v][i] = weights.lines(v, i);
    for (; t < tokens; ++t) add_unit<1>(held, weights, scale, minimum, x, t, sums);
  } else {
    for (; t + kAtOnce <= tokens; t += kAtOnce) add_unit<kAtOnce>(nullptr, weights, scale, minimum, x, t, sums);
    for (; t < tokens; ++t) add_unit<1>(nullptr, weights, scale, minimum, x, t, sums);
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

void multiply_tile(const uint8_t* x, int tokens, int64_t units, UnitWeights weights, const GemmTile& to) {
  alignas(64) Sums sums;
  for (int t = 0; t < tokens; ++t) {
    for (int r = 0; r < kWidth; r += kLanes) store(&sums[t][r], broadcast(0.0f));
    for (int r = 0; r < kWidth; r += kRows) __builtin_prefetch(to.out + t * to.stride + r, 1);
  }
  for (int64_t u = 0; u < units; ++u, x += kPanelUnit, weights.data += kWeightUnit)
    multiply_unit(x, tokens, weights, sums);
  write(sums, tokens, to);
}

// The last block of a matrix may have no second one: it is multiplied twice, and written once.
void multiply(const void* panel, int tokens, int64_t total, int64_t unit, int64_t units, const uint8_t* weights,
              int64_t weight_stride, int64_t blocks, const GemmTile& to) {
  (void)total;
  const uint8_t* x = static_cast<const uint8_t*>(panel) + unit * kPanelUnit;
  GemmTile tile = to;
  for (int64_t b = 0; b < blocks; b += kBlocks) {
    multiply_tile(x, tokens, units, {weights, blocks - b >= kBlocks ? weight_stride : 0}, tile);
    weights += kBlocks * weight_stride;
    tile.out += kWidth;
    tile.rows -= kWidth;
    if (tile.bias != nullptr) tile.bias += kWidth;
  }
}

constexpr IntegerGemmKernels kKernels{{.operands = GemmKernels::Operands::bytes,
                                       .full_panels = true,
                                       .panel_tokens = kTokens,
                                       .tile_blocks = kBlocks,
                                       .units = 64,
                                       .cache_bytes = size_t{kLanes == 16 ? 512 : 160} << 10,
                                       .activation_bytes = kTokenBytes,
                                       .weight_bytes = kWeightUnit,
                                       .unpack_cost = 8,
                                       .pack = pack,
                                       .unpack = unpack,
                                       .multiply = multiply,
                                       .begin = nullptr,
                                       .end = nullptr},
                                      kBytes};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::IntegerGemmKernels, anyaccel::llm::kKernels)
