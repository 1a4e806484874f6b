// SPDX-License-Identifier: Apache-2.0
// The types that the optimizers' kernels and their C interfaces share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "simd/isa.h"

namespace anyaccel::optim {

// The numbers are part of the C interfaces.
enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2 };
constexpr int kDTypes = 3;

constexpr size_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// Kernels work on blocks of this many elements, and work is split at multiples of it.
constexpr int64_t kBlock = 64;

// One piece of work: `count` elements at each address. Unless `copy` is null, the new parameters are also written there
// in `copy_dtype` (bf16 or f16). `state2` is null in optimizers with one moment.
struct Piece {
  void* param;
  const void* grad;
  void* state1;
  void* state2;
  void* copy;
  DType copy_dtype;
  bool stream;  // write the copy past the caches
  int64_t count;
};

// The kernels of one instruction set by the dtypes of parameter, gradient and state (f32 or bf16). An entry is null
// where a combination is not supported: a gradient must have its parameter's dtype or f32, unless the parameter is f32.
template <class Constants>
struct Kernels {
  using Fn = void (*)(const Constants& constants, const Piece& piece);
  Fn of[kDTypes][kDTypes][2];

  static constexpr bool compiled_for(const IsaRow& row) { return row.variants == Variants::kernels_and_ops; }

  Fn find(DType param, DType grad, DType state) const {
    return of[static_cast<int>(param)][static_cast<int>(grad)][static_cast<int>(state)];
  }
};

}  // namespace anyaccel::optim
