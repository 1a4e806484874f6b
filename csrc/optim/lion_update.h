// SPDX-License-Identifier: Apache-2.0
// Lion for one vector; included by variant files behind loop.h.

namespace anyaccel::optim {
namespace {

struct LionUpdate {
  using Constants = LionConstants;
  static constexpr int kStates = 1;

  explicit LionUpdate(const LionConstants& c)
      : keep(set1(c.keep)),
        lr(set1(c.lr)),
        beta1(set1(c.beta1)),
        weight1(set1(c.weight1)),
        beta2(set1(c.beta2)),
        weight2(set1(c.weight2)) {}

  void step(Wide& p, Wide g, Wide& m, Wide&) const {
    // Not by way of the difference: two infinities of one sign have none.
    const Wide direction = add(mul(m, beta1), mul(g, weight1));
    p = sub(mul(p, keep), mul(sign(direction), lr));
    m = add(mul(m, beta2), mul(g, weight2));
  }

 private:
  Vec keep, lr, beta1, weight1, beta2, weight2;
};

}  // namespace

template <>
const Kernels<LionConstants>& ANYACCEL_KERNELS<LionConstants>() {
  static constexpr Kernels<LionConstants> kTable = table<LionUpdate>();
  return kTable;
}

}  // namespace anyaccel::optim
