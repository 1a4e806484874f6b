// SPDX-License-Identifier: Apache-2.0
// The C interface of Adagrad.
#include "optim/adagrad.h"

#include "optim/work.h"

extern "C" {

// Increments the step of each tensor and updates it; returns a Status.
ANYACCEL_EXPORT int anyaccel_adagrad_step(const AnyaccelTensors* tensors, double lr, double lr_decay, double eps,
                                          double weight_decay) {
  using anyaccel::optim::AdagradConstants;
  return anyaccel::optim::update_all<AdagradConstants>(*tensors, [=](double step) {
    AdagradConstants c{};
    c.weight_decay = static_cast<float>(weight_decay);
    c.step_size = static_cast<float>(lr / (1.0 + (step - 1.0) * lr_decay));
    c.eps = static_cast<float>(eps);
    return c;
  });
}

}  // extern "C"
