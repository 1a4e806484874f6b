// SPDX-License-Identifier: Apache-2.0
#define ANYACCEL_SIMD 512
#include "optim/lion.h"
#include "optim/simd_headers.h"

#ifdef ANYACCEL_X86
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")
#endif

#define ANYACCEL_KERNELS kernels_avx512
// clang-format off: the order matters
#include "optim/simd.h"
#include "optim/wide.h"
#include "optim/loop.h"
#include "optim/lion_update.h"
// clang-format on

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
