// SPDX-License-Identifier: Apache-2.0
// Lion for one vector; included by variant files behind loop.h.

namespace anyaccel::optim {
namespace {

struct LionUpdate {
  using Constants = LionConstants;
  static constexpr int kStates = 1;

  explicit LionUpdate(const LionConstants& c)
      : keep(set1(c.keep)), lr(set1(c.lr)), weight1(set1(c.weight1)), weight2(set1(c.weight2)) {}

  void exact(Vec& p, Vec g, Vec& m, Vec&) const {
    const Vec difference = sub(g, m);
    const Vec direction = add(m, mul(weight1, difference));
    p = sub(mul(p, keep), mul(lr, sign(direction)));
    m = add(m, mul(weight2, difference));
  }

#if ANYACCEL_SIMD == 512
  // There is nothing slow in it.
  Doubt fast(Vec& p, Vec g, Vec& m, Vec& unused) const {
    exact(p, g, m, unused);
    return 0;
  }
#endif

 private:
  Vec keep, lr, weight1, weight2;
};

}  // namespace

template <>
const Kernels<LionConstants>& ANYACCEL_KERNELS<LionConstants>() {
  static constexpr Kernels<LionConstants> kTable = table<LionUpdate>();
  return kTable;
}

}  // namespace anyaccel::optim
