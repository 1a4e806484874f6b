// SPDX-License-Identifier: Apache-2.0
// [kernel]
#include <cstddef>

extern "C" void scale_add(const float* x, float* y, float alpha, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) y[i] += alpha * x[i];
}
// [/kernel]
