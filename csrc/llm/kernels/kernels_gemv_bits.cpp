// SPDX-License-Identifier: Apache-2.0
// ISA: every avx_vnni avx512_vnni neon_dot
// Products with few tokens (gemv) of weights in planes of bits (bit_planes.h), and of codes.
#include <utility>

#include "llm/kernels/gemv_integer.h"
#include "llm/pack/bit_planes.h"

namespace anyaccel::llm {
namespace {

// Calls fn(0), fn(kStep), ..., as constants, for numbers below kEnd.
template <int kEnd, int kStep, class Fn>
[[gnu::always_inline]] inline void each_step(const Fn& fn) {
  [&]<int... kNumber>(std::integer_sequence<int, kNumber...>) {
    (fn(std::integral_constant<int, kStep * kNumber>{}), ...);
  }(std::make_integer_sequence<int, kEnd / kStep>{});
}

// Eight columns from kColumn on of a plane of a unit.
template <int kBits, int kColumn>
inline auto load_plane(const uint8_t* plane) {
  constexpr int kFields = 8 / kBits, kQuad = kColumn / 4;
  static_assert(kFields >= 2);
  const uint8_t* line = plane + kQuad / kFields * kPlaneLine;
  return each<kVecs>([&](int v) { return load_bits<kBits, kQuad % kFields * kBits>(line + v * kVecBytes); });
}

// The same of a unit with a second plane.
template <int kLow, int kHigh, int kColumn>
inline auto load_columns(const uint8_t* unit) {
  const auto low = load_plane<kLow, kColumn>(unit);
  if constexpr (kHigh == 0) {
    return low;
  } else {
    const auto high = load_plane<kHigh, kColumn>(unit + kLow * kPlaneLine);
    return each<kVecs>([&](int v) { return join<kLow>(low.x[v], high.x[v]); });
  }
}

// What products are added to: the sums so far, or zero where a NibbleSum is too short for them (simd.h).
inline Many<NibbleSum, kVecs> begin(const Ints& sums) {
  return each<kVecs>([&]<class Sum = NibbleSum>(int v) {
    if constexpr (Sum::kOf16Bits)
      return Sum::zero();
    else
      return Sum{sums.x[v]};
  });
}

// Values of kLow + kHigh bits. kHalves: two groups of weights to one of activations.
template <int kLow, int kHigh, bool kHalves, bool kMinimum>
struct PlanesKernel {
  template <int M, int S>
  static void blocks(const BlockLayout& layout, const uint8_t* (&w)[S], const uint8_t* x_bytes, Floats (&out)[S][M]) {
    constexpr int kColumns = kHalves ? kActivationGroup / 2 : kActivationGroup;
    constexpr int kLines = kLow + kHigh;  // of a unit
    constexpr bool kShort = NibbleSum::kOf16Bits;
    constexpr int kSumColumns = !kShort ? kColumns : kLines == 6 ? 8 : kLines == 5 ? 16 : kColumns;
    const auto* x = reinterpret_cast<const int8_t*>(x_bytes);
    const auto* params = reinterpret_cast<const GroupParams*>(x + layout.padded_cols * M);
    const auto* first_sums = reinterpret_cast<const int32_t*>(params + layout.padded_cols / kActivationGroup * M);
    Scales<S> scales[S];
    for (int s = 0; s < S; ++s)
      for (int t = 0; t < M; ++t) out[s][t] = all(broadcast(0.0f));
    for (int64_t k = 0; k < layout.padded_cols; k += kActivationGroup) {
      const bool begins = layout.in_section(k) == 0, superblock = k % kSuperblock == 0;
      const auto columns = columns_of<M>(x);
#pragma GCC unroll kStreams
      for (int s = 0; s < S; ++s) {
        if (begins)
          scales[s].begin(layout, w[s]);
        else if (superblock)
          scales[s].next_superblock();
#pragma GCC unroll 8
        for (int line = 0; line < kLines; ++line) ask_for<S>(w[s] + line * kPlaneLine);
        const auto part = [&]<int kFirst>(std::integral_constant<int, kFirst>) {
          int32_t sum_x[M];
          Ints sums[M];
#pragma GCC unroll kUnroll
          for (int t = 0; t < M; ++t) {
            sum_x[t] = params[t].sum_8 / -8;
            if constexpr (kHalves) sum_x[t] = kFirst == 0 ? first_sums[t] : sum_x[t] - first_sums[t];
            sums[t] = all(broadcast(kMinimum ? int32_t{0} : -(1 << (kLines - 1)) * sum_x[t]));
          }
          each_step<kColumns, kSumColumns>([&](auto sum_step) {
            Many<NibbleSum, kVecs> products[M];
#pragma GCC unroll kUnroll
            for (int t = 0; t < M; ++t) products[t] = begin(sums[t]);
            each_step<kSumColumns, 8>([&](auto step) {
              constexpr int kColumn = kFirst + decltype(sum_step)::value + decltype(step)::value;
              const auto w_bits = load_columns<kLow, kHigh, kColumn>(w[s]);
#pragma GCC unroll kUnroll
              for (int t = 0; t < M; ++t) products[t] = dot(products[t], w_bits, columns.of(t) + kColumn);
            });
#pragma GCC unroll kUnroll
            for (int t = 0; t < M; ++t) sums[t] = kShort ? add(sums[t], total(products[t])) : total(products[t]);
          });
          const Floats scale = scales[s].scale();
#pragma GCC unroll kUnroll
          for (int t = 0; t < M; ++t) {
            out[s][t] = fma(convert(sums[t]), mul(scale, broadcast(params[t].scale)), out[s][t]);
            if constexpr (kMinimum) {
              const float scaled = kHalves ? params[t].scale * static_cast<float>(sum_x[t]) : params[t].scaled_sum;
              out[s][t] = fma(scales[s].minimum(), broadcast(scaled), out[s][t]);
            }
          }
          scales[s].next(layout);
        };
        part(std::integral_constant<int, 0>{});
        if constexpr (kHalves) part(std::integral_constant<int, kActivationGroup / 2>{});
        w[s] += kLines * kPlaneLine;
      }
      x += M * kActivationGroup;
      params += M;
      first_sums += M;
    }
  }
};

// 4 bits that stand for 16 values of 8, in groups of 32.
template <Format kFormat>
struct CodesKernel {
  template <int M, int S>
  static void blocks(const BlockLayout& layout, const uint8_t* (&w)[S], const uint8_t* x_bytes, Floats (&out)[S][M]) {
    const Table table = load_table(row_of(kFormat).codes);
    const auto* x = reinterpret_cast<const Q8*>(x_bytes);
    const auto* params = reinterpret_cast<const GroupParams*>(x + layout.padded_cols * M);
    Scales<S> scales[S];
    for (int s = 0; s < S; ++s)
      for (int t = 0; t < M; ++t) out[s][t] = all(broadcast(0.0f));
    for (int64_t k = 0; k < layout.padded_cols; k += kActivationGroup) {
      const bool begins = layout.in_section(k) == 0, superblock = k % kSuperblock == 0;
      const auto columns = columns_of<M>(x);
#pragma GCC unroll kStreams
      for (int s = 0; s < S; ++s) {
        if (begins)
          scales[s].begin(layout, w[s]);
        else if (superblock)
          scales[s].next_superblock();
        Ints sums[M];
#pragma GCC unroll kUnroll
        for (int t = 0; t < M; ++t) sums[t] = all(broadcast(kShift8 ? params[t].sum_128 : int32_t{0}));
#pragma GCC unroll kUnroll
        for (int j = 0; j < kActivationGroup; j += 8) {
          ask_for<S>(w[s]);
#pragma GCC unroll kUnroll
          for (int v = 0; v < kVecs; ++v) {
            const Codes codes = load_codes(w[s] + v * kVecBytes, table);
#pragma GCC unroll kUnroll
            for (int t = 0; t < M; ++t) {
              const auto from = columns.of(t) + j;
              sums[t].x[v] = dot(dot(sums[t].x[v], codes.low, from), codes.high, from + 4);
            }
          }
          w[s] += kLine;
        }
        const Floats scale = scales[s].scale();
#pragma GCC unroll kUnroll
        for (int t = 0; t < M; ++t)
          out[s][t] = fma(convert(sums[t]), mul(scale, broadcast(params[t].scale)), out[s][t]);
        scales[s].next(layout);
      }
      x += M * kActivationGroup;
      params += M;
    }
  }
};

void multiply_bits(const GemvProduct& product) {
  const bool minimum = product.layout.minimum;
  switch (product.layout.format) {
    case Format::i6:
      return minimum ? run<PlanesKernel<4, 2, true, true>>(product) : run<PlanesKernel<4, 2, true, false>>(product);
    case Format::i5:
      return minimum ? run<PlanesKernel<4, 1, false, true>>(product) : run<PlanesKernel<4, 1, false, false>>(product);
    case Format::i3:
      return run<PlanesKernel<2, 1, true, false>>(product);
    case Format::i2:
      return run<PlanesKernel<2, 0, true, true>>(product);
    case Format::nl4:
      return run<CodesKernel<Format::nl4>>(product);
    case Format::fp4:
      return run<CodesKernel<Format::fp4>>(product);
    default:
      return;  // of kernels_gemv.cpp
  }
}

constexpr GemvBitsKernels kKernels{multiply_bits};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::GemvBitsKernels, anyaccel::llm::kKernels)
