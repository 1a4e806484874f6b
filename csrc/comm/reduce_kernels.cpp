// SPDX-License-Identifier: Apache-2.0
// The reductions. Their scalar form is the definition, which the vector form matches bit by bit.
#include "comm/reduce_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd/pick.h"
#include "simd/simd.h"

namespace anyaccel::comm {
namespace {

using namespace simd;
using namespace simd::ANYACCEL_ISA_VARIANT;

struct F32 {
  using Storage = float;
  static float load1(const float* p) { return *p; }
  static void store1(float* p, float value) { *p = value; }
  static Vec load(const float* p) { return simd::ANYACCEL_ISA_VARIANT::load(p); }
  static void store(float* p, Vec value) { simd::ANYACCEL_ISA_VARIANT::store(p, value); }
};

struct BF16 {
  using Storage = uint16_t;
  static float load1(const uint16_t* p) { return from_bf16(*p); }
  static void store1(uint16_t* p, float value) { *p = to_bf16(value); }
  static Vec load(const uint16_t* p) { return load_bf16(p); }
  static void store(uint16_t* p, Vec value) { store_bf16(p, value); }
};

struct F16 {
  using Storage = uint16_t;
  static float load1(const uint16_t* p) { return from_f16(*p); }
  static void store1(uint16_t* p, float value) { *p = to_f16(value); }
  static Vec load(const uint16_t* p) { return load_f16(p); }
  static void store(uint16_t* p, Vec value) { store_f16(p, value); }
};

// --- the operations

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a + b);
  }
  static Vec vector(Vec a, Vec b) { return add(a, b); }
};

struct Avg : Sum {};  // the division comes at the end

struct Product {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a * b);
  }
  static Vec vector(Vec a, Vec b) { return mul(a, b); }
};

struct Min {
  template <class T>
  static T apply(T a, T b) {
    return a < b || a != a ? a : b;
  }
  static Vec vector(Vec a, Vec b) { return select(is_nan(a), a, min(a, b)); }
};

struct Max {
  template <class T>
  static T apply(T a, T b) {
    return a > b || a != a ? a : b;
  }
  static Vec vector(Vec a, Vec b) { return select(is_nan(a), a, max(a, b)); }
};

struct Band {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct Bor {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct Bxor {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

// --- float32, bfloat16 and float16, which accumulate in fp32

template <class Type, class Op, int kSources>
void reduce_n(const typename Type::Storage* const* sources, int n_runtime, typename Type::Storage* dst,
              typename Type::Storage* dst2, size_t count) {
  const int n = kSources != 0 ? kSources : n_runtime;
  size_t i = 0;
  const Vec divisor = broadcast(static_cast<float>(n));
  for (; i + kLanes <= count; i += kLanes) {
    Vec value = Type::load(sources[0] + i);
    for (int s = 1; s < n; ++s) value = Op::vector(value, Type::load(sources[s] + i));
    if constexpr (std::is_same_v<Op, Avg>) value = div(value, divisor);
    Type::store(dst + i, value);
    if (dst2 != nullptr) Type::store(dst2 + i, value);
  }
  for (; i < count; ++i) {
    float value = Type::load1(sources[0] + i);
    for (int s = 1; s < n; ++s) value = Op::apply(value, Type::load1(sources[s] + i));
    if constexpr (std::is_same_v<Op, Avg>) value /= static_cast<float>(n);
    Type::store1(dst + i, value);
    if (dst2 != nullptr) Type::store1(dst2 + i, value);
  }
}

template <class Type, class Op>
void reduce(const void* const* sources, int n_sources, void* dst, void* dst2, size_t count) {
  using Storage = typename Type::Storage;
  const auto* const* typed = reinterpret_cast<const Storage* const*>(sources);
  auto* out = static_cast<Storage*>(dst);
  auto* out2 = static_cast<Storage*>(dst2);
  if (n_sources == 2)
    reduce_n<Type, Op, 2>(typed, 2, out, out2, count);
  else
    reduce_n<Type, Op, 0>(typed, n_sources, out, out2, count);
}

// --- float64 and integers, which accumulate in blocks so that the compiler vectorises the loop

// Overflow wraps around, which C++ allows for unsigned types only. Small ones are promoted to int, so they are cast
// back.
template <class T, class Op>
struct Accumulator {
  using type = T;
};
template <class T>
  requires std::is_integral_v<T>
struct Accumulator<T, Sum> {
  using type = std::make_unsigned_t<T>;
};
// The sum of an average must not overflow.
__extension__ typedef __int128 Int128;
template <class T>
  requires std::is_integral_v<T>
struct Accumulator<T, Avg> {
  using type = std::conditional_t<sizeof(T) == 8, Int128, int64_t>;
};
template <class T>
  requires std::is_integral_v<T>
struct Accumulator<T, Product> {
  // uint16 times uint16 would overflow int.
  using type = std::conditional_t<sizeof(T) == 2, uint32_t, std::make_unsigned_t<T>>;
};

constexpr size_t kBlockBytes = 2048;

// Several of the functions below share this one, so it is not inlined.
template <class T, class Op>
[[gnu::noinline]] void accumulate(const T* const* sources, int n_sources, size_t at, size_t n,
                                  typename Accumulator<T, Op>::type* __restrict block) {
  using A = typename Accumulator<T, Op>::type;
  for (size_t i = 0; i < n; ++i) block[i] = static_cast<A>(sources[0][at + i]);
  for (int s = 1; s < n_sources; ++s) {
    const T* next = sources[s] + at;
    for (size_t i = 0; i < n; ++i) block[i] = Op::apply(block[i], static_cast<A>(next[i]));
  }
}

template <class T, class Op>
void reduce_plain(const void* const* sources, int n_sources, void* dst, void* dst2, size_t count) {
  using A = typename Accumulator<T, Op>::type;
  constexpr size_t kBlock = kBlockBytes / sizeof(A);
  alignas(64) A block[kBlock];
  const auto* const* typed = reinterpret_cast<const T* const*>(sources);
  auto* out = static_cast<T*>(dst);
  auto* out2 = static_cast<T*>(dst2);
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t n = std::min(kBlock, count - at);
    accumulate<T, Op>(typed, n_sources, at, n, block);
    for (size_t i = 0; i < n; ++i) {
      A value = block[i];
      if constexpr (std::is_same_v<Op, Avg>) value /= static_cast<A>(n_sources);
      out[at + i] = static_cast<T>(value);
    }
    if (out2 != nullptr) std::memcpy(out2 + at, out + at, n * sizeof(T));
  }
}

// A bitwise operation is the same for every integer type.
template <class T, class Op>
void reduce_bits(const void* const* sources, int n_sources, void* dst, void* dst2, size_t count) {
  reduce_plain<uint8_t, Op>(sources, n_sources, dst, dst2, count * sizeof(T));
}

// --- residual + sum, then RMS norm (Zhang and Sennrich, "Root mean square layer normalization", 2019)

// The squares are summed in 16 lanes and the lanes pairwise, so that the result does not depend on the vector width.
constexpr size_t kNormLanes = 16;

template <class Type>
void add_rms_norm(const void* const* sources, int n_sources, void* residual, const void* weight, float eps, void* out,
                  size_t rows, size_t width) {
  using Storage = typename Type::Storage;
  const auto* const* typed = reinterpret_cast<const Storage* const*>(sources);
  const auto* gain = static_cast<const Storage*>(weight);
  for (size_t row = 0; row < rows; ++row) {
    auto* r = static_cast<Storage*>(residual) + row * width;
    auto* o = static_cast<Storage*>(out) + row * width;
    alignas(64) float lanes[kNormLanes] = {};
    for (size_t i = 0; i < width; i += kNormLanes) {
      const size_t n = std::min(kNormLanes, width - i);
      alignas(64) float sum[kNormLanes] = {};
      for (size_t k = 0; k < n; ++k) sum[k] = Type::load1(typed[0] + row * width + i + k);
      for (int s = 1; s < n_sources; ++s)
        for (size_t k = 0; k < n; ++k) sum[k] += Type::load1(typed[s] + row * width + i + k);
      for (size_t k = 0; k < n; ++k) {
        Storage rounded;  // as the result of an all-reduce in this dtype is
        Type::store1(&rounded, sum[k]);
        Type::store1(r + i + k, Type::load1(r + i + k) + Type::load1(&rounded));
      }
      for (size_t k = 0; k < n; ++k) {
        const float value = Type::load1(r + i + k);
        lanes[k] += value * value;
      }
    }
    for (size_t half = kNormLanes / 2; half > 0; half /= 2)
      for (size_t k = 0; k < half; ++k) lanes[k] += lanes[k + half];
    const float scale = 1.0f / std::sqrt(lanes[0] / static_cast<float>(width) + eps);
    for (size_t i = 0; i < width; ++i) Type::store1(o + i, Type::load1(r + i) * scale * Type::load1(gain + i));
  }
}

template <class Type>
constexpr void fill_narrow(ReduceFn* by) {
  const ReduceFn all[kReduceOps] = {reduce<Type, Sum>,
                                    reduce<Type, Avg>,
                                    reduce<Type, Product>,
                                    reduce<Type, Min>,
                                    reduce<Type, Max>,
                                    nullptr,
                                    nullptr,
                                    nullptr};
  for (int op = 0; op < kReduceOps; ++op) by[op] = all[op];
}

template <class T>
constexpr void fill_plain(ReduceFn* by) {
  // Overflow wraps around, so a signed sum or product has the bits of the unsigned one.
  using U = typename Accumulator<T, Sum>::type;
  by[0] = reduce_plain<U, Sum>;
  by[1] = reduce_plain<T, Avg>;
  by[2] = reduce_plain<U, Product>;
  by[3] = reduce_plain<T, Min>;
  by[4] = reduce_plain<T, Max>;
  if constexpr (std::is_integral_v<T>) {
    by[5] = reduce_bits<T, Band>;
    by[6] = reduce_bits<T, Bor>;
    by[7] = reduce_bits<T, Bxor>;
  }
}

constexpr ReduceKernels kKernels = [] {
  ReduceKernels kernels{};
  fill_narrow<F32>(kernels.by[static_cast<int>(DType::f32)]);
  fill_narrow<BF16>(kernels.by[static_cast<int>(DType::bf16)]);
  fill_narrow<F16>(kernels.by[static_cast<int>(DType::f16)]);
  fill_plain<double>(kernels.by[static_cast<int>(DType::f64)]);
  fill_plain<int8_t>(kernels.by[static_cast<int>(DType::i8)]);
  fill_plain<int16_t>(kernels.by[static_cast<int>(DType::i16)]);
  fill_plain<int32_t>(kernels.by[static_cast<int>(DType::i32)]);
  fill_plain<int64_t>(kernels.by[static_cast<int>(DType::i64)]);
  fill_plain<uint8_t>(kernels.by[static_cast<int>(DType::u8)]);
  kernels.add_rms_norm[0] = add_rms_norm<F32>;
  kernels.add_rms_norm[1] = add_rms_norm<BF16>;
  kernels.add_rms_norm[2] = add_rms_norm<F16>;
  return kernels;
}();

}  // namespace

}  // namespace anyaccel::comm

ANYACCEL_KERNELS(anyaccel::comm::ReduceKernels, anyaccel::comm::kKernels)
