// SPDX-License-Identifier: Apache-2.0
// Large products with kernels of one's choice: for tests and benchmarks. Others use large.h.
#pragma once

#include "common/isa.h"
#include "llm/large_kernels.h"
#include "llm/matrix.h"
#include "llm/small.h"

namespace anyaccel::llm {

// What an instruction set multiplies matrices of a format and group with: the highest kernels that it can run.
const LargeKernels& large_kernels(Isa isa, const Shape& shape);

// As large_bytes(), large_prepare() and large_multiply().
size_t large_bytes_on(const LargeKernels& kernels, const Shape& shape, int64_t tokens);
void large_prepare_on(const LargeKernels& kernels, const Shape& shape, const float* x, int64_t stride,
                      const int32_t* rows, int tokens, uint8_t* data, int part, int parts) noexcept;
void large_multiply_on(const LargeKernels& kernels, const SmallKernels& small, const Matrix& w, const uint8_t* data,
                       int tokens, const Output& out, int part, int parts) noexcept;

}  // namespace anyaccel::llm
