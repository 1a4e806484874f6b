// SPDX-License-Identifier: Apache-2.0
// Matrix products (gemm) with kernels of one's choice: for tests and benchmarks. Others use gemm.h.
#pragma once

#include "llm/kernels/gemm_kernels.h"
#include "llm/kernels/gemv.h"
#include "llm/kernels/multiply.h"
#include "llm/pack/matrix.h"
#include "simd/isa.h"

namespace anyaccel::llm {

// What an instruction set multiplies matrices of a format and group with: the highest kernels that it can run.
const GemmKernels& gemm_kernels(Isa isa, const Shape& shape);

// As gemm_bytes(), gemm_prepare() and gemm_multiply().
size_t gemm_bytes_on(const GemmKernels& kernels, const Shape& shape, int64_t tokens);
void gemm_prepare_on(const GemmKernels& kernels, const Shape& shape, const float* x, int64_t stride,
                     const int32_t* rows, int tokens, uint8_t* data, int part, int parts) noexcept;
void gemm_multiply_on(const GemmKernels& kernels, const GemvKernels& gemv, const Matrix& w, const uint8_t* data,
                      int tokens, const Output& out, int part, int parts, const Sharing& sharing = {}) noexcept;

}  // namespace anyaccel::llm
