// SPDX-License-Identifier: Apache-2.0
// Adam for one vector; adam_kernels.cpp includes it once for each instruction set.

#include "optim/adam.h"
#include "optim/loop.h"

namespace anyaccel::optim::ANYACCEL_ISA_VARIANT {
namespace {

struct AdamUpdate {
  using Constants = AdamConstants;
  static constexpr int kStates = 2;

  explicit AdamUpdate(const AdamConstants& c)
      : keep(broadcast(c.keep)),
        l2(broadcast(c.l2)),
        weight1(broadcast(c.weight1)),
        beta2(broadcast(c.beta2)),
        weight2(broadcast(c.weight2)),
        root_scale(broadcast(c.root_scale)),
        eps(broadcast(c.eps)),
        step_size(broadcast(c.step_size)),
        with_l2(c.l2 != 0.0f) {}

  [[gnu::always_inline]] void step(Wide& p, Wide g, Wide& m, Wide& v) const {
    if (with_l2) g = add(g, mul(p, l2));
    m = add(m, mul(sub(g, m), weight1));
    v = add(mul(v, beta2), mul(mul(g, weight2), g));
    const Wide denominator = add(mul(sqrt(v), root_scale), eps);
    p = sub(mul(p, keep), mul(div(m, denominator), step_size));
  }

 private:
  Vec keep, l2, weight1, beta2, weight2, root_scale, eps, step_size;
  bool with_l2;
};

}  // namespace
}  // namespace anyaccel::optim::ANYACCEL_ISA_VARIANT

ANYACCEL_KERNELS(anyaccel::optim::Kernels<anyaccel::optim::AdamConstants>,
                 anyaccel::optim::ANYACCEL_ISA_VARIANT::kTable<anyaccel::optim::ANYACCEL_ISA_VARIANT::AdamUpdate>)
