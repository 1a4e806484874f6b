// SPDX-License-Identifier: Apache-2.0
// Small products of quantised weights, for kernels_small.cpp.
#pragma once

#include "llm/small_run.h"

namespace anyaccel::llm {
namespace {

// --- one block of rows times M tokens

template <bool kGrouped, bool kMinimum, int M>
inline void i8_block(const BlockLayout& layout, const uint8_t* w, const uint8_t* x_bytes, Floats (&out)[M]) {
  const auto* x = reinterpret_cast<const Q8*>(x_bytes);
  const auto* params = reinterpret_cast<const GroupParams*>(x + layout.padded_cols * M);
  const uint8_t* scales = w + layout.scales_offset;
  for (int t = 0; t < M; ++t) out[t] = zero_floats();
  for (int64_t k = 0; k < layout.padded_cols; k += kActivationGroup) {
    Ints sums[M];
#pragma GCC unroll kUnroll
    for (int t = 0; t < M; ++t) sums[t] = splat(kShift8 ? params[t].sum_128 : int32_t{0});
#pragma GCC unroll kUnroll
    for (int j = 0; j < kActivationGroup; j += 4) {
      ask_for(w);
      const Line8 line = load8(w);
      w += kLine;
#pragma GCC unroll kUnroll
      for (int t = 0; t < M; ++t) sums[t] = dot8(sums[t], line, x + t * kActivationGroup + j);
    }
    if constexpr (kGrouped) {
      const Floats scale = load_f16(scales);
      __builtin_prefetch(scales + layout.block_bytes, 0, 3);
#pragma GCC unroll kUnroll
      for (int t = 0; t < M; ++t) out[t] = mul_add(to_floats(sums[t]), mul(scale, splat(params[t].scale)), out[t]);
      if constexpr (kMinimum) {
        const Floats minimum = load_f16(scales + kLine / 2);
#pragma GCC unroll kUnroll
        for (int t = 0; t < M; ++t) out[t] = mul_add(minimum, splat(params[t].scaled_sum), out[t]);
      }
      scales += layout.scale_stride;
    } else {
#pragma GCC unroll kUnroll
      for (int t = 0; t < M; ++t) out[t] = mul_add(to_floats(sums[t]), splat(params[t].scale), out[t]);
    }
    x += M * kActivationGroup;
    params += M;
  }
  if constexpr (!kGrouped) {
    const Floats scale = load(reinterpret_cast<const float*>(scales));
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
  for (int t = 0; t < M; ++t) out[t] = zero_floats();
  for (int64_t k = 0; k < layout.padded_cols; k += kActivationGroup) {
    for (int half = 0; half < 2; ++half) {
      Ints sums[M];
#pragma GCC unroll kUnroll
      for (int t = 0; t < M; ++t) {
        const int32_t first = -128 * first_sums[t];
        sums[t] = splat(kShift8 ? (half == 0 ? first : params[t].sum_128 - first) : int32_t{0});
      }
#pragma GCC unroll kUnroll
      for (int j = 0; j < kHalf; j += 4) {
        ask_for(w);
        const Line8 line = load8(w);
        w += kLine;
#pragma GCC unroll kUnroll
        for (int t = 0; t < M; ++t) sums[t] = dot8(sums[t], line, x + t * kActivationGroup + half * kHalf + j);
      }
      const Floats scale = load_f16(scales);
      __builtin_prefetch(scales + layout.block_bytes, 0, 3);
#pragma GCC unroll kUnroll
      for (int t = 0; t < M; ++t) out[t] = mul_add(to_floats(sums[t]), mul(scale, splat(params[t].scale)), out[t]);
      if constexpr (kMinimum) {
        const Floats minimum = load_f16(scales + kLine / 2);
#pragma GCC unroll kUnroll
        for (int t = 0; t < M; ++t) {
          const float first = params[t].scale * kProductScale * static_cast<float>(first_sums[t]);
          out[t] = mul_add(minimum, splat(half == 0 ? first : params[t].scaled_sum - first), out[t]);
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
  for (int t = 0; t < M; ++t) out[t] = zero_floats();
  for (int64_t k = 0; k < layout.padded_cols; k += kActivationGroup) {
    Sum4 sums[M];
#pragma GCC unroll kUnroll
    for (int t = 0; t < M; ++t) sums[t] = Sum4::zero();
#pragma GCC unroll kUnroll
    for (int j = 0; j < kActivationGroup; j += 8) {
      ask_for(w);
      const Line4 line = load4(w);
      w += kLine;
#pragma GCC unroll kUnroll
      for (int t = 0; t < M; ++t) sums[t] = sums[t].plus(line, x + t * kActivationGroup + j);
    }
    const Floats scale = load_f16(scales);
    // The next block's: they come after its values, which ask_for() is far from.
    __builtin_prefetch(scales + layout.block_bytes, 0, 3);
    if constexpr (kMinimum) {
      const Floats minimum = load_f16(scales + kLine / 2);
#pragma GCC unroll kUnroll
      for (int t = 0; t < M; ++t) {
        const Floats sum = mul_add(to_floats(sums[t].total()), mul(scale, splat(params[t].scale)), out[t]);
        out[t] = mul_add(minimum, splat(params[t].scaled_sum), sum);
      }
    } else {
#pragma GCC unroll kUnroll
      for (int t = 0; t < M; ++t) {
        const Floats sum = to_floats(add(sums[t].total(), splat(params[t].sum_8)));
        out[t] = mul_add(sum, mul(scale, splat(params[t].scale)), out[t]);
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
