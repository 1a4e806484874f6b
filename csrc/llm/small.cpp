// SPDX-License-Identifier: Apache-2.0
#include "llm/small.h"

namespace anyaccel::llm {

const SmallKernels& small_kernels_scalar();
#ifdef ANYACCEL_X86
const SmallKernels& small_kernels_avx2();
const SmallKernels& small_kernels_avx512();
const SmallKernels& small_kernels_avx512_vnni();
#endif

const SmallKernels& small_kernels(Isa isa) {
  switch (isa) {
#ifdef ANYACCEL_X86
    case Isa::amx:
    case Isa::avx512_bf16:
    case Isa::avx512_vnni:
      return small_kernels_avx512_vnni();
    case Isa::avx512:
      return small_kernels_avx512();
    case Isa::avx2:
      return small_kernels_avx2();
#endif
    default:
      return small_kernels_scalar();
  }
}

}  // namespace anyaccel::llm
