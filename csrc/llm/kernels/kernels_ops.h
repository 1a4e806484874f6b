// SPDX-License-Identifier: Apache-2.0
// The functions of ops.h as each instruction set does them.
#pragma once

#include <cstdint>

#include "llm/kernels/ops.h"

namespace anyaccel::llm {

struct OpKernels {
  // Kinds other than none.
  void (*norm)(const Norm& norm, const float* x, int64_t n, float* out);
  void (*add_norm)(float* x, const float* y, float scale, const Norm& norm, int64_t n, float* out);
  void (*rope)(float* x, int count, int64_t stride, const float* cosine, const float* sine, int half, bool interleaved);
  void (*activate)(Activation kind, const float* gate, const float* up, int64_t n, float* out);
  // Values of the activation itself: softplus is done.
  void (*xielu)(float positive, float negative, float beta, float eps, float* x, int64_t n);
  void (*cut)(float* x, float cutoff, int64_t n);
  void (*moments)(const float* x, int64_t n, float* mean, float* squares);
  float (*dot)(const float* x, const float* y, int64_t n);
  void (*scale)(float* x, float factor, int64_t n);
  void (*add)(float* x, const float* y, float factor, int64_t n);
  void (*softcap)(float* x, float cap, int64_t n);
  void (*clamp)(float* x, float limit, int64_t n);
  void (*multiply_by_sigmoid)(float* x, const float* gate, int64_t n);
  void (*softmax)(float* x, int64_t n);
  int64_t (*argmax)(const float* x, int64_t n);
};

}  // namespace anyaccel::llm
