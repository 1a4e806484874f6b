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

  void exact(Vec& p, Vec g, Vec& sum, Vec&) const {
    accumulate(p, g, sum);
    p = sub(p, mul(step_size, div(g, add(sqrt(sum), eps))));
  }

#if ANYACCEL_SIMD == 512
  Doubt fast(Vec& p, Vec g, Vec& sum, Vec&) const {
    Doubt doubt = 0;
    accumulate(p, g, sum);
    p = sub(p, mul(step_size, fast_div(g, add(fast_sqrt(sum, doubt), eps))));
    return doubt;
  }
#endif

 private:
  void accumulate(Vec p, Vec& g, Vec& sum) const {
    if (decays) g = add(g, mul(weight_decay, p));
    sum = add(sum, mul(g, g));
  }

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
