// SPDX-License-Identifier: Apache-2.0
// Products with few tokens (gemv) of quantised weights, for kernels_gemv.cpp.
#pragma once

#include "llm/gemv_run.h"

namespace anyaccel::llm {
namespace {

// Products of a step's weights with a token's activations, added to sums.
template <class W, class Q>
inline Ints dot(const Ints& sums, const Many<W, kVecs>& w, const Q* x) {
  return each<kVecs>([&](int v) { return dot(sums.x[v], w.x[v], x); });
}
template <class W>
inline auto dot(const Many<NibbleSum, kVecs>& sums, const Many<W, kVecs>& w, const int8_t* x) {
  return each<kVecs>([&](int v) { return sums.x[v].plus(w.x[v], x); });
}
inline Ints total(const Many<NibbleSum, kVecs>& sums) {
  return each<kVecs>([&](int v) { return sums.x[v].total(); });
}

// --- one block of rows times M tokens

template <bool kGrouped, bool kMinimum, int M>
inline void i8_block(const BlockLayout& layout, const uint8_t* w, const uint8_t* x_bytes, Floats (&out)[M]) {
  const auto* x = reinterpret_cast<const Q8*>(x_bytes);
  const auto* params = reinterpret_cast<const GroupParams*>(x + layout.padded_cols * M);
  const uint8_t* scales = w + layout.scales_offset;
  for (int t = 0; t < M; ++t) out[t] = all(broadcast(0.0f));
  for (int64_t k = 0; k < layout.padded_cols; k += kActivationGroup) {
    Ints sums[M];
#pragma GCC unroll kUnroll
    for (int t = 0; t < M; ++t) sums[t] = all(broadcast(kShift8 ? params[t].sum_128 : int32_t{0}));
#pragma GCC unroll kUnroll
    for (int j = 0; j < kActivationGroup; j += 4) {
      ask_for(w);
      const auto line = each<kVecs>([&](int v) { return load_quads(w + v * kVecBytes); });
      w += kLine;
#pragma GCC unroll kUnroll
      for (int t = 0; t < M; ++t) sums[t] = dot(sums[t], line, x + t * kActivationGroup + j);
    }
    if constexpr (kGrouped) {
      const Floats scale = load_rows_f16(scales);
      __builtin_prefetch(scales + layout.block_bytes, 0, 3);
#pragma GCC unroll kUnroll
      for (int t = 0; t < M; ++t) out[t] = fma(convert(sums[t]), mul(scale, broadcast(params[t].scale)), out[t]);
      if constexpr (kMinimum) {
        const Floats minimum = load_rows_f16(scales + kLine / 2);
#pragma GCC unroll kUnroll
        for (int t = 0; t < M; ++t) out[t] = fma(minimum, broadcast(params[t].scaled_sum), out[t]);
      }
      scales += layout.scale_stride;
    } else {
#pragma GCC unroll kUnroll
      for (int t = 0; t < M; ++t) out[t] = fma(convert(sums[t]), broadcast(params[t].scale), out[t]);
    }
    x += M * kActivationGroup;
    params += M;
  }
  if constexpr (!kGrouped) {
    const Floats scale = load_rows(reinterpret_cast<const float*>(scales));
    for (int t = 0; t < M; ++t) out[t] = mul(out[t], scale);
  }
}

// Two groups of weights to one of activations.
template <bool kMinimum, int M>
inline void i8_halves_block(const BlockLayout& layout, const uint8_t* w, const uint8_t* x_bytes, Floats (&out)[M]) {
  constexpr int kHalf = kActivationGroup / 2;
  constexpr float kProductScale = kPairs8 ? 256.0f : 1.0f;  // which params' scales are divided by
  const auto* x = reinterpret_cast<const Q8*>(x_bytes);
  const auto* params = reinterpret_cast<const GroupParams*>(x + layout.padded_cols * M);
  const auto* first_sums = reinterpret_cast<const int32_t*>(params + layout.padded_cols / kActivationGroup * M);
  const uint8_t* scales = w + layout.scales_offset;
  for (int t = 0; t < M; ++t) out[t] = all(broadcast(0.0f));
  for (int64_t k = 0; k < layout.padded_cols; k += kActivationGroup) {
    for (int half = 0; half < 2; ++half) {
      Ints sums[M];
#pragma GCC unroll kUnroll
      for (int t = 0; t < M; ++t) {
        const int32_t first = -128 * first_sums[t];
        sums[t] = all(broadcast(kShift8 ? (half == 0 ? first : params[t].sum_128 - first) : int32_t{0}));
      }
#pragma GCC unroll kUnroll
      for (int j = 0; j < kHalf; j += 4) {
        ask_for(w);
        const auto line = each<kVecs>([&](int v) { return load_quads(w + v * kVecBytes); });
        w += kLine;
#pragma GCC unroll kUnroll
        for (int t = 0; t < M; ++t) sums[t] = dot(sums[t], line, x + t * kActivationGroup + half * kHalf + j);
      }
      const Floats scale = load_rows_f16(scales);
      __builtin_prefetch(scales + layout.block_bytes, 0, 3);
#pragma GCC unroll kUnroll
      for (int t = 0; t < M; ++t) out[t] = fma(convert(sums[t]), mul(scale, broadcast(params[t].scale)), out[t]);
      if constexpr (kMinimum) {
        const Floats minimum = load_rows_f16(scales + kLine / 2);
#pragma GCC unroll kUnroll
        for (int t = 0; t < M; ++t) {
          const float first = params[t].scale * kProductScale * static_cast<float>(first_sums[t]);
          out[t] = fma(minimum, broadcast(half == 0 ? first : params[t].scaled_sum - first), out[t]);
        }
      }
      scales += layout.scale_stride;
    }
    x += M * kActivationGroup;
    params += M;
    first_sums += M;
  }
}

template <bool kMinimum, int M>
inline void i4_block(const BlockLayout& layout, const uint8_t* w, const uint8_t* x_bytes, Floats (&out)[M]) {
  const auto* x = reinterpret_cast<const int8_t*>(x_bytes);
  const auto* params = reinterpret_cast<const GroupParams*>(x + layout.padded_cols * M);
  const uint8_t* scales = w + layout.scales_offset;
  const int64_t last = layout.group - kActivationGroup;  // where in its group the last part of it starts
  for (int t = 0; t < M; ++t) out[t] = all(broadcast(0.0f));
  for (int64_t k = 0; k < layout.padded_cols; k += kActivationGroup) {
    Many<NibbleSum, kVecs> sums[M];
#pragma GCC unroll kUnroll
    for (int t = 0; t < M; ++t) sums[t] = all(NibbleSum::zero());
#pragma GCC unroll kUnroll
    for (int j = 0; j < kActivationGroup; j += 8) {
      ask_for(w);
      const auto line = each<kVecs>([&](int v) { return load_nibbles(w + v * kVecBytes); });
      w += kLine;
#pragma GCC unroll kUnroll
      for (int t = 0; t < M; ++t) sums[t] = dot(sums[t], line, x + t * kActivationGroup + j);
    }
    const Floats scale = load_rows_f16(scales);
    // The next block's: they come after its values, which ask_for() is far from.
    __builtin_prefetch(scales + layout.block_bytes, 0, 3);
    if constexpr (kMinimum) {
      const Floats minimum = load_rows_f16(scales + kLine / 2);
#pragma GCC unroll kUnroll
      for (int t = 0; t < M; ++t) {
        const Floats sum = fma(convert(total(sums[t])), mul(scale, broadcast(params[t].scale)), out[t]);
        out[t] = fma(minimum, broadcast(params[t].scaled_sum), sum);
      }
    } else {
#pragma GCC unroll kUnroll
      for (int t = 0; t < M; ++t) {
        const Floats sum = convert(add(total(sums[t]), broadcast(params[t].sum_8)));
        out[t] = fma(sum, mul(scale, broadcast(params[t].scale)), out[t]);
      }
    }
    scales += (k & last) == last ? layout.scale_stride : 0;
    x += M * kActivationGroup;
    params += M;
  }
}

template <bool kGrouped, bool kMinimum>
struct I8Kernel {
  template <int M>
  static void block(const BlockLayout& layout, const uint8_t* w, const uint8_t* x, Floats (&out)[M]) {
    i8_block<kGrouped, kMinimum, M>(layout, w, x, out);
  }
};
template <bool kMinimum>
struct I8HalvesKernel {
  template <int M>
  static void block(const BlockLayout& layout, const uint8_t* w, const uint8_t* x, Floats (&out)[M]) {
    i8_halves_block<kMinimum, M>(layout, w, x, out);
  }
};
template <bool kMinimum>
struct I4Kernel {
  template <int M>
  static void block(const BlockLayout& layout, const uint8_t* w, const uint8_t* x, Floats (&out)[M]) {
    i4_block<kMinimum, M>(layout, w, x, out);
  }
};

}  // namespace
}  // namespace anyaccel::llm
