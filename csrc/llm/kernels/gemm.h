// SPDX-License-Identifier: Apache-2.0
// Products with many tokens: blocked for the caches, bound by arithmetic.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include "llm/kernels/multiply.h"
#include "llm/pack/matrix.h"

namespace anyaccel::llm {

// The fewest tokens for which gemm is faster than gemv; kNeverGemm: there is no such number.
constexpr int kNeverGemm = INT_MAX;
int gemm_from(const Shape& shape);
// Bytes that gemm_prepare() writes for up to `tokens` tokens (a multiple of 64), for matrices of that format, group
// and number of columns, with the selected instruction set. Grows with `tokens`.
size_t gemm_bytes(const Shape& shape, int64_t tokens);
// Puts activations into the form that gemm_multiply() reads. `data` is 64-byte aligned. Row i is x + rows[i] * stride,
// or x + i * stride when `rows` is null. Parts write different bytes; a barrier comes before gemm_multiply().
void gemm_prepare(const Shape& shape, const float* x, int64_t stride, const int32_t* rows, int tokens, uint8_t* data,
                  int part, int parts) noexcept;
// Part `part` of out = W x. Never allocates (scratch panels: thread_local or on the stack).
void gemm_multiply(const Matrix& w, const uint8_t* data, int tokens, const Output& out, int part, int parts,
                   const Sharing& sharing = {}) noexcept;

}  // namespace anyaccel::llm
