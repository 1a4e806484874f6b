// SPDX-License-Identifier: Apache-2.0
// The loop over a piece, the same for all optimizers; included by variant files behind simd.h.
// An `Update` is made of the constants of a step. Its exact(p, g, s, t) updates one vector of parameters p, given the
// gradients g, and of one or two moments s and t. With AVX-512 there is also fast(), which returns what it could not
// do.

namespace anyaccel::optim {
namespace {

// Hardware prefetchers stop at the end of a page; this many bytes ahead is early enough for the next one.
constexpr int64_t kAhead = 1024;

template <DType kType>
inline void prefetch(const void* at, int64_t i) {
#if ANYACCEL_SIMD
  const char* const from = static_cast<const char*>(at) + i * static_cast<int64_t>(sizeof(Cell<kType>)) + kAhead;
  for (int64_t line = 0; line < kPair * static_cast<int64_t>(sizeof(Cell<kType>)); line += 64)
    __builtin_prefetch(from + line, 1);
#else
  (void)at, (void)i;
#endif
}

template <DType kType>
inline void* offset(void* at, int64_t i) {
  return static_cast<Cell<kType>*>(at) + i;
}

template <DType kType>
inline const void* offset(const void* at, int64_t i) {
  return static_cast<const Cell<kType>*>(at) + i;
}

template <class Update, DType kParam, DType kGrad, DType kState>
struct Loop {
  // With two-byte types only, pairs need no shuffles.
  static constexpr Order kOrder =
      kParam == DType::bf16 && kGrad == DType::bf16 && kState == DType::bf16 ? Order::split : Order::natural;

  struct Values {
    Pair p, g, s, t;
  };

  static inline Values read(const Piece& at, int64_t i) {
    Values v;
    v.p = load<kParam, kOrder>(offset<kParam>(at.param, i));
    v.g = load<kGrad, kOrder>(offset<kGrad>(at.grad, i));
    v.s = load<kState, kOrder>(offset<kState>(at.state1, i));
    if constexpr (Update::kStates == 2) v.t = load<kState, kOrder>(offset<kState>(at.state2, i));
    return v;
  }

  template <bool kNan>
  static inline void write(const Piece& at, int64_t i, const Values& v) {
    store<kState, kOrder, kNan>(offset<kState>(at.state1, i), v.s);
    if constexpr (Update::kStates == 2) store<kState, kOrder, kNan>(offset<kState>(at.state2, i), v.t);
    store<kParam, kOrder, kNan>(offset<kParam>(at.param, i), v.p);
    if (at.copy != nullptr) {
      if (kParam == DType::bf16 || at.copy_dtype == DType::bf16)
        store<DType::bf16, kOrder, kNan>(offset<DType::bf16>(at.copy, i), v.p);
      else if constexpr (kOrder == Order::natural)
        store<DType::f16, kOrder, kNan>(offset<DType::f16>(at.copy, i), v.p);
    }
  }

  static void exact(const Update& update, const Piece& at, int64_t i) {
    Values v = read(at, i);
    update.exact(v.p.a, v.g.a, v.s.a, v.t.a);
    update.exact(v.p.b, v.g.b, v.s.b, v.t.b);
    write<true>(at, i, v);
  }

#if ANYACCEL_SIMD == 512
  [[gnu::noinline, gnu::cold]] static void again(const Update& update, const Piece& at, int64_t i) {
    exact(update, at, i);
  }

  // A NaN in any of the results is also one in the new parameter, which is then in doubt.
  static inline void pair(const Update& update, const Piece& at, int64_t i) {
    Values v = read(at, i);
    const Doubt doubt =
        update.fast(v.p.a, v.g.a, v.s.a, v.t.a) | update.fast(v.p.b, v.g.b, v.s.b, v.t.b) | nan(v.p.a) | nan(v.p.b);
    if (__builtin_expect(doubt != 0, 0))
      again(update, at, i);
    else
      write<false>(at, i, v);
  }
#else
  static inline void pair(const Update& update, const Piece& at, int64_t i) { exact(update, at, i); }
#endif

  static void run(const typename Update::Constants& constants, const Piece& piece) {
    const Update update(constants);
    int64_t i = 0;
    for (; i + kPair <= piece.count; i += kPair) {
      prefetch<kParam>(piece.param, i);
      prefetch<kGrad>(piece.grad, i);
      prefetch<kState>(piece.state1, i);
      if constexpr (Update::kStates == 2) prefetch<kState>(piece.state2, i);
      pair(update, piece, i);
    }
    if (i < piece.count) rest(update, piece, i);
  }

  // Fewer elements than a pair has: by way of a buffer, so that every element is calculated by the same code.
  static void rest(const Update& update, const Piece& piece, int64_t i) {
    constexpr size_t kParamSize = sizeof(Cell<kParam>), kGradSize = sizeof(Cell<kGrad>),
                     kStateSize = sizeof(Cell<kState>);
    alignas(64) float param[kPair] = {}, grad[kPair] = {}, state1[kPair] = {}, state2[kPair] = {}, copy[kPair];
    const size_t n = static_cast<size_t>(piece.count - i);
    std::memcpy(param, offset<kParam>(piece.param, i), n * kParamSize);
    std::memcpy(grad, offset<kGrad>(piece.grad, i), n * kGradSize);
    std::memcpy(state1, offset<kState>(piece.state1, i), n * kStateSize);
    if constexpr (Update::kStates == 2) std::memcpy(state2, offset<kState>(piece.state2, i), n * kStateSize);
    Piece buffer = piece;
    buffer.param = param, buffer.grad = grad, buffer.state1 = state1, buffer.state2 = state2;
    if (piece.copy != nullptr) buffer.copy = copy;
    pair(update, buffer, 0);
    std::memcpy(offset<kParam>(piece.param, i), param, n * kParamSize);
    std::memcpy(offset<kState>(piece.state1, i), state1, n * kStateSize);
    if constexpr (Update::kStates == 2) std::memcpy(offset<kState>(piece.state2, i), state2, n * kStateSize);
    if (piece.copy != nullptr) std::memcpy(static_cast<uint16_t*>(piece.copy) + i, copy, n * sizeof(uint16_t));
  }
};

template <class Update, DType kParam, DType kGrad>
constexpr void fill(Kernels<typename Update::Constants>& table) {
  auto& entry = table.of[static_cast<int>(kParam)][static_cast<int>(kGrad)];
  entry[0] = Loop<Update, kParam, kGrad, DType::f32>::run;
  entry[1] = Loop<Update, kParam, kGrad, DType::bf16>::run;
}

template <class Update>
constexpr Kernels<typename Update::Constants> table() {
  Kernels<typename Update::Constants> result{};
  fill<Update, DType::f32, DType::f32>(result);
  fill<Update, DType::f32, DType::bf16>(result);
  fill<Update, DType::f32, DType::f16>(result);
  fill<Update, DType::bf16, DType::bf16>(result);
  fill<Update, DType::bf16, DType::f32>(result);
  fill<Update, DType::f16, DType::f16>(result);
  fill<Update, DType::f16, DType::f32>(result);
  return result;
}

}  // namespace
}  // namespace anyaccel::optim
