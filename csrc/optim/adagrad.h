// SPDX-License-Identifier: Apache-2.0
// The constants of one Adagrad step.
#pragma once

namespace anyaccel::optim {

// Adagrad is by Duchi, Hazan and Singer, https://jmlr.org/papers/v12/duchi11a.html.
struct AdagradConstants {
  float weight_decay;
  float step_size;  // lr / (1 + (step - 1) * lr_decay)
  float eps;
};

}  // namespace anyaccel::optim
