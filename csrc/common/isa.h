// SPDX-License-Identifier: Apache-2.0
// The instruction sets that native code is compiled for. Includes nothing: every variant file includes it.
#pragma once

namespace anyaccel {

// In ascending order.
enum class Isa { scalar, avx2, avx512 };

// The highest usable variant, capped by the environment variable ANYACCEL_ISA. Read once.
// Throws std::invalid_argument for an unknown name.
Isa selected_isa();
const char* isa_name(Isa isa);

}  // namespace anyaccel
