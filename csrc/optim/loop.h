// SPDX-License-Identifier: Apache-2.0
// The loop over a piece, which all optimizers share; <name>_update.h includes it, once for each instruction set.
// An `Update` is constructed from the constants of a step. Its step(p, g, s, t) updates a group of parameters p and
// their one or two moments s and t, given the gradients g.
// No operation is a fused multiply-add, so all instruction sets give the same bits.
#include "optim/types.h"
#include "simd/pick.h"
#include "simd/simd.h"
#include "simd/wide.h"

namespace anyaccel::optim::ANYACCEL_ISA_VARIANT {
namespace {

using namespace simd::ANYACCEL_ISA_VARIANT;

template <DType kType>
using Cell = std::conditional_t<kType == DType::f32, float, uint16_t>;

constexpr int kPairs = kLanes == 16 ? 2 : 1;
constexpr int kPair = 2 * kLanes;
constexpr int kGroup = kPairs * kPair;  // elements
static_assert(kBlock % kGroup == 0);
using Wide = Many<Vec, 2 * kPairs>;

// The order of elements in a pair of vectors. Split puts those of even index into the first vector and those of odd
// index into the second, which for bfloat16 takes no shuffles. The update is elementwise, so the order does not matter
// as long as all arrays have the same.
enum class Order { natural, split };

template <DType kType, Order kOrder>
[[gnu::always_inline]] inline Wide load_wide(const Cell<kType>* from) {
  return each<2 * kPairs>([&](int i) {
    if constexpr (kType == DType::bf16 && kOrder == Order::split)
      return i % 2 == 0 ? even_bf16(from + i * kLanes) : odd_bf16(from + (i - 1) * kLanes);
    else if constexpr (kType == DType::bf16)
      return load_bf16(from + i * kLanes);
    else if constexpr (kType == DType::f16)
      return load_f16(from + i * kLanes);
    else
      return load(from + i * kLanes);
  });
}

template <DType kType, Order kOrder>
[[gnu::always_inline]] inline IVec packed(Vec a, Vec b) {
  if constexpr (kType == DType::f16)
    return pack_f16(a, b);
  else
    return kOrder == Order::split ? interleave_bf16(a, b) : pack_bf16(a, b);
}

template <DType kType, Order kOrder>
[[gnu::always_inline]] inline void store_wide(Cell<kType>* to, const Wide& v) {
  for (int i = 0; i < 2 * kPairs; i += 2) {
    if constexpr (kType == DType::f32) {
      store(to + i * kLanes, v.x[i]);
      store(to + (i + 1) * kLanes, v.x[i + 1]);
    } else {
      store(static_cast<void*>(to + i * kLanes), packed<kType, kOrder>(v.x[i], v.x[i + 1]));
    }
  }
}

// Stores past the caches; `to` must be a multiple of 64.
template <DType kType, Order kOrder>
[[gnu::always_inline]] inline void stream_wide(uint16_t* to, const Wide& v) {
  for (int i = 0; i < 2 * kPairs; i += 2) stream(to + i * kLanes, packed<kType, kOrder>(v.x[i], v.x[i + 1]));
}

// Hardware prefetchers stop at the end of a page, so we prefetch this many bytes ahead.
constexpr int64_t kAhead = 2048;

template <class Type>
inline void prefetch(const Type* at) {
  if (kLanes == 1) return;
  const char* const from = reinterpret_cast<const char*>(at) + kAhead;
  for (size_t line = 0; line < kGroup * sizeof(Type); line += 64) __builtin_prefetch(from + line, 1);
}

template <class Update, DType kParam, DType kGrad, DType kState>
struct Loop {
  // The split order needs every array to be bfloat16.
  static constexpr Order kOrder =
      kParam == DType::bf16 && kGrad == DType::bf16 && kState == DType::bf16 ? Order::split : Order::natural;
  static constexpr bool kTwo = Update::kStates == 2;

  // The arrays of a piece, with their types.
  struct Place {
    Cell<kParam>* p;
    const Cell<kGrad>* g;
    Cell<kState>*s, *t;
    uint16_t* copy;
    DType copy_dtype;
    bool stream;

    explicit Place(const Piece& piece)
        : p(static_cast<Cell<kParam>*>(piece.param)),
          g(static_cast<const Cell<kGrad>*>(piece.grad)),
          s(static_cast<Cell<kState>*>(piece.state1)),
          t(static_cast<Cell<kState>*>(piece.state2)),
          copy(static_cast<uint16_t*>(piece.copy)),
          copy_dtype(piece.copy_dtype),
          stream(piece.stream && reinterpret_cast<uintptr_t>(copy) % 64 == 0) {}
  };

  struct Values {
    Wide p, g, s, t;
  };

  [[gnu::always_inline]] static inline Values read(const Place& at, int64_t i) {
    Values v;
    v.p = load_wide<kParam, kOrder>(at.p + i);
    v.g = load_wide<kGrad, kOrder>(at.g + i);
    v.s = load_wide<kState, kOrder>(at.s + i);
    v.t = kTwo ? load_wide<kState, kOrder>(at.t + i) : Wide{};
    return v;
  }

  [[gnu::always_inline]] static inline void write(const Place& at, int64_t i, const Values& v) {
    store_wide<kState, kOrder>(at.s + i, v.s);
    if constexpr (kTwo) store_wide<kState, kOrder>(at.t + i, v.t);
    store_wide<kParam, kOrder>(at.p + i, v.p);
    if (at.copy == nullptr) return;
    if (kParam == DType::bf16 || at.copy_dtype == DType::bf16)
      write_copy<DType::bf16>(at, i, v.p);
    else if constexpr (kOrder == Order::natural)
      write_copy<DType::f16>(at, i, v.p);
  }

  template <DType kCopy>
  [[gnu::always_inline]] static inline void write_copy(const Place& at, int64_t i, const Wide& p) {
    if (at.stream)
      stream_wide<kCopy, kOrder>(at.copy + i, p);
    else
      store_wide<kCopy, kOrder>(at.copy + i, p);
  }

  [[gnu::always_inline]] static inline void group(const Update& update, const Place& at, int64_t i) {
    Values v = read(at, i);
    update.step(v.p, v.g, v.s, v.t);
    write(at, i, v);
  }

  static void run(const typename Update::Constants& constants, const Piece& piece) {
    const Update update(constants);
    const Place at(piece);
    int64_t i = 0;
    for (; i + kGroup <= piece.count; i += kGroup) {
      prefetch(at.p + i);
      prefetch(at.g + i);
      prefetch(at.s + i);
      if constexpr (kTwo) prefetch(at.t + i);
      group(update, at, i);
    }
    if (at.stream) stream_fence();
    if (i < piece.count) update_tail(update, piece, i);
  }

  // Updates the last elements, fewer than a group, in a buffer, so that the same code computes every element.
  static void update_tail(const Update& update, const Piece& piece, int64_t i) {
    alignas(64) Cell<kParam> param[kGroup] = {};
    alignas(64) Cell<kGrad> grad[kGroup] = {};
    alignas(64) Cell<kState> state1[kGroup] = {}, state2[kGroup] = {};
    alignas(64) uint16_t copy[kGroup];
    const Place at(piece);
    const size_t n = static_cast<size_t>(piece.count - i);
    std::memcpy(param, at.p + i, n * sizeof *param);
    std::memcpy(grad, at.g + i, n * sizeof *grad);
    std::memcpy(state1, at.s + i, n * sizeof *state1);
    if constexpr (kTwo) std::memcpy(state2, at.t + i, n * sizeof *state2);
    Piece buffer = piece;
    buffer.stream = false;
    buffer.param = param, buffer.grad = grad, buffer.state1 = state1, buffer.state2 = state2;
    if (piece.copy != nullptr) buffer.copy = copy;
    group(update, Place(buffer), 0);
    std::memcpy(at.p + i, param, n * sizeof *param);
    std::memcpy(at.s + i, state1, n * sizeof *state1);
    if constexpr (kTwo) std::memcpy(at.t + i, state2, n * sizeof *state2);
    if (piece.copy != nullptr) std::memcpy(at.copy + i, copy, n * sizeof *copy);
  }
};

template <class Update, DType kParam, DType kGrad>
constexpr void fill(Kernels<typename Update::Constants>& table) {
  auto& entry = table.of[static_cast<int>(kParam)][static_cast<int>(kGrad)];
  entry[0] = Loop<Update, kParam, kGrad, DType::f32>::run;
  entry[1] = Loop<Update, kParam, kGrad, DType::bf16>::run;
}

template <class Update>
constexpr Kernels<typename Update::Constants> kTable = [] {
  Kernels<typename Update::Constants> result{};
  fill<Update, DType::f32, DType::f32>(result);
  fill<Update, DType::f32, DType::bf16>(result);
  fill<Update, DType::f32, DType::f16>(result);
  fill<Update, DType::bf16, DType::bf16>(result);
  fill<Update, DType::bf16, DType::f32>(result);
  fill<Update, DType::f16, DType::f16>(result);
  fill<Update, DType::f16, DType::f32>(result);
  return result;
}();

}  // namespace
}  // namespace anyaccel::optim::ANYACCEL_ISA_VARIANT
