// SPDX-License-Identifier: Apache-2.0
// The instruction sets that native code is compiled for. Includes nothing: every kernel file includes it.
#pragma once

namespace anyaccel {

// A tree, since processors for clients have VNNI without AVX-512; a row comes behind the one that it builds on, and of
// those that a processor has the last one is chosen. A row says the name, which is also that of the header in
// csrc/simd/; the machines; what has a variant for it; the row that it has all instructions of; and the features, as in
// cpu_features.cpp, that it takes beyond that one. scalar is the reference that tests compare with; portable is what
// runs on a processor that has no row of its own.
#define ANYACCEL_ISAS(ROW)                                                      \
  ROW(scalar, any, kernels_and_ops, scalar, "")                                 \
  ROW(portable, any, kernels_and_ops, scalar, "")                               \
  ROW(avx2, x86, kernels_and_ops, portable, "avx2 fma f16c")                    \
  ROW(avx_vnni, x86, some_kernels, avx2, "avx_vnni")                            \
  ROW(avx512, x86, kernels_and_ops, avx2, "avx512f avx512dq avx512bw avx512vl") \
  ROW(avx512_vnni, x86, some_kernels, avx512, "avx512_vnni")                    \
  ROW(avx512_bf16, x86, some_kernels, avx512_vnni, "avx512_bf16")               \
  ROW(amx, x86, some_kernels, avx512_bf16, "amx_tile amx_bf16 amx_int8")        \
  ROW(neon, arm64, kernels_and_ops, portable, "asimd")                          \
  ROW(neon_dot, arm64, some_kernels, neon, "asimddp")                           \
  ROW(neon_bf16_i8mm, arm64, some_kernels, neon_dot, "bf16 i8mm")

#define ANYACCEL_ISA_NAME(name, machine, kernels, basis, features) name,
enum class Isa { ANYACCEL_ISAS(ANYACCEL_ISA_NAME) };
#undef ANYACCEL_ISA_NAME

enum class Machine { any, x86, arm64 };
// some_kernels: the kernels that say so. every_kernel: all that CMake compiles once for each instruction set.
// kernels_and_ops: also the ops, which each_isa.h compiles.
enum class Variants { some_kernels, every_kernel, kernels_and_ops };
struct IsaRow {
  Isa isa;
  const char* name;
  Machine machine;
  Variants variants;
  Isa basis;
  const char* features;
};
#define ANYACCEL_ISA_ROW(name, machine, kernels, basis, features) \
  {Isa::name, #name, Machine::machine, Variants::kernels, Isa::basis, features},
inline constexpr IsaRow kIsaRows[] = {ANYACCEL_ISAS(ANYACCEL_ISA_ROW)};
#undef ANYACCEL_ISA_ROW
inline constexpr int kIsaCount = sizeof kIsaRows / sizeof kIsaRows[0];

constexpr const IsaRow& row_of(Isa isa) { return kIsaRows[static_cast<int>(isa)]; }

// Whether a processor of the instruction set `isa` has all instructions of `other`.
constexpr bool includes(Isa isa, Isa other) {
  // The second condition always holds; without it GCC 12 warns of rows behind the last one.
  while (isa > other && static_cast<int>(isa) < kIsaCount) isa = row_of(isa).basis;
  return isa == other;
}

// Whether code for it can be compiled for this kind of machine.
constexpr bool exists_here(const IsaRow& row) {
#ifdef ANYACCEL_X86
  constexpr Machine kHere = Machine::x86;
#elif defined(__aarch64__)
  constexpr Machine kHere = Machine::arm64;
#else
  constexpr Machine kHere = Machine::any;
#endif
  return row.machine == Machine::any || row.machine == kHere;
}

// The nearest of `isa` and those that it builds on that every kernel has a variant for.
constexpr Isa highest_of_every_kernel(Isa isa) {
  while (row_of(isa).variants == Variants::some_kernels) isa = row_of(isa).basis;
  return isa;
}

// The last usable row of the table, up to that which the environment variable ANYACCEL_ISA names. Read once.
// Throws std::invalid_argument for an unknown name.
Isa selected_isa();
// Whether this process may run it: the processor has it, and it does not come behind selected_isa().
bool can_run(Isa isa);
const char* isa_name(Isa isa);

}  // namespace anyaccel
