// SPDX-License-Identifier: Apache-2.0
// Compiles the file that ANYACCEL_EACH_ISA names once for each instruction set of `kernels_and_ops` (isa.h), in one
// object: for ops, whose files all take the same flags since torch's or a user's build compiles them too. That file
// puts all that it has into a namespace called ANYACCEL_ISA_VARIANT. Headers come before the targets are set: an inline
// function of theirs that was compiled for AVX-512 might be the one that the linker keeps for everybody.
#pragma once

#include <math.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd/convert.h"
#include "simd/pick.h"
#ifdef ANYACCEL_X86
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // of vectors as arguments of what has a target of its own
#endif

#define ANYACCEL_ISA_VARIANT scalar
#include ANYACCEL_EACH_ISA
#undef ANYACCEL_ISA_VARIANT

#ifndef ANYACCEL_NEWEST_ONLY  // see pick.h
#define ANYACCEL_ISA_VARIANT portable
#include ANYACCEL_EACH_ISA
#undef ANYACCEL_ISA_VARIANT
#endif

#ifdef ANYACCEL_X86

#define ANYACCEL_ISA_VARIANT avx2
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#include ANYACCEL_EACH_ISA
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef ANYACCEL_ISA_VARIANT

#define ANYACCEL_ISA_VARIANT avx512
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")
#endif
#include ANYACCEL_EACH_ISA
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef ANYACCEL_ISA_VARIANT

#elif defined(__aarch64__)

// What every processor of the machine has needs no target of its own.
#define ANYACCEL_ISA_VARIANT neon
#include ANYACCEL_EACH_ISA
#undef ANYACCEL_ISA_VARIANT

#endif
