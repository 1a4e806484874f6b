// SPDX-License-Identifier: Apache-2.0
// Sum of several arrays of one dtype. Every ISA variant gives bit-identical results: fp32 accumulation in the
// order of the sources, rounded once to nearest even.
#pragma once

#include <cstddef>

#include "common/cpu_features.h"

namespace anyaccel::comm {

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2 };
size_t dtype_bytes(DType dtype);
const char* dtype_name(DType dtype);

// dst[i] = sum over s of sources[s][i], for `count` elements; also stored to dst2 unless it is null.
// dst and dst2 may each be one of the sources.
using ReduceFn = void (*)(const void* const* sources, int n_sources, void* dst, void* dst2, size_t count);

struct ReduceKernels {
  ReduceFn by_dtype[3];
};

const ReduceKernels& reduce_kernels(Isa isa);

}  // namespace anyaccel::comm
