// SPDX-License-Identifier: Apache-2.0
// Elementwise reductions of several arrays of one dtype. Every ISA variant gives bit-identical results: the sources are
// accumulated in order, and float32, bfloat16 and float16 accumulate in fp32 and are rounded once to nearest even.
#pragma once

#include <cstddef>

#include "simd/isa.h"

namespace anyaccel::comm {

// The codes are those of comm/dtypes.py. The first kDTypes can be reduced; the others can only be moved.
enum class DType : int { f32, bf16, f16, f64, i8, i16, i32, i64, u8, bytes = 22 };
constexpr int kDTypes = 9;
// avg divides the accumulated sum, for integers towards zero; min and max give NaN when one of the values is NaN.
enum class ReduceOp : int { sum, avg, product, min, max, band, bor, bxor };
constexpr int kReduceOps = 8;

size_t dtype_bytes(DType dtype);
const char* dtype_name(DType dtype);
const char* reduce_op_name(ReduceOp op);

// dst[i] = op over s of sources[s][i], for `count` elements, which are also stored to dst2 unless it is null.
// dst and dst2 may each be one of the sources.
using ReduceFn = void (*)(const void* const* sources, int n_sources, void* dst, void* dst2, size_t count);

// For each of `rows` rows of `width` elements: residual += sum of sources (in the dtype), then
// out = residual / sqrt(mean(residual^2) + eps) * weight. `out` may be a source.
using AddRmsNormFn = void (*)(const void* const* sources, int n_sources, void* residual, const void* weight, float eps,
                              void* out, size_t rows, size_t width);

struct ReduceKernels {
  ReduceFn by[kDTypes][kReduceOps];  // null where the dtype does not have the operation
  AddRmsNormFn add_rms_norm[3];      // f32, bf16, f16
};

const ReduceKernels& reduce_kernels(Isa isa);

}  // namespace anyaccel::comm
