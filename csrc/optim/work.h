// SPDX-License-Identifier: Apache-2.0
// Updates many tensors in one call, whose work is split over threads by elements, not by tensors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <new>
#include <vector>

#include "common/parallel.h"
#include "optim/types.h"
#include "simd/pick.h"

#define ANYACCEL_EXPORT __attribute__((visibility("default")))

extern "C" {

// The tensors of a call, with `count` entries in each array. _native_step.py has the same layout.
struct AnyaccelTensors {
  int64_t count;
  const int64_t* sizes;  // elements
  void* const* params;
  const void* const* grads;
  void* const* states1;
  void* const* states2;   // may be null in optimizers with one moment
  void* const* copies;    // may be null, as may each entry
  float* const* steps;    // the call increments them
  const int32_t* dtypes;  // parameter + 4 * gradient + 16 * state + 64 * copy, as in DType
  int32_t threads;
  int32_t isa;  // the highest Isa to use, or -1
};

}  // extern "C"

namespace anyaccel::optim {

// The results of the C functions.
enum Status : int { kOk = 0, kBadDtype = 1, kBadIsa = 2, kNoMemory = 3 };

// Pieces start at multiples of this many elements of a tensor, so that no two threads write to one cache line.
constexpr int64_t kGrain = 64;
static_assert(kGrain % kBlock == 0);

// The chunk size, in elements, is a trade-off between an even split and the cost of taking a chunk. A call with fewer
// than kAlone elements is not worth waking another thread.
constexpr int64_t kMinChunk = 4096, kMaxChunk = 32768, kChunksPerThread = 16, kAlone = 8192;

// Copies of so many elements would not stay in the caches, so they are written past them.
constexpr int64_t kStreamElements = int64_t{1} << 21;

// Increments the steps, then updates all tensors. constants_of(step) returns the constants of a step.
template <class Constants, class ConstantsOf>
int update_all(const AnyaccelTensors& all, ConstantsOf&& constants_of) noexcept {
  Isa isa;
  try {
    isa = selected_isa();
  } catch (const std::exception&) {
    return kBadIsa;
  }
  if (all.isa >= 0) isa = std::min(isa, static_cast<Isa>(all.isa));
  const Kernels<Constants>& table = pick<Kernels<Constants>>(isa);
  struct Tensor {
    typename Kernels<Constants>::Fn fn;
    int64_t start;  // the sum of the sizes of earlier tensors, each rounded up to kGrain
    size_t constants;
  };
  try {
    std::vector<Tensor> tensors(static_cast<size_t>(all.count));
    std::vector<Constants> constants;
    int64_t total = 0;
    float last = 0.0f;
    for (int64_t t = 0; t < all.count; ++t) {
      const int32_t code = all.dtypes[t];
      const int param = code & 3, grad = (code >> 2) & 3, state = (code >> 4) & 3;
      if (param >= kDTypes || grad >= kDTypes || state > 1) return kBadDtype;
      const auto fn = table.of[param][grad][state];
      if (fn == nullptr) return kBadDtype;
      const float step = *all.steps[t] + 1.0f;
      if (constants.empty() || step != last) constants.push_back(constants_of(static_cast<double>(step)));
      last = step;
      tensors[static_cast<size_t>(t)] = {fn, total, constants.size() - 1};
      total += (all.sizes[t] + kGrain - 1) / kGrain * kGrain;
    }
    for (int64_t t = 0; t < all.count; ++t) *all.steps[t] += 1.0f;

    const int threads = total < kAlone ? 1 : std::max<int>(all.threads, 1);
    const int64_t even = total / (threads * kChunksPerThread) / kGrain * kGrain;
    const int64_t chunk_size = std::clamp(even, kMinChunk, kMaxChunk);
    const bool stream = total >= kStreamElements;
    parallel_for((total + chunk_size - 1) / chunk_size, threads, [&](int64_t chunk) {
      int64_t begin = chunk * chunk_size;
      const int64_t end = std::min(begin + chunk_size, total);
      // Finds the last tensor that starts at `begin` or before, which skips tensors without elements.
      auto tensor = std::upper_bound(tensors.begin(), tensors.end(), begin,
                                     [](int64_t at, const Tensor& other) { return at < other.start; }) -
                    tensors.begin() - 1;
      for (; begin < end; ++tensor) {
        const Tensor& current = tensors[static_cast<size_t>(tensor)];
        const int64_t from = begin - current.start;
        const int64_t count = std::min(all.sizes[tensor] - from, end - begin);
        if (count > 0) {
          const int32_t code = all.dtypes[tensor];
          const auto param = static_cast<DType>(code & 3), grad = static_cast<DType>((code >> 2) & 3),
                     state = static_cast<DType>((code >> 4) & 3), copy = static_cast<DType>((code >> 6) & 3);
          const auto shift = [from](void* at, DType dtype) -> void* {
            return static_cast<char*>(at) + from * static_cast<int64_t>(bytes_of(dtype));
          };
          void* const to = all.copies == nullptr ? nullptr : all.copies[tensor];
          Piece piece{};
          piece.param = shift(all.params[tensor], param);
          piece.grad = shift(const_cast<void*>(all.grads[tensor]), grad);
          piece.state1 = shift(all.states1[tensor], state);
          if (all.states2 != nullptr) piece.state2 = shift(all.states2[tensor], state);
          if (to != nullptr) piece.copy = shift(to, copy);
          piece.copy_dtype = copy;
          piece.stream = stream;
          piece.count = count;
          current.fn(constants[current.constants], piece);
          begin += count;
        }
        // Skip the rounding, to the start of the next tensor.
        if (from + std::max<int64_t>(count, 0) >= all.sizes[tensor])
          begin = current.start + (all.sizes[tensor] + kGrain - 1) / kGrain * kGrain;
      }
    });
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
  return kOk;
}

}  // namespace anyaccel::optim
