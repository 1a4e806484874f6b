// SPDX-License-Identifier: Apache-2.0
// What the processor and the operating system support together, of which simd/isa.h chooses a variant.
#pragma once

#include <map>
#include <string>

#include "simd/isa.h"

namespace anyaccel {

// Name -> usable now. A feature counts only when the CPU has it and the OS saves its registers (XCR0); AMX
// also needs the kernel's permission call to succeed.
const std::map<std::string, bool>& cpu_features();

// What selected_isa() is on a processor of these features with ANYACCEL_ISA=`cap`; empty: no cap.
Isa choose_isa(const std::map<std::string, bool>& features, const std::string& cap);

}  // namespace anyaccel
