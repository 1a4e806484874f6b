// SPDX-License-Identifier: Apache-2.0
// Adam for one vector; included by variant files behind loop.h.

namespace anyaccel::optim {
namespace {

struct AdamUpdate {
  using Constants = AdamConstants;
  static constexpr int kStates = 2;

  explicit AdamUpdate(const AdamConstants& c)
      : keep(set1(c.keep)),
        l2(set1(c.l2)),
        weight1(set1(c.weight1)),
        beta2(set1(c.beta2)),
        weight2(set1(c.weight2)),
        root_scale(set1(c.root_scale)),
        eps(set1(c.eps)),
        step_size(set1(c.step_size)),
        with_l2(c.l2 != 0.0f) {}

  void step(Wide& p, Wide g, Wide& m, Wide& v) const {
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

template <>
const Kernels<AdamConstants>& ANYACCEL_KERNELS<AdamConstants>() {
  static constexpr Kernels<AdamConstants> kTable = table<AdamUpdate>();
  return kTable;
}

}  // namespace anyaccel::optim
