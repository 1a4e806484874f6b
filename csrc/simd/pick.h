// SPDX-License-Identifier: Apache-2.0
// The one dispatcher. A table is a struct of function pointers. Each variant of a kernel file defines its table with
// ANYACCEL_KERNELS, and pick<Table>(isa) finds the one for an instruction set.
#pragma once

#include "simd/isa.h"

namespace anyaccel {

// The table of one variant, which the file that is compiled for it defines.
template <class Table, Isa kIsa>
const Table& variant();

// In a kernel file, outside all namespaces and with full names.
#define ANYACCEL_KERNELS(Table, kernels)                                         \
  template <>                                                                    \
  const Table& anyaccel::variant<Table, anyaccel::Isa::ANYACCEL_ISA_VARIANT>() { \
    return kernels;                                                              \
  }

// Whether a table has a variant for a row: all have those of more than `some_kernels`; a table that has others, or
// fewer, says so by a member compiled_for().
template <class Table>
constexpr bool written_for(const IsaRow& row) {
  if (!exists_here(row)) return false;
  if constexpr (requires { Table::compiled_for(row); })
    return Table::compiled_for(row);
  else
    return row.variants != Variants::some_kernels;
}

template <class Table>
constexpr bool compiled_for(const IsaRow& row) {
#ifdef ANYACCEL_NEWEST_ONLY  // for tests in a hurry: scalar, and what the newest processor runs
  for (const IsaRow& other : kIsaRows)
    if (row.isa != Isa::scalar && other.isa > row.isa && includes(other.isa, row.isa) && written_for<Table>(other))
      return false;
#endif
  return written_for<Table>(row);
}

// The table of the last instruction set that `isa` includes, or null when it includes none of those that there are.
template <class Table, int kRow = kIsaCount - 1>
const Table* find_variant(Isa isa) {
  if constexpr (kRow < 0) {
    return nullptr;
  } else {
    if constexpr (compiled_for<Table>(kIsaRows[kRow]))
      if (includes(isa, kIsaRows[kRow].isa)) return &variant<Table, kIsaRows[kRow].isa>();
    return find_variant<Table, kRow - 1>(isa);
  }
}

// As find_variant(), for tables that have a variant for every processor.
template <class Table>
const Table& pick(Isa isa) {
  static_assert(compiled_for<Table>(kIsaRows[0]));
  return *find_variant<Table>(isa);
}

}  // namespace anyaccel
