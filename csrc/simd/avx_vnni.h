// SPDX-License-Identifier: Apache-2.0
// AVX2 with VNNI in 256 bits, as processors without AVX-512 have it: products of 8 and 4 bits by one instruction.
#pragma once

#define ANYACCEL_VNNI
#include "simd/avx2.h"
