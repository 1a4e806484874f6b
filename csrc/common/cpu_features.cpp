// SPDX-License-Identifier: Apache-2.0
#include "common/cpu_features.h"

#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <stdexcept>

#ifdef ANYACCEL_X86
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace anyaccel {
namespace {

#ifdef ANYACCEL_X86

struct Cpuid {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  Cpuid(uint32_t leaf, uint32_t subleaf) { __get_cpuid_count(leaf, subleaf, &a, &b, &c, &d); }
};

bool bit(uint32_t word, int index) { return (word >> index) & 1u; }

uint64_t xcr0() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Linux gives tile registers on request only; the request is per process and harmless to repeat.
bool amx_permitted() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kArchReqXcompPerm = 0x1023;
  constexpr int kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
#else
  return false;
#endif
}

std::map<std::string, bool> detect() {
  const Cpuid leaf1(1, 0), leaf7(7, 0), leaf7_1(7, 1);
  const bool osxsave = bit(leaf1.c, 27);
  const uint64_t state = osxsave ? xcr0() : 0;
  const bool ymm = (state & 0x6) == 0x6;
  const bool zmm = ymm && (state & 0xe0) == 0xe0;
  const bool tiles = (state & 0x60000) == 0x60000 && bit(leaf7.d, 24) && amx_permitted();
  return {
      {"avx2", ymm && bit(leaf7.b, 5)},         {"fma", ymm && bit(leaf1.c, 12)},
      {"f16c", ymm && bit(leaf1.c, 29)},        {"avx_vnni", ymm && bit(leaf7_1.a, 4)},
      {"avx512f", zmm && bit(leaf7.b, 16)},     {"avx512dq", zmm && bit(leaf7.b, 17)},
      {"avx512bw", zmm && bit(leaf7.b, 30)},    {"avx512vl", zmm && bit(leaf7.b, 31)},
      {"avx512_vnni", zmm && bit(leaf7.c, 11)}, {"avx512_bf16", zmm && bit(leaf7_1.a, 5)},
      {"avx512_fp16", zmm && bit(leaf7.d, 23)}, {"amx_tile", tiles},
      {"amx_bf16", tiles && bit(leaf7.d, 22)},  {"amx_int8", tiles && bit(leaf7.d, 25)},
  };
}

#elif defined(__aarch64__)

// By the names and the bits of Linux (/proc/cpuinfo, and the kernel's list of hwcaps for arm64), which says what the
// processor and itself support together.
std::map<std::string, bool> detect() {
#ifdef __linux__
  const auto caps = static_cast<uint64_t>(getauxval(AT_HWCAP)), more = static_cast<uint64_t>(getauxval(AT_HWCAP2));
#else
  const uint64_t caps = 2, more = 0;  // every 64-bit Arm processor has asimd
#endif
  const auto bit = [](uint64_t word, int index) { return ((word >> index) & 1u) != 0; };
  return {
      {"asimd", bit(caps, 1)}, {"asimdhp", bit(caps, 10)}, {"asimddp", bit(caps, 20)}, {"sve", bit(caps, 22)},
      {"sve2", bit(more, 1)},  {"i8mm", bit(more, 13)},    {"bf16", bit(more, 14)},
  };
}

#else

std::map<std::string, bool> detect() { return {}; }

#endif

// Whether a processor has all of the features that a row and those that it builds on name.
bool usable(const IsaRow& row, const std::map<std::string, bool>& features) {
  std::istringstream names(row.features);
  for (std::string name; names >> name;) {
    const auto found = features.find(name);
    if (found == features.end() || !found->second) return false;
  }
  return exists_here(row) && (row.basis == row.isa || usable(row_of(row.basis), features));
}

}  // namespace

Isa choose_isa(const std::map<std::string, bool>& features, const std::string& cap) {
  Isa best = Isa::scalar;
  std::string names;
  for (const IsaRow& row : kIsaRows) {
    if (usable(row, features)) best = row.isa;
    if (cap == row.name) return best;
    names += (names.empty() ? "" : row.isa == kIsaRows[kIsaCount - 1].isa ? " or " : ", ") + std::string(row.name);
  }
  if (cap.empty()) return best;
  throw std::invalid_argument("ANYACCEL_ISA='" + cap + "' is unknown; use " + names);
}

const std::map<std::string, bool>& cpu_features() {
  static const std::map<std::string, bool> features = detect();
  return features;
}

Isa selected_isa() {
  static const Isa isa = [] {
    const char* cap = std::getenv("ANYACCEL_ISA");
#ifdef ANYACCEL_EMULATE
    for (const IsaRow& row : kIsaRows)  // one that is plain code here runs where it is named
      if (cap != nullptr && row.name == std::string(cap) &&
          usable(row_of(highest_of_every_kernel(row.isa)), cpu_features()))
        return row.isa;
#endif
    return choose_isa(cpu_features(), cap == nullptr ? "" : cap);
  }();
  return isa;
}

bool can_run(Isa isa) { return isa <= selected_isa() && usable(row_of(isa), cpu_features()); }

const char* isa_name(Isa isa) { return row_of(isa).name; }

}  // namespace anyaccel
