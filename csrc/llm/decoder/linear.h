// SPDX-License-Identifier: Apache-2.0
// One packed matrix, and a norm, for models whose other parts are Python's.
#pragma once

#include <cstdint>
#include <vector>

#include "llm/kernels/multiply.h"
#include "llm/pack/matrix.h"

namespace anyaccel::llm {

enum class Values : uint8_t { f32, f16, bf16 };

class Linear {
 public:
  explicit Linear(const Shape& shape);

  size_t bytes() const { return matrix_.shape().bytes(); }
  // See Matrix.
  void set_rows(int64_t first, int64_t count, const Source& source);
  void set_quantised_rows(int64_t first, int64_t count, const uint8_t* q, const float* scales, const float* minima);
  // y[tokens, rows] = x[tokens, cols] Wᵀ + bias, dense; bias: [rows] or null. Calls may come from several threads.
  void multiply(const void* x, void* y, int64_t tokens, Values type, const float* bias) const;
  // y[count, cols] = rows of W by number: an embedding, which may be the head's matrix. Throws UsageError: no such row.
  void copy_rows(const int64_t* rows, int64_t count, void* y, Values type) const;

 private:
  Matrix matrix_;
};

// y = x / sqrt(mean(x²) + eps) * weight for each row; y may be x.
void rms_norm(const void* x, void* y, int64_t rows, int64_t cols, Values type, const float* weight, float eps);

}  // namespace anyaccel::llm
