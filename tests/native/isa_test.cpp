// SPDX-License-Identifier: Apache-2.0
// Which instruction set is chosen on which processor, and which variants of a kernel that takes.
#include <algorithm>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>

#include "check.h"
#include "common/cpu_features.h"
#include "llm/kernels/gemm_kernels.h"
#include "llm/kernels/gemm_select.h"
#include "llm/kernels/gemv.h"
#include "simd/pick.h"

namespace {

using namespace anyaccel;

std::map<std::string, bool> features(const std::string& names) {
  std::map<std::string, bool> result;
  std::istringstream in(names);
  for (std::string name; in >> name;) result[name] = true;
  return result;
}

void test_chosen() {
  const std::string avx2 = "avx2 fma f16c ", avx512 = "avx512f avx512dq avx512bw avx512vl ";
  struct Expected {
    std::string features, cap;
    Isa isa;
  };
  const Expected all[] = {
      {"", "", Isa::portable},
      {"avx_vnni avx512f", "", Isa::portable},
      {"avx2 fma", "", Isa::portable},
      {avx2, "", Isa::avx2},
      {avx2, "amx", Isa::avx2},
      {avx2, "portable", Isa::portable},
      // Alder Lake
      {avx2 + "avx_vnni", "", Isa::avx_vnni},
      {avx2 + "avx_vnni", "avx2", Isa::avx2},
      {avx2 + "avx_vnni", "avx512", Isa::avx_vnni},
      // Skylake, Ice Lake, Zen 4
      {avx2 + avx512, "", Isa::avx512},
      {avx2 + avx512 + "avx512_vnni", "", Isa::avx512_vnni},
      {avx2 + avx512 + "avx512_vnni avx512_bf16", "", Isa::avx512_bf16},
      {avx2 + avx512 + "avx512_vnni avx512_bf16", "avx_vnni", Isa::avx2},
      // VNNI is of the branch whose rows are there
      {avx2 + "avx512f avx512_vnni avx512_bf16", "", Isa::avx2},
      {avx2 + "avx_vnni avx512f avx512_vnni", "", Isa::avx_vnni},
      // Zen 5, Sapphire Rapids
      {avx2 + avx512 + "avx_vnni avx512_vnni avx512_bf16", "", Isa::avx512_bf16},
      {avx2 + avx512 + "avx_vnni avx512_vnni avx512_bf16", "avx_vnni", Isa::avx_vnni},
      {avx2 + avx512 + "avx_vnni avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8", "", Isa::amx},
  };
  const Expected arm[] = {
      {"asimd", "", Isa::neon},
      {"asimd", "portable", Isa::portable},
      {"asimd", "amx", Isa::portable},
      // Graviton 2, Altra
      {"asimd asimdhp asimddp", "", Isa::neon_dot},
      {"asimd asimdhp asimddp", "neon", Isa::neon},
      {"asimd asimdhp asimddp bf16", "", Isa::neon_dot},
      {"asimd i8mm bf16", "", Isa::neon},
      // Graviton 3, Grace
      {"asimd asimdhp asimddp sve bf16 i8mm", "", Isa::neon_bf16_i8mm},
      {"asimd asimdhp asimddp sve bf16 i8mm", "neon_dot", Isa::neon_dot},
  };
  for (const Expected& each : all)
    if (exists_here(row_of(Isa::avx2))) CHECK(choose_isa(features(each.features), each.cap) == each.isa);
  for (const Expected& each : arm)
    if (exists_here(row_of(Isa::neon))) CHECK(choose_isa(features(each.features), each.cap) == each.isa);
  // A machine that is neither has no row of its own.
  if (!exists_here(row_of(Isa::avx2))) CHECK(choose_isa(features(avx2 + avx512), "") == Isa::portable);
  if (!exists_here(row_of(Isa::neon))) CHECK(choose_isa(features("asimd asimddp"), "") == Isa::portable);
  CHECK(choose_isa(features(avx2), "scalar") == Isa::scalar);
  try {
    choose_isa({}, "sse9");
    CHECK(false);
  } catch (const std::invalid_argument& error) {
    const std::string text = error.what();
    CHECK(text.find("'sse9'") != std::string::npos && text.find(", neon_dot or neon_bf16_i8mm") != std::string::npos);
  }
}

static_assert(includes(Isa::amx, Isa::scalar) && includes(Isa::amx, Isa::avx512_vnni) &&
              includes(Isa::avx_vnni, Isa::avx2) && includes(Isa::avx2, Isa::avx2) &&
              includes(Isa::neon_bf16_i8mm, Isa::neon) && includes(Isa::neon, Isa::portable));
static_assert(!includes(Isa::avx512, Isa::avx_vnni) && !includes(Isa::amx, Isa::avx_vnni) &&
              !includes(Isa::avx_vnni, Isa::avx512) && !includes(Isa::avx2, Isa::avx_vnni) &&
              !includes(Isa::neon, Isa::amx) && !includes(Isa::amx, Isa::neon));
static_assert(highest_of_every_kernel(Isa::avx_vnni) == Isa::avx2 && highest_of_every_kernel(Isa::amx) == Isa::avx512);

// A row comes behind that which it builds on, which includes() counts on.
constexpr bool in_order() {
  for (const IsaRow& row : kIsaRows)
    if (row.basis > row.isa || (row.basis == row.isa) != (row.isa == Isa::scalar)) return false;
  return true;
}
static_assert(in_order());

void test_variants_of_arm() {
  using llm::Format;
  if (!exists_here(row_of(Isa::neon))) return;
  const auto gemv = [](Isa isa) { return &pick<llm::GemvKernels>(isa); };
  CHECK(gemv(Isa::neon) != gemv(Isa::portable) && gemv(Isa::neon_dot) != gemv(Isa::neon));
  CHECK(gemv(Isa::neon_bf16_i8mm) == gemv(Isa::neon_dot));
  const auto gemm = [](Isa isa, Format format, int group) { return &llm::gemm_kernels(isa, {format, 16, 32, group}); };
  const llm::GemmKernels* floats = &pick<llm::GemmKernels>(Isa::neon);
  const llm::GemmKernels* dot = find_variant<llm::IntegerGemmKernels>(Isa::neon_dot)->find({Format::i8, 16, 32, 0});
  CHECK(gemm(Isa::neon, Format::i8, 0) == floats && gemm(Isa::neon, Format::i4, 32) != floats);
  CHECK(gemm(Isa::neon_dot, Format::i8, 0) == dot && gemm(Isa::neon_dot, Format::i4, 32) == dot);
  CHECK(gemm(Isa::neon_dot, Format::i8, 16) == floats && gemm(Isa::neon_dot, Format::bf16, 0) == floats);
}

void test_variants() {
  using llm::Format;
  if (!exists_here(row_of(Isa::avx2))) return;
  const auto gemv = [](Isa isa) { return &pick<llm::GemvKernels>(isa); };
  CHECK(gemv(Isa::avx_vnni) != gemv(Isa::avx2) && gemv(Isa::avx_vnni) != gemv(Isa::avx512));
  CHECK(gemv(Isa::amx) == gemv(Isa::avx512_vnni));
  const auto gemm = [](Isa isa, Format format, int group) { return &llm::gemm_kernels(isa, {format, 16, 32, group}); };
  const auto find = find_variant<llm::IntegerGemmKernels>(Isa::avx_vnni)->find;
  const llm::GemmKernels* vnni = find({Format::i8, 16, 32, 0});
  const llm::GemmKernels* floats = &pick<llm::GemmKernels>(Isa::avx2);
  CHECK(gemm(Isa::avx_vnni, Format::i8, 0) == vnni && gemm(Isa::avx_vnni, Format::i8, 32) != vnni);
  CHECK(gemm(Isa::avx_vnni, Format::i4, 32) == find({Format::i4, 16, 32, 32}));
  CHECK(gemm(Isa::avx_vnni, Format::i6, 16)->operands == llm::GemmKernels::Operands::bytes &&
        gemm(Isa::avx_vnni, Format::bf16, 0) == floats);
  CHECK(gemm(Isa::avx2, Format::i3, 16) != floats && gemm(Isa::avx2, Format::i6, 16) != floats);
  CHECK(gemm(Isa::avx2, Format::i8, 0) == floats && gemm(Isa::avx2, Format::i4, 32) != vnni);
  CHECK(gemm(Isa::avx512, Format::i8, 0) == &pick<llm::GemmKernels>(Isa::avx512));
}

}  // namespace

int main() {
  test_chosen();
  test_variants();
  test_variants_of_arm();
  return 0;
}
