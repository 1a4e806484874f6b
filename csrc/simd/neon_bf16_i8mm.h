// SPDX-License-Identifier: Apache-2.0
// NEON with products of small matrices (Armv8.6): of 2 x 8 bytes, and of 2 x 4 bfloat16, with as many, by one
// instruction.
#pragma once

#include "simd/neon_dot.h"
