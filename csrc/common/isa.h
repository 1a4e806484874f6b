// SPDX-License-Identifier: Apache-2.0
// The instruction sets that native code is compiled for. Includes nothing: every variant file includes it.
#pragma once

namespace anyaccel {

// In ascending order. Each has all that those before it have: avx512 is F, BW, VL and DQ; avx512_vnni adds VNNI,
// avx512_bf16 adds BF16, amx adds AMX-TILE, AMX-BF16 and AMX-INT8.
enum class Isa { scalar, avx2, avx512, avx512_vnni, avx512_bf16, amx };

// The highest usable variant, capped by the environment variable ANYACCEL_ISA. Read once.
// Throws std::invalid_argument for an unknown name.
Isa selected_isa();
const char* isa_name(Isa isa);

}  // namespace anyaccel
