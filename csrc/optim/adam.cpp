// SPDX-License-Identifier: Apache-2.0
// The C interface of Adam.
#include "optim/adam.h"

#include <cmath>

#include "optim/work.h"

extern "C" {

// Increments the step of each tensor and updates it by Adam, or with `decoupled` by AdamW; returns a Status.
ANYACCEL_EXPORT int anyaccel_adam_step(const AnyaccelTensors* tensors, double lr, double beta1, double beta2,
                                       double eps, double weight_decay, int decoupled, int bias_correction) {
  using anyaccel::optim::AdamConstants;
  return anyaccel::optim::update_all<AdamConstants>(*tensors, [=](double step) {
    const double correction1 = bias_correction ? 1.0 - std::pow(beta1, step) : 1.0;
    const double correction2 = bias_correction ? 1.0 - std::pow(beta2, step) : 1.0;
    AdamConstants c{};
    c.keep = static_cast<float>(decoupled ? 1.0 - lr * weight_decay : 1.0);
    c.l2 = static_cast<float>(decoupled ? 0.0 : weight_decay);
    c.weight1 = static_cast<float>(1.0 - beta1);
    c.beta2 = static_cast<float>(beta2);
    c.weight2 = static_cast<float>(1.0 - beta2);
    c.root_scale = static_cast<float>(1.0 / std::sqrt(correction2));
    c.eps = static_cast<float>(eps);
    c.step_size = static_cast<float>(lr / correction1);
    return c;
  });
}

// Undoes AdamW step number `step` in fp32, given its gradient. Rounding errors remain, and a parameter that becomes
// infinite or NaN is set to 0.
ANYACCEL_EXPORT int anyaccel_adam_rollback(float* param, const float* grad, float* exp_avg, float* exp_avg_sq,
                                           int64_t count, double step, double lr, double beta1, double beta2,
                                           double eps, double weight_decay, int bias_correction, int threads) {
  const double correction1 = bias_correction ? 1.0 - std::pow(beta1, step) : 1.0;
  const double correction2 = bias_correction ? 1.0 - std::pow(beta2, step) : 1.0;
  const float root_scale = static_cast<float>(1.0 / std::sqrt(correction2)),
              size = static_cast<float>(lr / correction1);
  const float keep = static_cast<float>(1.0 - lr * weight_decay), epsilon = static_cast<float>(eps);
  const float b1 = static_cast<float>(beta1), b2 = static_cast<float>(beta2);
  const float w1 = static_cast<float>(1.0 - beta1), w2 = static_cast<float>(1.0 - beta2);
  constexpr int64_t kChunk = 16384;
  anyaccel::parallel_for((count + kChunk - 1) / kChunk, threads, [&](int64_t chunk) {
    for (int64_t i = chunk * kChunk, end = std::min(count, i + kChunk); i < end; ++i) {
      const float update = size * (exp_avg[i] / (std::sqrt(exp_avg_sq[i]) * root_scale + epsilon));
      const float before = (param[i] + update) / keep;
      param[i] = std::isfinite(before) ? before : 0.0f;
      exp_avg[i] = (exp_avg[i] - w1 * grad[i]) / b1;
      exp_avg_sq[i] = std::max(0.0f, (exp_avg_sq[i] - w2 * grad[i] * grad[i]) / b2);
    }
  });
  return anyaccel::optim::kOk;
}

ANYACCEL_EXPORT const char* anyaccel_parallel_team() { return anyaccel::parallel_team(); }

}  // extern "C"
