// SPDX-License-Identifier: Apache-2.0
// ISA: scalar avx2 avx512 avx512_vnni
#include "llm/small_integer.h"
#include "llm/small_run.h"

#define ANYACCEL_CONCAT_(a, b) a##b
#define ANYACCEL_CONCAT(a, b) ANYACCEL_CONCAT_(a, b)

namespace anyaccel::llm {
namespace {

// Bits of 1e-30: smaller activations count as zero, since one over them may be infinite.
constexpr uint32_t kLeast = 0x0da24260u;

// --- activations

// Up to 16 groups of one token: their scales are divided for as one vector.
constexpr int kBatch = 16;

// x[count][32] -> q and params, `stride` groups apart.
template <class Q>
void quantise_groups(const float* x, int count, float product_scale, Q* q, GroupParams* params, int64_t stride) {
  uint32_t most_bits[kBatch] = {};
  float factors[kBatch], scales[kBatch];
  int32_t sums[kBatch];
  if (count == kBatch)
    magnitudes16(x, most_bits);
  else
    for (int g = 0; g < count; ++g) most_bits[g] = magnitude_bits(x + g * kActivationGroup);
  for (int g = 0; g < kBatch; ++g) {
    const bool finite = most_bits[g] < 0x7f800000u;
    const bool any = finite && most_bits[g] > kLeast;
    const float most = any ? float_of(most_bits[g]) : 1.0f;
    factors[g] = any ? 127.0f / most : 0.0f;
    scales[g] = any ? most / 127.0f : finite ? 0.0f : float_of(0x7fc00000u);
  }
  if (count == kBatch)
    quantise16(x, factors, q, stride * kActivationGroup, sums);
  else
    for (int g = 0; g < count; ++g)
      sums[g] = quantise32(x + g * kActivationGroup, factors[g], q + g * stride * kActivationGroup);
  for (int g = 0; g < count; ++g) {
    // What is not finite becomes any integers, and a NaN by its scale.
    const int32_t sum = most_bits[g] < 0x7f800000u ? sums[g] : 0;
    params[g * stride] = {scales[g] * product_scale, scales[g] * static_cast<float>(sum), -8 * sum, -128 * sum};
  }
}

// The groups of one token. `at`: its place among the tile's `count` tokens.
template <class Q>
void prepare_quantised(const SmallInput& in, const float* x, float product_scale, uint8_t* base, int at, int count) {
  auto* q = reinterpret_cast<Q*>(base);
  auto* params = reinterpret_cast<GroupParams*>(q + in.layout.padded_cols * count);
  const int64_t whole = in.layout.cols / kActivationGroup;  // groups without padding
  for (int64_t g = in.begin; g < in.end;) {
    const float* from = x + g * kActivationGroup;
    int64_t n = whole - g < kBatch ? whole - g : kBatch;
    if (n > in.end - g) n = in.end - g;
    float tail[kActivationGroup];
    if (n <= 0) {
      n = 1;
      for (int64_t i = 0, k = g * kActivationGroup; i < kActivationGroup; ++i)
        tail[i] = k + i < in.layout.cols ? from[i] : 0.0f;
      from = tail;
    }
    const int64_t place = g * count + at;
    quantise_groups(from, static_cast<int>(n), product_scale, q + place * kActivationGroup, params + place, count);
    g += n;
  }
}

void prepare_floats(const SmallInput& in, const float* x, float* base, int at, int count) {
  const int64_t begin = in.begin * kActivationGroup, end = in.end * kActivationGroup;
  for (int64_t k = begin; k < end; k += kLanes) {
    float* to = base + k * count + at * kLanes;
    if (k + kLanes <= in.layout.cols)
      store(to, load(x + k));
    else
      for (int i = 0; i < kLanes; ++i) to[i] = k + i < in.layout.cols ? x[k + i] : 0.0f;
  }
}

void prepare(const SmallInput& in) {
  const int tiles = tiles_of(in.tokens);
  for (int tile = 0; tile < tiles; ++tile) {
    const int first = tile_begin(in.tokens, tile), count = tile_begin(in.tokens, tile + 1) - first;
    uint8_t* base = in.data + static_cast<size_t>(first) * token_bytes(in.layout);
    for (int t = 0; t < count; ++t) {
      const float* x = in.x + (in.rows != nullptr ? in.rows[first + t] : first + t) * in.stride;
      if (in.layout.format == Format::i8)
        prepare_quantised<Q8>(in, x, kPairs8 ? 1.0f / 256 : 1.0f, base, t, count);  // see kPairs8
      else if (in.layout.format == Format::i4)
        prepare_quantised<int8_t>(in, x, 1.0f, base, t, count);
      else
        prepare_floats(in, x, reinterpret_cast<float*>(base), t, count);
    }
  }
}

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
void multiply_small(const SmallProduct& product) {
  const BlockLayout& layout = product.layout;
  switch (layout.format) {
    case Format::f32:
      return run<FloatKernel<F32>>(product);
    case Format::f16:
      return run<FloatKernel<F16>>(product);
    case Format::bf16:
      return run<FloatKernel<BF16>>(product);
    case Format::i8:
      return layout.group == 0 ? run<I8Kernel<false>>(product) : run<I8Kernel<true>>(product);
    case Format::i4:
      return layout.minimum ? run<I4Kernel<true>>(product) : run<I4Kernel<false>>(product);
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
  for (int64_t k = k0; k < k1; k += 4) {
    if (layout.group != 0 && (k == k0 || k % layout.group == 0))
      scale = load_f16(scales + static_cast<size_t>(k / layout.group) * layout.scale_stride);
    const uint8_t* line = block + static_cast<size_t>(k / 4) * kLine;
    put(k, mul(to_floats(column8<0>(line)), scale), mul(to_floats(column8<1>(line)), scale));
    put(k + 2, mul(to_floats(column8<2>(line)), scale), mul(to_floats(column8<3>(line)), scale));
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

const SmallKernels& ANYACCEL_CONCAT(small_kernels_, ANYACCEL_ISA_VARIANT)() {
  static constexpr SmallKernels kernels{prepare, multiply_small, unpack_floats, unpack_pairs};
  return kernels;
}

}  // namespace anyaccel::llm
