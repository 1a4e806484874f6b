// SPDX-License-Identifier: Apache-2.0
#include "llm/kernels/ops.h"

#include <cmath>
#include <cstring>

#include "llm/kernels/kernels_ops.h"
#include "simd/pick.h"

namespace anyaccel::llm {

namespace {

const OpKernels& kernels() noexcept {
  static const OpKernels& chosen = pick<OpKernels>(selected_isa());
  return chosen;
}

}  // namespace

void norm(const Norm& norm, const float* x, int64_t n, float* out) noexcept {
  if (norm.kind != NormKind::none)
    kernels().norm(norm, x, n, out);
  else if (out != x)
    std::memmove(out, x, static_cast<size_t>(n) * sizeof(float));
}

void norm_heads(const Norm& norm, float* x, int count, int64_t n, bool own_weights) noexcept {
  if (norm.kind == NormKind::none) return;
  Norm head = norm;
  for (int i = 0; i < count; ++i) {
    if (own_weights && norm.weight != nullptr) head.weight = norm.weight + i * n;
    if (own_weights && norm.bias != nullptr) head.bias = norm.bias + i * n;
    kernels().norm(head, x + i * n, n, x + i * n);
  }
}

void add_norm(float* x, const float* y, float scale, const Norm& norm, int64_t n, float* out) noexcept {
  if (norm.kind != NormKind::none) return kernels().add_norm(x, y, scale, norm, n, out);
  kernels().add(x, y, scale, n);
  if (out != x) std::memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
}

void rope(float* x, int count, int64_t stride, const float* cosine, const float* sine, int half,
          bool interleaved) noexcept {
  kernels().rope(x, count, stride, cosine, sine, half, interleaved);
}

void activate(Activation kind, const float* gate, const float* up, int64_t n, float* out) noexcept {
  kernels().activate(kind, gate, up, n, out);
}

namespace {

// As torch's: above 20 it is the value itself.
float softplus(float x) noexcept { return x > 20 ? x : std::log1p(std::exp(x)); }

}  // namespace

void xielu(const XieluValues& values, float* x, int64_t n) noexcept {
  kernels().xielu(softplus(values.alpha_p), values.beta + softplus(values.alpha_n), values.beta, values.eps, x, n);
}
void cut(float* x, float cutoff, int64_t n) noexcept { kernels().cut(x, cutoff, n); }
void moments(const float* x, int64_t n, float* mean, float* squares) noexcept {
  kernels().moments(x, n, mean, squares);
}

float dot(const float* x, const float* y, int64_t n) noexcept { return kernels().dot(x, y, n); }
void scale(float* x, float factor, int64_t n) noexcept { kernels().scale(x, factor, n); }
void add(float* x, const float* y, float factor, int64_t n) noexcept { kernels().add(x, y, factor, n); }
void softcap(float* x, float cap, int64_t n) noexcept { kernels().softcap(x, cap, n); }
void clamp(float* x, float limit, int64_t n) noexcept { kernels().clamp(x, limit, n); }
void multiply_by_sigmoid(float* x, const float* gate, int64_t n) noexcept { kernels().multiply_by_sigmoid(x, gate, n); }
void softmax(float* x, int64_t n) noexcept { kernels().softmax(x, n); }
float sigmoid(float x) noexcept { return 1.0f / (1.0f + std::exp(-x)); }
int64_t argmax(const float* x, int64_t n) noexcept { return kernels().argmax(x, n); }

}  // namespace anyaccel::llm
