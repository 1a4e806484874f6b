// SPDX-License-Identifier: Apache-2.0
// Products with few tokens (gemv) of quantised weights, for kernels_gemv.cpp.
#pragma once

#include "llm/kernels/gemv_run.h"

namespace anyaccel::llm {
namespace {

// A unit of each token's activations: where they are, or in registers.
#ifdef ANYACCEL_NEON_DOT
template <int M>
struct UnitColumns {
  Many<Columns, M> held;

  explicit UnitColumns(const int8_t* x) : held(each<M>([&](int t) { return columns_at(x + t * kActivationGroup); })) {}
  Columns of(int token) const { return held.x[token]; }
};
template <int M>
inline UnitColumns<M> columns_of(const int8_t* x) {
  return UnitColumns<M>(x);
}
#else
template <class Q>
struct UnitColumns {
  const Q* x;

  const Q* of(int token) const { return x + token * kActivationGroup; }
};
template <int M, class Q>
inline UnitColumns<Q> columns_of(const Q* x) {
  return {x};
}
#endif

// Products of a step's weights with a token's activations, added to sums.
template <class W, class X>
[[gnu::always_inline]] inline Ints dot(const Ints& sums, const Many<W, kVecs>& w, X x) {
  return each<kVecs>([&](int v) __attribute__((always_inline)) { return dot(sums.x[v], w.x[v], x); });
}
template <class W, class X>
[[gnu::always_inline]] inline auto dot(const Many<NibbleSum, kVecs>& sums, const Many<W, kVecs>& w, X x) {
  return each<kVecs>([&](int v) __attribute__((always_inline)) { return sums.x[v].plus(w.x[v], x); });
}
inline Ints total(const Many<NibbleSum, kVecs>& sums) {
  return each<kVecs>([&](int v) { return sums.x[v].total(); });
}

// --- one block of rows times M tokens

template <bool kGrouped, bool kMinimum, int M, int S>
inline void i8_blocks(const BlockLayout& layout, const uint8_t* (&w)[S], const uint8_t* x_bytes, Floats (&out)[S][M]) {
  const auto* x = reinterpret_cast<const Q8*>(x_bytes);
  const auto* params = reinterpret_cast<const GroupParams*>(x + layout.padded_cols * M);
  Scales<S> scales[S];
  for (int s = 0; s < S; ++s)
    for (int t = 0; t < M; ++t) out[s][t] = all(broadcast(0.0f));
  for (int64_t k = 0; k < layout.padded_cols; k += kActivationGroup) {
    const bool begins = layout.in_section(k) == 0;
    const auto columns = columns_of<M>(x);
#pragma GCC unroll kStreams
    for (int s = 0; s < S; ++s) {
      if (begins) scales[s].begin(layout, w[s]);
      Ints sums[M];
#pragma GCC unroll kUnroll
      for (int t = 0; t < M; ++t) sums[t] = all(broadcast(kShift8 ? params[t].sum_128 : int32_t{0}));
#pragma GCC unroll kUnroll
      for (int j = 0; j < kActivationGroup; j += 4) {
        ask_for<S>(w[s]);
        const auto line = each<kVecs>([&](int v) { return load_quads(w[s] + v * kVecBytes); });
        w[s] += kLine;
#pragma GCC unroll kUnroll
        for (int t = 0; t < M; ++t) sums[t] = dot(sums[t], line, columns.of(t) + j);
      }
      if constexpr (kGrouped) {
        const Floats scale = scales[s].scale();
#pragma GCC unroll kUnroll
        for (int t = 0; t < M; ++t)
          out[s][t] = fma(convert(sums[t]), mul(scale, broadcast(params[t].scale)), out[s][t]);
        if constexpr (kMinimum) {
          const Floats minimum = scales[s].minimum();
#pragma GCC unroll kUnroll
          for (int t = 0; t < M; ++t) out[s][t] = fma(minimum, broadcast(params[t].scaled_sum), out[s][t]);
        }
        scales[s].next(layout);
      } else {
#pragma GCC unroll kUnroll
        for (int t = 0; t < M; ++t) out[s][t] = fma(convert(sums[t]), broadcast(params[t].scale), out[s][t]);
      }
    }
    x += M * kActivationGroup;
    params += M;
  }
  if constexpr (!kGrouped) {
    for (int s = 0; s < S; ++s) {
      const Floats scale = scales[s].of_rows();
      for (int t = 0; t < M; ++t) out[s][t] = mul(out[s][t], scale);
    }
  }
}

// Two groups of weights to one of activations.
template <bool kMinimum, int M, int S>
inline void i8_halves_blocks(const BlockLayout& layout, const uint8_t* (&w)[S], const uint8_t* x_bytes,
                             Floats (&out)[S][M]) {
  constexpr int kHalf = kActivationGroup / 2;
  constexpr float kProductScale = kPairs8 ? 256.0f : 1.0f;  // which params' scales are divided by
  const auto* x = reinterpret_cast<const Q8*>(x_bytes);
  const auto* params = reinterpret_cast<const GroupParams*>(x + layout.padded_cols * M);
  const auto* first_sums = reinterpret_cast<const int32_t*>(params + layout.padded_cols / kActivationGroup * M);
  Scales<S> scales[S];
  for (int s = 0; s < S; ++s)
    for (int t = 0; t < M; ++t) out[s][t] = all(broadcast(0.0f));
  for (int64_t k = 0; k < layout.padded_cols; k += kActivationGroup) {
#pragma GCC unroll kStreams
    for (int s = 0; s < S; ++s) {
      scales[s].begin(layout, w[s]);  // a section is one unit
      for (int half = 0; half < 2; ++half) {
        const auto columns = columns_of<M>(x + half * kHalf);
        Ints sums[M];
#pragma GCC unroll kUnroll
        for (int t = 0; t < M; ++t) {
          const int32_t first = -128 * first_sums[t];
          sums[t] = all(broadcast(kShift8 ? (half == 0 ? first : params[t].sum_128 - first) : int32_t{0}));
        }
#pragma GCC unroll kUnroll
        for (int j = 0; j < kHalf; j += 4) {
          ask_for<S>(w[s]);
          const auto line = each<kVecs>([&](int v) { return load_quads(w[s] + v * kVecBytes); });
          w[s] += kLine;
#pragma GCC unroll kUnroll
          for (int t = 0; t < M; ++t) sums[t] = dot(sums[t], line, columns.of(t) + j);
        }
        const Floats scale = scales[s].scale();
#pragma GCC unroll kUnroll
        for (int t = 0; t < M; ++t)
          out[s][t] = fma(convert(sums[t]), mul(scale, broadcast(params[t].scale)), out[s][t]);
        if constexpr (kMinimum) {
          const Floats minimum = scales[s].minimum();
#pragma GCC unroll kUnroll
          for (int t = 0; t < M; ++t) {
            const float first = params[t].scale * kProductScale * static_cast<float>(first_sums[t]);
            out[s][t] = fma(minimum, broadcast(half == 0 ? first : params[t].scaled_sum - first), out[s][t]);
          }
        }
        scales[s].next(layout);
      }
    }
    x += M * kActivationGroup;
    params += M;
    first_sums += M;
  }
}

template <bool kMinimum, int M, int S>
inline void i4_blocks(const BlockLayout& layout, const uint8_t* (&w)[S], const uint8_t* x_bytes, Floats (&out)[S][M]) {
  const auto* x = reinterpret_cast<const int8_t*>(x_bytes);
  const auto* params = reinterpret_cast<const GroupParams*>(x + layout.padded_cols * M);
  Scales<S> scales[S];
  const int64_t last = layout.group - kActivationGroup;  // where in its group the last part of it starts
  for (int s = 0; s < S; ++s)
    for (int t = 0; t < M; ++t) out[s][t] = all(broadcast(0.0f));
  for (int64_t k = 0; k < layout.padded_cols; k += kActivationGroup) {
    const bool begins = layout.in_section(k) == 0;
    const auto columns = columns_of<M>(x);
#pragma GCC unroll kStreams
    for (int s = 0; s < S; ++s) {
      if (begins) scales[s].begin(layout, w[s]);
      Many<NibbleSum, kVecs> sums[M];
#pragma GCC unroll kUnroll
      for (int t = 0; t < M; ++t) sums[t] = all(NibbleSum::zero());
#pragma GCC unroll kUnroll
      for (int j = 0; j < kActivationGroup; j += 8) {
        ask_for<S>(w[s]);
        const auto line = each<kVecs>([&](int v) { return load_nibbles(w[s] + v * kVecBytes); });
        w[s] += kLine;
#pragma GCC unroll kUnroll
        for (int t = 0; t < M; ++t) sums[t] = dot(sums[t], line, columns.of(t) + j);
      }
      const Floats scale = scales[s].scale();
      if constexpr (kMinimum) {
        const Floats minimum = scales[s].minimum();
#pragma GCC unroll kUnroll
        for (int t = 0; t < M; ++t) {
          const Floats sum = fma(convert(total(sums[t])), mul(scale, broadcast(params[t].scale)), out[s][t]);
          out[s][t] = fma(minimum, broadcast(params[t].scaled_sum), sum);
        }
      } else {
#pragma GCC unroll kUnroll
        for (int t = 0; t < M; ++t) {
          const Floats sum = convert(add(total(sums[t]), broadcast(params[t].sum_8)));
          out[s][t] = fma(sum, mul(scale, broadcast(params[t].scale)), out[s][t]);
        }
      }
      if ((k & last) == last) scales[s].next(layout);
    }
    x += M * kActivationGroup;
    params += M;
  }
}

template <bool kGrouped, bool kMinimum>
struct I8Kernel {
  template <int M, int S>
  static void blocks(const BlockLayout& layout, const uint8_t* (&w)[S], const uint8_t* x, Floats (&out)[S][M]) {
    i8_blocks<kGrouped, kMinimum, M>(layout, w, x, out);
  }
};
template <bool kMinimum>
struct I8HalvesKernel {
  template <int M, int S>
  static void blocks(const BlockLayout& layout, const uint8_t* (&w)[S], const uint8_t* x, Floats (&out)[S][M]) {
    i8_halves_blocks<kMinimum, M>(layout, w, x, out);
  }
};
template <bool kMinimum>
struct I4Kernel {
  template <int M, int S>
  static void blocks(const BlockLayout& layout, const uint8_t* (&w)[S], const uint8_t* x, Floats (&out)[S][M]) {
    i4_blocks<kMinimum, M>(layout, w, x, out);
  }
};

}  // namespace
}  // namespace anyaccel::llm
