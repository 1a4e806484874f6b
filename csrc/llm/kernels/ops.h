// SPDX-License-Identifier: Apache-2.0
// Operations on rows of activations, which are always float: norms, rotary positions, activations, softmax.
#pragma once

#include <cstdint>

namespace anyaccel::llm {

enum class NormKind : uint8_t { none, rms, layer };

struct Norm {
  NormKind kind = NormKind::none;
  float eps = 1e-5f;
  const float* weight = nullptr;  // null: ones. A "1 + weight" norm (Gemma) has the one added when it is loaded
  const float* bias = nullptr;
};
// out[i] = norm(x[i]); `out` may be `x`. Sums are of floats in lanes, as accurate as pairwise summation.
void norm(const Norm& norm, const float* x, int64_t n, float* out) noexcept;
// For heads: `count` vectors of n values, one after another, in place; weight (and bias) of n values for all of them,
// or one for each when `own_weights`.
void norm_heads(const Norm& norm, float* x, int count, int64_t n, bool own_weights) noexcept;
// x += scale * y, then out = norm(x): a residual and the norm after it, in one pass over memory.
void add_norm(float* x, const float* y, float scale, const Norm& norm, int64_t n, float* out) noexcept;

// Rotates the first 2 * half values of each of `count` heads (`stride` floats apart) in place (Su et al., "RoFormer",
// 2021). Pairs are (i, i + half), or (2i, 2i + 1) when `interleaved`.
void rope(float* x, int count, int64_t stride, const float* cosine, const float* sine, int half,
          bool interleaved) noexcept;

enum class Activation : uint8_t {
  silu,
  gelu,        // x * Phi(x), with erf
  gelu_tanh,   // its tanh approximation ("gelu_new", "gelu_pytorch_tanh", BLOOM's and GPT-2's)
  gelu_quick,  // x * sigmoid(1.702 x)
  relu,
  relu2,       // relu squared
  swiglu_oai,  // GPT-OSS: gate = min(gate, 7), up = clamp(up, -7, 7): (up + 1) * gate * sigmoid(1.702 gate)
  xielu,       // Apertus: has learned values, see xielu() below
};
// out = activation(gate) * up, or activation(gate) when `up` is null. `out` may be `gate` or `up`.
// Not xielu.
void activate(Activation kind, const float* gate, const float* up, int64_t n, float* out) noexcept;

// Learned of each layer: softplus of the first two are factors of the halves of the curve (Huang, "Deriving Activation
// Functions Using Integration", 2024).
struct XieluValues {
  float alpha_p, alpha_n, beta, eps;
};
// x > 0: softplus(alpha_p) x^2 + beta x; else (beta + softplus(alpha_n)) (exp(min(x, eps)) - 1 - x) + beta x. In place.
void xielu(const XieluValues& values, float* x, int64_t n) noexcept;
// x = max(0, x - cutoff).
void cut(float* x, float cutoff, int64_t n) noexcept;
// The mean, and the sum of squares of the differences from it.
void moments(const float* x, int64_t n, float* mean, float* squares) noexcept;

float dot(const float* x, const float* y, int64_t n) noexcept;
void scale(float* x, float factor, int64_t n) noexcept;
void add(float* x, const float* y, float factor, int64_t n) noexcept;       // x += factor * y
void softcap(float* x, float cap, int64_t n) noexcept;                      // cap * tanh(x / cap)
void clamp(float* x, float limit, int64_t n) noexcept;                      // into -limit .. limit
void multiply_by_sigmoid(float* x, const float* gate, int64_t n) noexcept;  // x *= sigmoid(gate)
void softmax(float* x, int64_t n) noexcept;
float sigmoid(float x) noexcept;
// Index of the largest value, the first of equal ones; -1 when a value is NaN or the largest is not finite.
int64_t argmax(const float* x, int64_t n) noexcept;

}  // namespace anyaccel::llm
