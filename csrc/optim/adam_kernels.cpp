// SPDX-License-Identifier: Apache-2.0
#define ANYACCEL_EACH_ISA "optim/adam_update.h"
#include "simd/each_isa.h"
