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

  void exact(Vec& p, Vec g, Vec& m, Vec& v) const {
    moments(p, g, m, v);
    apply(p, div(m, denominator(sqrt(v))));
  }

#if ANYACCEL_SIMD == 512
  Doubt fast(Vec& p, Vec g, Vec& m, Vec& v) const {
    Doubt doubt = 0;
    moments(p, g, m, v);
    apply(p, fast_div(m, denominator(fast_sqrt(v, doubt))));
    return doubt;
  }
#endif

 private:
  void moments(Vec p, Vec g, Vec& m, Vec& v) const {
    if (with_l2) g = add(g, mul(l2, p));
    m = add(m, mul(weight1, sub(g, m)));
    v = add(mul(beta2, v), mul(mul(weight2, g), g));
  }
  Vec denominator(Vec root) const { return add(mul(root, root_scale), eps); }
  void apply(Vec& p, Vec quotient) const { p = sub(mul(p, keep), mul(step_size, quotient)); }

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
