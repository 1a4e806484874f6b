// SPDX-License-Identifier: Apache-2.0
// Several vectors as one; included by variant files behind simd.h. Each operation goes over all of them before the next
// one starts: the formula of one vector is a single chain of operations that wait for each other, and a processor
// cannot look far enough ahead to fill the gaps with the next vector. No loops, so that all stays in registers.

namespace anyaccel::optim {
namespace {

#if ANYACCEL_SIMD == 512
constexpr int kPairs = 2;
#else
constexpr int kPairs = 1;
#endif
constexpr int kVectors = 2 * kPairs;
constexpr int kGroup = kPairs * kPair;  // elements
static_assert(kBlock % kGroup == 0);

struct Wide {
  Vec x[kVectors];
};

template <class Fn>
[[gnu::always_inline]] inline Wide each(Fn&& fn) {
#if ANYACCEL_SIMD == 512
  return {{fn(0), fn(1), fn(2), fn(3)}};
#else
  return {{fn(0), fn(1)}};
#endif
}

inline Vec at(const Wide& a, int i) { return a.x[i]; }
inline Vec at(Vec a, int) { return a; }

// Of two Wides, or of one and a constant.
template <class A, class B>
inline Wide add(const A& a, const B& b) {
  return each([&](int i) { return add(at(a, i), at(b, i)); });
}
template <class A, class B>
inline Wide sub(const A& a, const B& b) {
  return each([&](int i) { return sub(at(a, i), at(b, i)); });
}
template <class A, class B>
inline Wide mul(const A& a, const B& b) {
  return each([&](int i) { return mul(at(a, i), at(b, i)); });
}
inline Wide div(const Wide& a, const Wide& b) {
  return each([&](int i) { return div(a.x[i], b.x[i]); });
}
inline Wide sqrt(const Wide& a) {
  return each([&](int i) { return sqrt(a.x[i]); });
}
inline Wide sign(const Wide& a) {
  return each([&](int i) { return sign(a.x[i]); });
}

template <DType kType, Order kOrder>
inline Wide load_wide(const Cell<kType>* from) {
  const Pair first = load<kType, kOrder>(from);
#if ANYACCEL_SIMD == 512
  const Pair second = load<kType, kOrder>(from + kPair);
  return {{first.a, first.b, second.a, second.b}};
#else
  return {{first.a, first.b}};
#endif
}

template <DType kType, Order kOrder>
inline void store_wide(Cell<kType>* to, const Wide& v) {
  store<kType, kOrder>(to, Pair{v.x[0], v.x[1]});
#if ANYACCEL_SIMD == 512
  store<kType, kOrder>(to + kPair, Pair{v.x[2], v.x[3]});
#endif
}

template <DType kType, Order kOrder>
inline void stream_wide(Cell<kType>* to, const Wide& v) {
  stream<kType, kOrder>(to, Pair{v.x[0], v.x[1]});
#if ANYACCEL_SIMD == 512
  stream<kType, kOrder>(to + kPair, Pair{v.x[2], v.x[3]});
#endif
}

}  // namespace
}  // namespace anyaccel::optim
