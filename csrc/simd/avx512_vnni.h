// SPDX-License-Identifier: Apache-2.0
// AVX-512 with VNNI: products of 8 and 4 bits by one instruction.
#pragma once

#define ANYACCEL_VNNI
#include "simd/avx512.h"
