// SPDX-License-Identifier: Apache-2.0
// What recurrent mixers compute beside products of matrices: the causal convolution, and linear attention.
//
// Each result depends on the tokens before it only, and never on how many of them pass in a call: the sums are the same
// ones in the same order, for a token alone and for a whole prompt.
#pragma once

#include <cstdint>

namespace anyaccel::llm {

constexpr int kMostTaps = 16;  // tokens that a convolution sees

// A causal convolution of each channel alone, in place: x[t] = out_gate[t] * act(bias + sum taps[j] * y[t - j']), where
// y[t] = in_gate[t] * x[t] and taps[kernel - 1] is of token t itself.
struct Convolution {
  int kernel;
  const float* taps;  // [kernel, channels]
  int64_t tap_stride;
  const float* bias;      // [channels], or null
  bool silu;              // the activation, or none
  const float* in_gate;   // as x, or null
  const float* out_gate;  // as x, or null
};
// x, the gates and the state [kernel - 1, channels] of y, oldest first, begin at the first of `channels`.
void convolve(const Convolution& conv, float* x, int64_t stride, int64_t tokens, int64_t channels, float* state,
              int64_t state_stride) noexcept;

// Tokens of one head of linear attention; see LinearAttention in spec/decoder.py. Queries and keys are ready to use.
struct LinearHead {
  int key_dim, value_dim;
  bool delta;
  int tokens;
  const float* q;  // [tokens, key_dim]
  const float* k;
  int64_t key_stride;
  const float* v;  // [tokens, value_dim]
  int64_t value_stride;
  const float* decay;     // [tokens]
  const float* decays;    // [tokens, key_dim], with key_stride: each channel of the keys has its own; or null
  const float* strength;  // [tokens]
  float skip;             // of the values; 0: none
  float* state;           // [key_dim, value_dim]
  float* out;             // [tokens, value_dim]
  int64_t out_stride;
};
void attend_linearly(const LinearHead& head) noexcept;

// Mamba's selective scan of tokens, each channel alone, in place: with step = softplus(steps[t]), for each n
// S[n] = exp(rates[n] * step) * S[n] + step * x[t] * b[t][n], then x[t] = silu(gate[t]) * (skip * x[t] + sum c[t][n] *
// S[n]).
struct SelectiveScan {
  int state_dim;
  const float* rates;  // [state_dim, channels], negative
  int64_t rate_stride;
  const float* skip;   // [channels]
  const float* steps;  // [tokens, channels]
  int64_t steps_stride;
  const float* gates;  // [tokens, channels]
  const float* b;      // [tokens, state_dim]
  const float* c;
  int64_t key_stride;
};
// x, gates [both of `stride`], rates, skip, steps and the state [state_dim, channels] begin at the first of `channels`.
void scan(const SelectiveScan& scan, float* x, int64_t stride, int64_t tokens, int64_t channels, float* state,
          int64_t state_stride) noexcept;

// A real-gated linear recurrent unit, each channel alone, in place: with i and r the sigmoids of the gates' inputs and
// biases, a = exp(-8 * r * softplus(rates)), S = a * S + sqrt(1 - a^2) * i * x[t], then x[t] = S. The factor of the
// first token of a sequence (`opens`) is 1.
struct GatedRecurrence {
  const float* rates;        // [channels]
  const float* input_gates;  // [tokens, channels]
  const float* decay_gates;
  int64_t gates_stride;
  const float* input_bias;  // [channels]
  const float* decay_bias;
  bool opens;
};
// x, all of the above, and the state [channels] begin at the first of `channels`.
void recur(const GatedRecurrence& unit, float* x, int64_t stride, int64_t tokens, int64_t channels,
           float* state) noexcept;

// out = exp(-rate * log(1 + exp(x + bias))), of n values.
void decays(const float* x, const float* bias, float rate, int64_t n, float* out) noexcept;
// out = scale * x / sqrt(sum of squares + eps)
void l2_norm(const float* x, int64_t n, float eps, float scale, float* out) noexcept;
// log(1 + exp(x))
float softplus(float x) noexcept;

}  // namespace anyaccel::llm
