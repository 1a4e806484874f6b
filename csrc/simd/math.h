// SPDX-License-Identifier: Apache-2.0
// Functions of vectors, the same for all instruction sets with more than one lane: their headers include this, once for
// each. exp and what is made of it have relative errors below 1e-6 (a test holds it).

namespace anyaccel::simd::ANYACCEL_ISA_VARIANT {
namespace {

// 0 instead of subnormal results, which are slow to make and to use; infinite above 88.7.
// 2^n * e^r with n whole and |r| <= ln(2)/2, which is split in two so that r is exact; Cephes' expf polynomial.
inline Vec exp(Vec x) {
  // NaN goes through: it is the second argument.
  const Mask zero = less(x, broadcast(-87.3365447f));
  x = min(broadcast(89.0f), max(broadcast(-87.3365447f), x));
  const Vec n = nearest(mul(x, broadcast(1.44269504088896341f)));
  Vec r = fnma(n, broadcast(0.693359375f), x);
  r = fnma(n, broadcast(-2.12194440e-4f), r);
  Vec p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, mul(r, r), r);
  return select(zero, broadcast(0.0f), times_power(add(p, broadcast(1.0f)), n));
}

// 2^x for x below infinity; 0 instead of subnormal results. 2^n * 2^r with n whole and |r| <= 1/2, a minimax polynomial
// of 2^r that is 1 at 0.
inline Vec exp2(Vec x) {
  const Mask some = not_less(x, broadcast(-126.0f));  // a NaN stays one
  x = limited_power(x);
  const Vec n = nearest(x);
  const Vec r = sub(x, n);
  Vec p = broadcast(1.3264727313e-3f);
  p = fma(p, r, broadcast(9.6715129912e-3f));
  p = fma(p, r, broadcast(5.5507335812e-2f));
  p = fma(p, r, broadcast(2.4022242427e-1f));
  p = fma(p, r, broadcast(6.9314700365e-1f));
  p = fma(p, r, broadcast(1.0f));
  return times_power(some, p, n);
}

// Cephes' tanhf: a polynomial near 0, where 1 - 2 / (e^2x + 1) loses digits.
inline Vec tanh(Vec x) {
  const Vec magnitude = abs(x);
  const Vec square = mul(x, x);
  Vec p = broadcast(-5.70498872745e-3f);
  p = fma(p, square, broadcast(2.06390887954e-2f));
  p = fma(p, square, broadcast(-5.37397155531e-2f));
  p = fma(p, square, broadcast(1.33314422036e-1f));
  p = fma(p, square, broadcast(-3.33332819422e-1f));
  p = fma(mul(p, square), x, x);
  const Vec one = broadcast(1.0f);
  const Vec large = sub(one, div(broadcast(2.0f), add(exp(add(magnitude, magnitude)), one)));
  return select(less(magnitude, broadcast(0.625f)), p, copysign(large, x));
}

// Phi(x) = erfc(-x / sqrt 2) / 2 with the Chebyshev fit of "Numerical Recipes" (erfcc), good to 1.2e-7 of the value in
// both tails, where 1 + erf would lose all digits.
inline Vec normal_cdf(Vec x) {
  const Vec z = mul(abs(x), broadcast(0.70710678118654752f));
  const Vec t = div(broadcast(1.0f), fma(z, broadcast(0.5f), broadcast(1.0f)));
  Vec p = broadcast(0.17087277f);
  p = fma(p, t, broadcast(-0.82215223f));
  p = fma(p, t, broadcast(1.48851587f));
  p = fma(p, t, broadcast(-1.13520398f));
  p = fma(p, t, broadcast(0.27886807f));
  p = fma(p, t, broadcast(-0.18628806f));
  p = fma(p, t, broadcast(0.09678418f));
  p = fma(p, t, broadcast(0.37409196f));
  p = fma(p, t, broadcast(1.00002368f));
  p = fma(p, t, broadcast(-1.26551223f));
  const Vec tail = mul(mul(t, broadcast(0.5f)), exp(fnma(z, z, p)));
  return select(less(broadcast(0.0f), x), sub(broadcast(1.0f), tail), tail);
}

inline Vec sigmoid(Vec x) {
  const Vec one = broadcast(1.0f);
  return div(one, add(one, exp(sub(broadcast(0.0f), x))));
}

}  // namespace
}  // namespace anyaccel::simd::ANYACCEL_ISA_VARIANT
