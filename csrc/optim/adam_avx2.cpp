// SPDX-License-Identifier: Apache-2.0
#define ANYACCEL_SIMD 2
#include "optim/adam.h"
#include "optim/simd_headers.h"

#ifdef ANYACCEL_X86
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#define ANYACCEL_KERNELS kernels_avx2
// clang-format off: the order matters
#include "optim/simd.h"
#include "optim/wide.h"
#include "optim/loop.h"
#include "optim/adam_update.h"
// clang-format on

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
