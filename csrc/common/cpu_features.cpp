// SPDX-License-Identifier: Apache-2.0
#include "common/cpu_features.h"

#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#ifdef ANYACCEL_X86
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
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
      {"avx2", ymm && bit(leaf7.b, 5)},
      {"fma", ymm && bit(leaf1.c, 12)},
      {"f16c", ymm && bit(leaf1.c, 29)},
      {"avx512f", zmm && bit(leaf7.b, 16)},
      {"avx512dq", zmm && bit(leaf7.b, 17)},
      {"avx512bw", zmm && bit(leaf7.b, 30)},
      {"avx512vl", zmm && bit(leaf7.b, 31)},
      {"avx512_vnni", zmm && bit(leaf7.c, 11)},
      {"avx512_bf16", zmm && bit(leaf7_1.a, 5)},
      {"avx512_fp16", zmm && bit(leaf7.d, 23)},
      {"amx_tile", tiles},
      {"amx_bf16", tiles && bit(leaf7.d, 22)},
      {"amx_int8", tiles && bit(leaf7.d, 25)},
  };
}

#else

std::map<std::string, bool> detect() { return {}; }

#endif

Isa highest() {
  const auto& features = cpu_features();
  auto all = [&](std::initializer_list<const char*> names) {
    for (const char* name : names) {
      const auto found = features.find(name);
      if (found == features.end() || !found->second) return false;
    }
    return true;
  };
  if (!all({"avx2", "fma", "f16c"})) return Isa::scalar;
  if (!all({"avx512f", "avx512dq", "avx512bw", "avx512vl"})) return Isa::avx2;
  if (!all({"avx512_vnni"})) return Isa::avx512;
  if (!all({"avx512_bf16"})) return Isa::avx512_vnni;
  if (!all({"amx_tile", "amx_bf16", "amx_int8"})) return Isa::avx512_bf16;
  return Isa::amx;
}

constexpr Isa kAll[] = {Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512_vnni, Isa::avx512_bf16, Isa::amx};

Isa choose() {
  const Isa best = highest();
  const char* cap = std::getenv("ANYACCEL_ISA");
  if (cap == nullptr || *cap == '\0') return best;
  for (Isa isa : kAll)
    if (std::string(cap) == isa_name(isa)) return isa < best ? isa : best;
  throw std::invalid_argument(std::string("ANYACCEL_ISA='") + cap +
                              "' is unknown; use scalar, avx2, avx512, avx512_vnni, avx512_bf16 or amx");
}

}  // namespace

const std::map<std::string, bool>& cpu_features() {
  static const std::map<std::string, bool> features = detect();
  return features;
}

Isa selected_isa() {
  static const Isa isa = choose();
  return isa;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::amx:
      return "amx";
    case Isa::avx512_bf16:
      return "avx512_bf16";
    case Isa::avx512_vnni:
      return "avx512_vnni";
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    case Isa::scalar:
      break;
  }
  return "scalar";
}

}  // namespace anyaccel
