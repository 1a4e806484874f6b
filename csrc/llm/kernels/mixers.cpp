// SPDX-License-Identifier: Apache-2.0
#include "llm/kernels/mixers.h"

#include <cmath>

#include "llm/kernels/kernels_mixers.h"
#include "llm/kernels/ops.h"
#include "simd/pick.h"

namespace anyaccel::llm {

namespace {

const MixerKernels& kernels() noexcept {
  static const MixerKernels& chosen = pick<MixerKernels>(selected_isa());
  return chosen;
}

}  // namespace

void convolve(const Convolution& conv, float* x, int64_t stride, int64_t tokens, int64_t channels, float* state,
              int64_t state_stride) noexcept {
  if (tokens > 0 && channels > 0) kernels().convolve(conv, x, stride, tokens, channels, state, state_stride);
}

void attend_linearly(const LinearHead& head) noexcept { kernels().attend_linearly(head); }

void scan(const SelectiveScan& scan, float* x, int64_t stride, int64_t tokens, int64_t channels, float* state,
          int64_t state_stride) noexcept {
  if (tokens > 0 && channels > 0) kernels().scan(scan, x, stride, tokens, channels, state, state_stride);
}

void recur(const GatedRecurrence& unit, float* x, int64_t stride, int64_t tokens, int64_t channels,
           float* state) noexcept {
  if (tokens > 0 && channels > 0) kernels().recur(unit, x, stride, tokens, channels, state);
}

void decays(const float* x, const float* bias, float rate, int64_t n, float* out) noexcept {
  kernels().decays(x, bias, rate, n, out);
}

void l2_norm(const float* x, int64_t n, float eps, float scale, float* out) noexcept {
  // The mean of the squares is a share of their sum.
  const auto count = static_cast<float>(n);
  norm(Norm{NormKind::rms, eps / count, nullptr, nullptr}, x, n, out);
  anyaccel::llm::scale(out, scale / std::sqrt(count), n);
}

float softplus(float x) noexcept { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace anyaccel::llm
