// SPDX-License-Identifier: Apache-2.0
// Adagrad for one vector; included by variant files behind loop.h.

namespace anyaccel::optim {
namespace {

struct AdagradUpdate {
  using Constants = AdagradConstants;
  static constexpr int kStates = 1;

  explicit AdagradUpdate(const AdagradConstants& c)
      : weight_decay(set1(c.weight_decay)),
        step_size(set1(c.step_size)),
        eps(set1(c.eps)),
        decays(c.weight_decay != 0) {}

  void step(Wide& p, Wide g, Wide& sum, Wide&) const {
    if (decays) g = add(g, mul(p, weight_decay));
    sum = add(sum, mul(g, g));
    p = sub(p, mul(div(g, add(sqrt(sum), eps)), step_size));
  }

 private:
  Vec weight_decay, step_size, eps;
  bool decays;
};

}  // namespace

template <>
const Kernels<AdagradConstants>& ANYACCEL_KERNELS<AdagradConstants>() {
  static constexpr Kernels<AdagradConstants> kTable = table<AdagradUpdate>();
  return kTable;
}

}  // namespace anyaccel::optim
