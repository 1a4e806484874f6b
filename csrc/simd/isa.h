// SPDX-License-Identifier: Apache-2.0
// The instruction sets that native code is compiled for. Includes nothing: every kernel file includes it.
#pragma once

namespace anyaccel {

// In ascending order: each has all that those before it have. A row says the name, which is also that of the header in
// csrc/simd/; the machines; what has a variant for it; and the features, as in cpu_features.cpp, that it takes beyond
// the row before. scalar is the reference that tests compare with; portable is what runs on a processor that has no row
// of its own.
#define ANYACCEL_ISAS(ROW)                                                \
  ROW(scalar, any, kernels_and_ops, "")                                   \
  ROW(portable, any, kernels_and_ops, "")                                 \
  ROW(avx2, x86, kernels_and_ops, "avx2 fma f16c")                        \
  ROW(avx512, x86, kernels_and_ops, "avx512f avx512dq avx512bw avx512vl") \
  ROW(avx512_vnni, x86, some_kernels, "avx512_vnni")                      \
  ROW(avx512_bf16, x86, some_kernels, "avx512_bf16")                      \
  ROW(amx, x86, some_kernels, "amx_tile amx_bf16 amx_int8")

#define ANYACCEL_ISA_NAME(name, machine, kernels, features) name,
enum class Isa { ANYACCEL_ISAS(ANYACCEL_ISA_NAME) };
#undef ANYACCEL_ISA_NAME

enum class Machine { any, x86 };
// some_kernels: the kernels that say so. every_kernel: all that CMake compiles once for each instruction set.
// kernels_and_ops: also the ops, which each_isa.h compiles.
enum class Variants { some_kernels, every_kernel, kernels_and_ops };
struct IsaRow {
  Isa isa;
  const char* name;
  Machine machine;
  Variants variants;
  const char* features;
};
#define ANYACCEL_ISA_ROW(name, machine, kernels, features) \
  {Isa::name, #name, Machine::machine, Variants::kernels, features},
inline constexpr IsaRow kIsaRows[] = {ANYACCEL_ISAS(ANYACCEL_ISA_ROW)};
#undef ANYACCEL_ISA_ROW
inline constexpr int kIsaCount = sizeof kIsaRows / sizeof kIsaRows[0];

// Whether code for it can be compiled for this kind of machine.
constexpr bool exists_here(const IsaRow& row) {
#ifdef ANYACCEL_X86
  constexpr Machine kHere = Machine::x86;
#else
  constexpr Machine kHere = Machine::any;
#endif
  return row.machine == Machine::any || row.machine == kHere;
}

// The highest instruction set up to `isa` that every kernel has a variant for.
constexpr Isa highest_of_every_kernel(Isa isa) {
  int row = static_cast<int>(isa);
  while (kIsaRows[row].variants == Variants::some_kernels) --row;
  return kIsaRows[row].isa;
}

// The highest usable variant, capped by the environment variable ANYACCEL_ISA. Read once.
// Throws std::invalid_argument for an unknown name.
Isa selected_isa();
const char* isa_name(Isa isa);

}  // namespace anyaccel
