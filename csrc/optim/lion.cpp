// SPDX-License-Identifier: Apache-2.0
// The C interface of Lion.
#include "optim/lion.h"

#include "optim/work.h"

extern "C" {

// Increments the step of each tensor and updates it; returns a Status.
ANYACCEL_EXPORT int anyaccel_lion_step(const AnyaccelTensors* tensors, double lr, double beta1, double beta2,
                                       double weight_decay) {
  using anyaccel::optim::LionConstants;
  return anyaccel::optim::update_all<LionConstants>(*tensors, [=](double) {
    LionConstants c{};
    c.keep = static_cast<float>(1.0 - lr * weight_decay);
    c.lr = static_cast<float>(lr);
    c.beta1 = static_cast<float>(beta1);
    c.beta2 = static_cast<float>(beta2);
    c.weight1 = static_cast<float>(1.0 - beta1);
    c.weight2 = static_cast<float>(1.0 - beta2);
    return c;
  });
}

}  // extern "C"
