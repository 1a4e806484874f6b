// SPDX-License-Identifier: Apache-2.0
// All headers of a variant file, to be included before its target pragma: an inline function of theirs that was
// compiled for AVX-512 might be the one that the linker keeps for everybody.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/isa.h"
#include "optim/types.h"
#if ANYACCEL_SIMD && defined(ANYACCEL_X86)
#include <immintrin.h>
#endif
