// SPDX-License-Identifier: Apache-2.0
// The constants of one Adam step.
#pragma once

namespace anyaccel::optim {

// Adam is by Kingma and Ba, https://arxiv.org/abs/1412.6980; its decoupled weight decay is by Loshchilov and Hutter,
// https://arxiv.org/abs/1711.05101.
struct AdamConstants {
  float keep;     // 1 - lr * weight_decay (AdamW) or 1
  float l2;       // weight_decay (Adam) or 0
  float weight1;  // 1 - beta1
  float beta2;
  float weight2;     // 1 - beta2
  float root_scale;  // 1 / sqrt(1 - beta2^step), or 1 without bias correction
  float eps;
  float step_size;  // lr / (1 - beta1^step), or lr
};

}  // namespace anyaccel::optim
