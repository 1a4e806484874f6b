// SPDX-License-Identifier: Apache-2.0
#include "llm/kernels/multiply.h"

#include <algorithm>
#include <cstdlib>

#include "common/team.h"
#include "llm/kernels/gemm.h"
#include "llm/kernels/gemv.h"
#include "llm/pack/grouped.h"
#include "simd/pick.h"

namespace anyaccel::llm {
namespace {

// Weights that stay in the L2 cache beside activations.
constexpr size_t kCacheBytes = size_t{256} << 10;

size_t turns_bytes(const Shape& shape, int64_t tokens) {
  const int64_t turns = (tokens + kGemvTokens - 1) / kGemvTokens;
  return gemv_bytes(shape, kGemvTokens) * static_cast<size_t>(std::max<int64_t>(turns - 1, 0)) +
         gemv_bytes(shape, static_cast<int>(tokens - std::max<int64_t>(turns - 1, 0) * kGemvTokens));
}

// Calls fn(first token, number of tokens, offset of their activations) for each turn of gemv.
template <class Fn>
void each_turn(const Shape& shape, int tokens, const Fn& fn) {
  const size_t bytes = gemv_bytes(shape, kGemvTokens);
  for (int first = 0; first < tokens; first += kGemvTokens)
    fn(first, std::min(tokens - first, kGemvTokens), bytes * static_cast<size_t>(first / kGemvTokens));
}

}  // namespace

GemvFunctions gemv_for(Isa isa, Format format) {
  const PairGemvKernels* const pairs = format == Format::bf16 ? find_variant<PairGemvKernels>(isa) : nullptr;
  if (pairs != nullptr) return *pairs;
  const GemvKernels& kernels = pick<GemvKernels>(isa);
  return {kernels.prepare, kernels.multiply};
}

size_t gemv_bytes(const Shape& shape, int tokens) {
  const size_t values = static_cast<size_t>(shape.padded_cols()) * static_cast<size_t>(tokens);
  switch (shape.format) {
    case Format::f32:
    case Format::f16:
    case Format::bf16:
      return values * sizeof(float);
    default:
      return (values * sizeof(int16_t) +
              values / kActivationGroup * (sizeof(GroupParams) + (shape.group == 16 ? sizeof(int32_t) : 0)) + 63) /
             64 * 64;
  }
}

void Input::reserve(const Shape& shape, int64_t tokens) {
  check(shape);
  size_t bytes = turns_bytes(shape, std::min<int64_t>(tokens, gemm_from(shape) - 1));
  if (tokens > kGemvTokens && gemm_from(shape) != kNeverGemm) bytes = std::max(bytes, gemm_bytes(shape, tokens));
  if (bytes <= bytes_) return;
  memory_ = allocate_weights(bytes);
  bytes_ = bytes;
}

void Input::prepare(const Shape& shape, const float* x, int64_t stride, const int32_t* rows, int tokens, int part,
                    int parts, bool always_gemm) noexcept {
  const int from = gemm_from(shape);
  const bool gemm = from != kNeverGemm && (always_gemm || tokens >= from);
  // One writer: the others see it after the barrier.
  if (part == 0) {
    tokens_ = tokens;
    gemm_ = gemm;
  }
  if (gemm) {
    gemm_prepare(shape, x, stride, rows, tokens, data(), part, parts);
    return;
  }
  if (turns_bytes(shape, tokens) > bytes_) std::abort();  // not reserved: a mistake in the program
  const BlockLayout layout = layout_of(shape);
  const auto prepare_gemv = gemv_for(selected_isa(), shape.format).prepare;
  const Range groups = part_of(layout.padded_cols / kActivationGroup, part, parts);
  each_turn(shape, tokens, [&](int first, int count, size_t offset) {
    const float* own_x = rows != nullptr ? x : x + first * stride;
    const int32_t* own_rows = rows != nullptr ? rows + first : nullptr;
    prepare_gemv({layout, own_x, stride, own_rows, count, data() + offset, groups.begin, groups.end});
  });
}

Blocks blocks_of(const Shape& shape, int part, int parts) {
  const Range range = part_of(shape.blocks(), part, parts);
  return {range.begin, range.end};
}

void multiply(const Matrix& w, const Input& x, const Output& out, int part, int parts,
              const Sharing& sharing) noexcept {
  if (x.gemm()) {
    gemm_multiply(w, x.data(), x.tokens(), out, part, parts, sharing);
    return;
  }
  const Shape& shape = w.shape();
  const Blocks blocks = blocks_of(shape, part, parts);
  const BlockLayout layout = layout_of(shape);
  const auto multiply_gemv = gemv_for(selected_isa(), shape.format).multiply;
  const int64_t chunk = x.tokens() <= kGemvTokens ? std::max<int64_t>(blocks.end - blocks.begin, 1)
                                                  : static_cast<int64_t>(kCacheBytes / layout.block_bytes) + 1;
  for (int64_t begin = blocks.begin; begin < blocks.end; begin += chunk)
    each_turn(shape, x.tokens(), [&](int first, int count, size_t offset) {
      Output to = out;
      to.data += first * out.stride;
      multiply_gemv(
          {layout, w.block(0), shape.rows, x.data() + offset, count, to, begin, std::min(begin + chunk, blocks.end)});
    });
}

}  // namespace anyaccel::llm
