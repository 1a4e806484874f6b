// SPDX-License-Identifier: Apache-2.0
// Lion for one vector; lion_kernels.cpp includes it once for each instruction set.

#include "optim/lion.h"
#include "optim/loop.h"

namespace anyaccel::optim::ANYACCEL_ISA_VARIANT {
namespace {

struct LionUpdate {
  using Constants = LionConstants;
  static constexpr int kStates = 1;

  explicit LionUpdate(const LionConstants& c)
      : keep(broadcast(c.keep)),
        lr(broadcast(c.lr)),
        beta1(broadcast(c.beta1)),
        weight1(broadcast(c.weight1)),
        beta2(broadcast(c.beta2)),
        weight2(broadcast(c.weight2)) {}

  [[gnu::always_inline]] void step(Wide& p, Wide g, Wide& m, Wide&) const {
    // Interpolating by the difference of m and g would give NaN for two infinities of the same sign.
    const Wide direction = add(mul(m, beta1), mul(g, weight1));
    p = sub(mul(p, keep), mul(sign(direction), lr));
    m = add(mul(m, beta2), mul(g, weight2));
  }

 private:
  Vec keep, lr, beta1, weight1, beta2, weight2;
};

}  // namespace
}  // namespace anyaccel::optim::ANYACCEL_ISA_VARIANT

ANYACCEL_KERNELS(anyaccel::optim::Kernels<anyaccel::optim::LionConstants>,
                 anyaccel::optim::ANYACCEL_ISA_VARIANT::kTable<anyaccel::optim::ANYACCEL_ISA_VARIANT::LionUpdate>)
