// SPDX-License-Identifier: Apache-2.0
// ISA: every avx_vnni avx512_vnni neon_dot
// Products with few tokens (gemv) of integer weights.
#include "llm/kernels/gemv_integer.h"
#include "llm/kernels/gemv_run.h"
#include "simd/pick.h"

namespace anyaccel::llm {

namespace {

using namespace simd;

// Floats are multiplied as by the highest instruction set of every kernel: VNNI is for integers.
const GemvFloatKernels& float_kernels() {
  return variant<GemvFloatKernels, highest_of_every_kernel(Isa::ANYACCEL_ISA_VARIANT)>();
}

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
    // Values that are not finite became meaningless integers; their scale is NaN, and so is the product.
    const int32_t sum = most_bits[g] < 0x7f800000u ? sums[g] : 0;
    params[g * stride] = {scales[g] * product_scale, scales[g] * static_cast<float>(sum), -8 * sum, -128 * sum};
  }
}

template <class Q>
int32_t sum16(const Q* q) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += q[i];
  return sum;
}

// The groups of one token. `at`: its place among the tile's `count` tokens.
template <class Q>
void prepare_quantised(const GemvInput& in, const float* x, float product_scale, uint8_t* base, int at, int count) {
  auto* q = reinterpret_cast<Q*>(base);
  auto* params = reinterpret_cast<GroupParams*>(q + in.layout.padded_cols * count);
  auto* first_sums = reinterpret_cast<int32_t*>(params + in.layout.padded_cols / kActivationGroup * count);
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
    if (in.layout.group == 16)
      for (int64_t i = 0; i < n; ++i) first_sums[place + i * count] = sum16(q + (place + i * count) * kActivationGroup);
    g += n;
  }
}

void prepare_floats(const GemvInput& in, const float* x, float* base, int at, int count) {
  const int64_t begin = in.begin * kActivationGroup, end = in.end * kActivationGroup;
  for (int64_t k = begin; k < end; k += kRows) {
    float* to = base + k * count + at * kRows;
    if (k + kRows <= in.layout.cols)
      store_rows(to, load_rows(x + k));
    else
      for (int i = 0; i < kRows; ++i) to[i] = k + i < in.layout.cols ? x[k + i] : 0.0f;
  }
}

void prepare(const GemvInput& in) {
  const int tiles = tiles_of(in.layout.format, in.tokens);
  for (int tile = 0; tile < tiles; ++tile) {
    const int first = tile_begin(in.tokens, tile, tiles), count = tile_begin(in.tokens, tile + 1, tiles) - first;
    uint8_t* base = in.data + static_cast<size_t>(first) * token_bytes(in.layout);
    for (int t = 0; t < count; ++t) {
      const float* x = in.x + (in.rows != nullptr ? in.rows[first + t] : first + t) * in.stride;
      if (is_float(in.layout.format))
        prepare_floats(in, x, reinterpret_cast<float*>(base), t, count);
      else if (in_quads(in.layout.format))
        prepare_quantised<Q8>(in, x, kPairs8 ? 1.0f / 256 : 1.0f, base, t, count);  // see kPairs8
      else
        prepare_quantised<int8_t>(in, x, 1.0f, base, t, count);
    }
  }
}

void multiply_gemv(const GemvProduct& product) {
  const BlockLayout& layout = product.layout;
  switch (layout.format) {
    case Format::f32:
    case Format::f16:
    case Format::bf16:
      return float_kernels().multiply(product);
    case Format::i8:
      if (layout.group == 16)
        return layout.minimum ? run<I8HalvesKernel<true>>(product) : run<I8HalvesKernel<false>>(product);
      if (layout.group == 0) return run<I8Kernel<false, false>>(product);
      return layout.minimum ? run<I8Kernel<true, true>>(product) : run<I8Kernel<true, false>>(product);
    case Format::i4:
      return layout.minimum ? run<I4Kernel<true>>(product) : run<I4Kernel<false>>(product);
    case Format::i6:
    case Format::i5:
    case Format::i3:
    case Format::i2:
    case Format::nl4:
    case Format::fp4:
      return variant<GemvBitsKernels, Isa::ANYACCEL_ISA_VARIANT>().multiply(product);
  }
}

constexpr GemvKernels kKernels{prepare, multiply_gemv,
                               [](const BlockLayout& layout, const uint8_t* block, int64_t k0, int64_t k1,
                                  float* panel) { float_kernels().unpack(layout, block, k0, k1, panel); },
                               [](const BlockLayout& layout, const uint8_t* block, int64_t k0, int64_t k1,
                                  uint16_t* panel) { float_kernels().unpack_bf16(layout, block, k0, k1, panel); }};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::GemvKernels, anyaccel::llm::kKernels)
