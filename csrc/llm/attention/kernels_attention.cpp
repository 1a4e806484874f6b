// SPDX-License-Identifier: Apache-2.0
#include "llm/attention/kernels_attention.h"

#include "llm/attention/attention_rows.h"
#include "simd/pick.h"
#include "simd/simd.h"

namespace anyaccel::llm {
namespace {

using namespace simd::ANYACCEL_ISA_VARIANT;

void attend_task(const AttendTask& task) {
  switch (task.layout->format) {
    case CacheFormat::f32:
      return attend_rows<F32>(task);
    case CacheFormat::bf16:
      return attend_rows<BF16>(task);
    case CacheFormat::i8:
      return attend_rows<I8>(task);
    case CacheFormat::i4:
      return attend_rows<I4>(task);
  }
}

void combine_row(const CombineTask& task) {
  const int width = task.padded_value_dim;
  const auto part = [&](int index) { return task.partials + index * task.part_stride; };
  float top = -kInfinity;
  for (int i = 0; i < task.parts; ++i)
    if (part(i)[width] > top) top = part(i)[width];
  float total = 0;
  for (int i = 0; i < task.parts; ++i) total += exp2_of(part(i)[width] - top) * part(i)[width + 1];
  const float factor = normaliser(top, total, task.sink);
  for (int first = 0; first < task.value_dim; first += kLanes) {
    Vec v = broadcast(0.0f);
    for (int i = 0; i < task.parts; ++i) v = fma(broadcast(exp2_of(part(i)[width] - top)), load(part(i) + first), v);
    const int rest = task.value_dim - first;
    if (rest >= kLanes)
      store(task.out + first, mul(v, broadcast(factor)));
    else
      store_n(task.out + first, rest, mul(v, broadcast(factor)));
  }
}

constexpr AttentionKernels kKernels{attend_task, combine_row};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::AttentionKernels, anyaccel::llm::kKernels)
