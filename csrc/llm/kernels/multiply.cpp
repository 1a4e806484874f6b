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

const GemvKernels& selected_gemv() {
  static const GemvKernels& kernels = pick<GemvKernels>(selected_isa());
  return kernels;
}

}  // namespace

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
  size_t bytes = gemv_bytes(shape, static_cast<int>(std::min<int64_t>(tokens, kGemvTokens)));
  if (tokens > kGemvTokens) bytes = std::max(bytes, gemm_bytes(shape, tokens));
  if (bytes <= bytes_) return;
  memory_ = allocate_weights(bytes);
  bytes_ = bytes;
}

void Input::prepare(const Shape& shape, const float* x, int64_t stride, const int32_t* rows, int tokens, int part,
                    int parts, bool always_gemm) noexcept {
  const bool gemm = always_gemm || tokens > kGemvTokens;
  // One writer: the others see it after the barrier.
  if (part == 0) {
    tokens_ = tokens;
    gemm_ = gemm;
  }
  if (gemm) {
    gemm_prepare(shape, x, stride, rows, tokens, data(), part, parts);
    return;
  }
  if (gemv_bytes(shape, tokens) > bytes_) std::abort();  // not reserved: a mistake in the program
  GemvInput input{layout_of(shape), x, stride, rows, tokens, data(), 0, 0};
  const Range groups = part_of(input.layout.padded_cols / kActivationGroup, part, parts);
  input.begin = groups.begin;
  input.end = groups.end;
  selected_gemv().prepare(input);
}

Blocks blocks_of(const Shape& shape, int part, int parts) {
  const Range range = part_of(shape.blocks(), part, parts);
  return {range.begin, range.end};
}

void multiply(const Matrix& w, const Input& x, const Output& out, int part, int parts) noexcept {
  if (x.gemm()) {
    gemm_multiply(w, x.data(), x.tokens(), out, part, parts);
    return;
  }
  const Shape& shape = w.shape();
  const Blocks blocks = blocks_of(shape, part, parts);
  selected_gemv().multiply(
      {layout_of(shape), w.block(0), shape.rows, x.data(), x.tokens(), out, blocks.begin, blocks.end});
}

}  // namespace anyaccel::llm
