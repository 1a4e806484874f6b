// SPDX-License-Identifier: Apache-2.0
// What the processor and the operating system support together, and the table that chooses ISA variants.
#pragma once

#include <map>
#include <string>

namespace anyaccel {

// Name -> usable now. A feature counts only when the CPU has it and the OS saves its registers (XCR0); AMX
// also needs the kernel's permission call to succeed.
const std::map<std::string, bool>& cpu_features();

// Instruction sets that native code is compiled for, in ascending order.
enum class Isa { scalar, avx2, avx512 };

// The highest usable variant, capped by the environment variable ANYACCEL_ISA. Read once.
// Throws std::invalid_argument for an unknown name.
Isa selected_isa();
const char* isa_name(Isa isa);

}  // namespace anyaccel
