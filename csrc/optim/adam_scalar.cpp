// SPDX-License-Identifier: Apache-2.0
#define ANYACCEL_SIMD 0
#include "optim/adam.h"
#include "optim/simd_headers.h"

#define ANYACCEL_KERNELS kernels_scalar
// clang-format off: the order matters
#include "optim/simd.h"
#include "optim/wide.h"
#include "optim/loop.h"
#include "optim/adam_update.h"
// clang-format on
