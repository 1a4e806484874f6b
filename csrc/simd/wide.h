// SPDX-License-Identifier: Apache-2.0
// Several vectors as one. Each operation goes over all of them before the next one starts: a formula of one vector is a
// single chain of operations that wait for each other, and a processor cannot look far enough ahead to fill the gaps
// with the next vector. No loops over few, so that all stays in registers. Included behind simd.h, once for each
// instruction set.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wignored-attributes"  // alignment, of a vector as a template's argument
#endif

namespace anyaccel::simd::ANYACCEL_ISA_VARIANT {
namespace {

template <class V, int N>
struct Many {
  V x[N];
};

// fn(0), fn(1), ... as one.
template <int N, class Fn>
[[gnu::always_inline]] inline auto each(const Fn& fn) {
  using Result = Many<decltype(fn(0)), N>;
  if constexpr (N == 1) {
    return Result{{fn(0)}};
  } else if constexpr (N == 2) {
    return Result{{fn(0), fn(1)}};
  } else if constexpr (N == 4) {
    return Result{{fn(0), fn(1), fn(2), fn(3)}};
  } else {
    Result result;
    for (int i = 0; i < N; ++i) result.x[i] = fn(i);
    return result;
  }
}

// One vector stands for as many of it as there are in the other operand.
template <class V, int N>
inline V at(const Many<V, N>& a, int i) {
  return a.x[i];
}
inline Vec at(Vec a, int) { return a; }
inline IVec at(IVec a, int) { return a; }

template <class V>
constexpr int kCount = 0;
template <class V, int N>
constexpr int kCount<Many<V, N>> = N;
template <class A, class B = Vec, class C = Vec>
constexpr int kMost = kCount<A> > 0   ? kCount<A>
                      : kCount<B> > 0 ? kCount<B>
                                      : kCount<C>;

#define ANYACCEL_OF_ONE(op)                              \
  template <class A, int N = kMost<A>>                   \
    requires(N > 0)                                      \
  inline auto op(const A& a) {                           \
    return each<N>([&](int i) { return op(at(a, i)); }); \
  }
#define ANYACCEL_OF_TWO(op)                                        \
  template <class A, class B, int N = kMost<A, B>>                 \
    requires(N > 0)                                                \
  inline auto op(const A& a, const B& b) {                         \
    return each<N>([&](int i) { return op(at(a, i), at(b, i)); }); \
  }
ANYACCEL_OF_TWO(add)
ANYACCEL_OF_TWO(sub)
ANYACCEL_OF_TWO(mul)
ANYACCEL_OF_TWO(div)
ANYACCEL_OF_ONE(sqrt)
ANYACCEL_OF_ONE(sign)
ANYACCEL_OF_ONE(convert)
#undef ANYACCEL_OF_ONE
#undef ANYACCEL_OF_TWO
template <class A, class B, class C, int N = kMost<A, B, C>>
  requires(N > 0)
inline auto fma(const A& a, const B& b, const C& c) {
  return each<N>([&](int i) { return fma(at(a, i), at(b, i), at(c, i)); });
}

}  // namespace
}  // namespace anyaccel::simd::ANYACCEL_ISA_VARIANT
