// SPDX-License-Identifier: Apache-2.0
// The constants of one Lion step.
#pragma once

namespace anyaccel::optim {

// Lion is by Chen et al., https://arxiv.org/abs/2302.06675.
struct LionConstants {
  float keep;  // 1 - lr * weight_decay
  float lr;
  float beta1;
  float weight1;  // 1 - beta1
  float beta2;
  float weight2;  // 1 - beta2
};

}  // namespace anyaccel::optim
