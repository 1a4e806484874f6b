// SPDX-License-Identifier: Apache-2.0
// The functions of mixers.h as each instruction set does them.
#pragma once

#include <cstdint>

#include "llm/kernels/mixers.h"

namespace anyaccel::llm {

struct MixerKernels {
  void (*convolve)(const Convolution& conv, float* x, int64_t stride, int64_t tokens, int64_t channels, float* state,
                   int64_t state_stride);
  void (*attend_linearly)(const LinearHead& head);
  void (*scan)(const SelectiveScan& scan, float* x, int64_t stride, int64_t tokens, int64_t channels, float* state,
               int64_t state_stride);
  void (*recur)(const GatedRecurrence& unit, float* x, int64_t stride, int64_t tokens, int64_t channels, float* state);
  void (*decays)(const float* x, const float* bias, float rate, int64_t n, float* out);
};

}  // namespace anyaccel::llm
