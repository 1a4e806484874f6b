// SPDX-License-Identifier: Apache-2.0
// ISA: scalar avx2 avx512
// Small products of float weights, and weights as floats.
#include "llm/small_integer.h"
#include "llm/small_run.h"

#define ANYACCEL_CONCAT_(a, b) a##b
#define ANYACCEL_CONCAT(a, b) ANYACCEL_CONCAT_(a, b)

namespace anyaccel::llm {
namespace {

// --- weights of two columns as floats

struct FloatPair {
  Floats even, odd;
};
struct F32 {
  static constexpr size_t bytes = 2 * kLine;
  static FloatPair load_pair(const uint8_t* p) {
    const auto* values = reinterpret_cast<const float*>(p);
    return {load(values), load(values + kLanes)};
  }
};
struct F16 {
  static constexpr size_t bytes = kLine;
  static FloatPair load_pair(const uint8_t* p) { return {load_f16(p), load_f16(p + kLine / 2)}; }
};
struct BF16 {
  static constexpr size_t bytes = kLine;
  static FloatPair load_pair(const uint8_t* p) { return {even_bf16(p), odd_bf16(p)}; }
};

// --- one block of rows times M tokens

template <class Weights, int M>
inline void float_block(const BlockLayout& layout, const uint8_t* w, const uint8_t* x_bytes, Floats (&out)[M]) {
  const auto* x = reinterpret_cast<const float*>(x_bytes);
  Floats sums[M][kChains];
  for (int t = 0; t < M; ++t)
    for (int c = 0; c < kChains; ++c) sums[t][c] = zero_floats();
  for (int64_t k = 0; k < layout.padded_cols; k += kLanes) {
#pragma GCC unroll kUnroll
    for (int j = 0; j < kLanes; j += 2) {
      for (size_t line = 0; line < Weights::bytes; line += kLine) ask_for(w + line);
      const FloatPair pair = Weights::load_pair(w);
      w += Weights::bytes;
#pragma GCC unroll kUnroll
      for (int t = 0; t < M; ++t) {
        sums[t][0] = mul_add(pair.even, splat(x[t * kLanes + j]), sums[t][0]);
        sums[t][kChains - 1] = mul_add(pair.odd, splat(x[t * kLanes + j + 1]), sums[t][kChains - 1]);
      }
    }
    x += M * kLanes;
  }
  for (int t = 0; t < M; ++t) out[t] = kChains == 1 ? sums[t][0] : add(sums[t][0], sums[t][kChains - 1]);
}

template <class Weights>
struct FloatKernel {
  template <int M>
  static void block(const BlockLayout& layout, const uint8_t* w, const uint8_t* x, Floats (&out)[M]) {
    float_block<Weights, M>(layout, w, x, out);
  }
};

void multiply_floats(const SmallProduct& product) {
  switch (product.layout.format) {
    case Format::f32:
      return run<FloatKernel<F32>>(product);
    case Format::f16:
      return run<FloatKernel<F16>>(product);
    case Format::bf16:
      return run<FloatKernel<BF16>>(product);
    case Format::i8:
    case Format::i4:
      return;  // not floats
  }
}

// --- weights as floats, for products that are not made from this form

// Calls put(k, column k, column k + 1) for the columns k0 .. k1.
template <class Weights, class Put>
void for_float_columns(const uint8_t* block, int64_t k0, int64_t k1, const Put& put) {
  for (int64_t k = k0; k < k1; k += 2) {
    const FloatPair pair = Weights::load_pair(block + static_cast<size_t>(k / 2) * Weights::bytes);
    put(k, pair.even, pair.odd);
  }
}

template <class Put>
void for_i8_columns(const BlockLayout& layout, const uint8_t* block, int64_t k0, int64_t k1, const Put& put) {
  const uint8_t* scales = block + layout.scales_offset;
  Floats scale = layout.group == 0 ? load(reinterpret_cast<const float*>(scales)) : zero_floats();
  Floats minimum = zero_floats();
  for (int64_t k = k0; k < k1; k += 4) {
    if (layout.group != 0 && (k == k0 || k % layout.group == 0)) {
      const uint8_t* group = scales + static_cast<size_t>(k / layout.group) * layout.scale_stride;
      scale = load_f16(group);
      if (layout.minimum) minimum = load_f16(group + kLine / 2);
    }
    const uint8_t* line = block + static_cast<size_t>(k / 4) * kLine;
    const auto value = [&](Ints q) { return mul_add(to_floats(q), scale, minimum); };
    put(k, value(column8<0>(line)), value(column8<1>(line)));
    put(k + 2, value(column8<2>(line)), value(column8<3>(line)));
  }
}

template <class Put>
void for_i4_columns(const BlockLayout& layout, const uint8_t* block, int64_t k0, int64_t k1, const Put& put) {
  Floats scale = zero_floats(), minimum = zero_floats();
  for (int64_t k = k0; k < k1; k += 8) {
    if (k == k0 || k % layout.group == 0) {
      const uint8_t* scales =
          block + layout.scales_offset + static_cast<size_t>(k / layout.group) * layout.scale_stride;
      scale = load_f16(scales);
      minimum = layout.minimum ? load_f16(scales + kLine / 2) : mul(scale, splat(-8.0f));
    }
    const uint8_t* line = block + static_cast<size_t>(k / 8) * kLine;
    const auto value = [&](Ints q) { return mul_add(to_floats(q), scale, minimum); };
    put(k, value(column4<0>(line)), value(column4<1>(line)));
    put(k + 2, value(column4<2>(line)), value(column4<3>(line)));
    put(k + 4, value(column4<4>(line)), value(column4<5>(line)));
    put(k + 6, value(column4<6>(line)), value(column4<7>(line)));
  }
}

template <class Put>
void for_columns(const BlockLayout& layout, const uint8_t* block, int64_t k0, int64_t k1, const Put& put) {
  switch (layout.format) {
    case Format::f32:
      return for_float_columns<F32>(block, k0, k1, put);
    case Format::f16:
      return for_float_columns<F16>(block, k0, k1, put);
    case Format::bf16:
      return for_float_columns<BF16>(block, k0, k1, put);
    case Format::i8:
      return for_i8_columns(layout, block, k0, k1, put);
    case Format::i4:
      return for_i4_columns(layout, block, k0, k1, put);
  }
}

void unpack_floats(const BlockLayout& layout, const uint8_t* block, int64_t k0, int64_t k1, float* panel) {
  for_columns(layout, block, k0, k1, [=](int64_t k, Floats even, Floats odd) {
    store(panel + (k - k0) * kLanes, even);
    store(panel + (k - k0 + 1) * kLanes, odd);
  });
  for (int64_t k = layout.cols > k0 ? layout.cols : k0; k < k1; ++k) store(panel + (k - k0) * kLanes, zero_floats());
}

void unpack_pairs(const BlockLayout& layout, const uint8_t* block, int64_t k0, int64_t k1, uint16_t* panel) {
  for_columns(layout, block, k0, k1,
              [=](int64_t k, Floats even, Floats odd) { store_pairs(panel + (k - k0) * kLanes, even, odd); });
  for (int64_t k = layout.cols > k0 ? layout.cols : k0; k < k1; ++k)
    for (int r = 0; r < kLanes; ++r) panel[((k - k0) / 2 * kLanes + r) * 2 + k % 2] = 0;
}

}  // namespace

const SmallFloatKernels& ANYACCEL_CONCAT(small_float_kernels_, ANYACCEL_ISA_VARIANT)() {
  static constexpr SmallFloatKernels kernels{multiply_floats, unpack_floats, unpack_pairs};
  return kernels;
}

}  // namespace anyaccel::llm
