// SPDX-License-Identifier: Apache-2.0
// Adagrad for one vector; adagrad_kernels.cpp includes it once for each instruction set.

#include "optim/adagrad.h"
#include "optim/loop.h"

namespace anyaccel::optim::ANYACCEL_ISA_VARIANT {
namespace {

struct AdagradUpdate {
  using Constants = AdagradConstants;
  static constexpr int kStates = 1;

  explicit AdagradUpdate(const AdagradConstants& c)
      : weight_decay(broadcast(c.weight_decay)),
        step_size(broadcast(c.step_size)),
        eps(broadcast(c.eps)),
        decays(c.weight_decay != 0) {}

  [[gnu::always_inline]] void step(Wide& p, Wide g, Wide& sum, Wide&) const {
    if (decays) g = add(g, mul(p, weight_decay));
    sum = add(sum, mul(g, g));
    p = sub(p, mul(div(g, add(sqrt(sum), eps)), step_size));
  }

 private:
  Vec weight_decay, step_size, eps;
  bool decays;
};

}  // namespace
}  // namespace anyaccel::optim::ANYACCEL_ISA_VARIANT

ANYACCEL_KERNELS(anyaccel::optim::Kernels<anyaccel::optim::AdagradConstants>,
                 anyaccel::optim::ANYACCEL_ISA_VARIANT::kTable<anyaccel::optim::ANYACCEL_ISA_VARIANT::AdagradUpdate>)
