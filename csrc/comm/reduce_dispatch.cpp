// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>

#include "comm/reduce_kernels.h"

namespace anyaccel::comm {

const ReduceKernels& reduce_kernels_scalar();
#ifdef ANYACCEL_X86
const ReduceKernels& reduce_kernels_avx2();
const ReduceKernels& reduce_kernels_avx512();
#endif

const ReduceKernels& reduce_kernels(Isa isa) {
  switch (isa) {
#ifdef ANYACCEL_X86
    case Isa::amx:
    case Isa::avx512_bf16:
    case Isa::avx512_vnni:
    case Isa::avx512:
      return reduce_kernels_avx512();
    case Isa::avx2:
      return reduce_kernels_avx2();
#endif
    default:
      return reduce_kernels_scalar();
  }
}

size_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
  }
  throw std::invalid_argument("unknown dtype code " + std::to_string(static_cast<int>(dtype)));
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "float32";
    case DType::bf16:
      return "bfloat16";
    case DType::f16:
      return "float16";
  }
  return "unknown";
}

}  // namespace anyaccel::comm
