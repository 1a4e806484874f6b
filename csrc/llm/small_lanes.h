// SPDX-License-Identifier: Apache-2.0
// 16 rows at a time, in the vectors of the instruction set that the including kernel file is compiled for. Everything
// has internal linkage: every variant has its own.
// ANYACCEL_EMULATE stands for VNNI on a machine that lacks it, in tests.
#pragma once

#include <cstdint>

#include "llm/convert.h"

#if defined(__AVX2__)
// GCC 12 warns of the undefined operands that its own intrinsics are made with (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif
#if defined(__AVX512VNNI__) || defined(ANYACCEL_EMULATE)
#define ANYACCEL_VNNI 1
#else
#define ANYACCEL_VNNI 0
#endif

// Common to all variants below: Floats and Ints of 16 lanes; weights of 2 columns as floats (FloatPair); Line8, 4
// columns of int8; Line4, 8 columns of 4 bits. dot8() and Sum4 multiply those with activations.
// kTile: tokens whose sums fit the registers. kChains: sums a token, to hide the latency of an addition. kUnroll: of
// the loops over tokens and over the lines of a group.
// kPairs8: activations for int8 weights are int16, in pairs (0, 2), (1, 3) of 4 columns, and products come out 256
// times too large; else they are int8, and kShift8 says whether 128 * their sum comes out too much.
#if defined(__AVX512F__)
#include "llm/small_lanes_avx512.h"
#elif defined(__AVX2__)
#include "llm/small_lanes_avx2.h"
#else
#include "llm/small_lanes_scalar.h"
#endif
