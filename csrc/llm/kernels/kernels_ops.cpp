// SPDX-License-Identifier: Apache-2.0
#include "llm/kernels/kernels_ops.h"

#include "simd/pick.h"
#include "simd/simd.h"

namespace anyaccel::llm {
namespace {

using namespace simd::ANYACCEL_ISA_VARIANT;
// The functions of vectors; ops.h has functions of whole rows with the same names.
using simd::ANYACCEL_ISA_VARIANT::add;
using simd::ANYACCEL_ISA_VARIANT::sigmoid;

constexpr float kInfinity = __builtin_inff();

// fn(i, load, store) for each vector of n values; load(p) and store(p, v) know about the short one at the end. Lanes
// beyond it load as `other`.
template <class Fn>
void each(int64_t n, Vec other, Fn&& fn) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    fn(i, [](const float* p) { return load(p); }, [](float* p, Vec v) { store(p, v); });
  const int64_t rest = n - i;
  if (rest > 0)
    fn(i, [=](const float* p) { return load_n(p, rest, other); }, [=](float* p, Vec v) { store_n(p, rest, v); });
}

// Sum of fn(vector) over x, in four accumulators of lanes; lanes beyond the end count as fn(other), which must be 0.
template <class Fn>
float sum_of(const float* x, int64_t n, Vec other, Fn&& fn) {
  Vec a = broadcast(0.0f), b = broadcast(0.0f), c = broadcast(0.0f), d = broadcast(0.0f);
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    a = add(a, fn(load(x + i)));
    b = add(b, fn(load(x + i + kLanes)));
    c = add(c, fn(load(x + i + 2 * kLanes)));
    d = add(d, fn(load(x + i + 3 * kLanes)));
  }
  for (; i + kLanes <= n; i += kLanes) a = add(a, fn(load(x + i)));
  if (i < n) b = add(b, fn(load_n(x + i, n - i, other)));
  return sum(add(add(a, b), add(c, d)));
}

// The second half of a norm, when the sum of squares is known: out = (x - mean) * factor * weight + bias.
void finish_norm(const Norm& norm, const float* x, int64_t n, float mean, float factor, float* out) {
  const Vec center = broadcast(mean), times = broadcast(factor);
  const float* weight = norm.weight;
  const float* bias = norm.bias;
  each(n, broadcast(0.0f), [=](int64_t i, auto get, auto put) {
    Vec v = mul(sub(get(x + i), center), times);
    if (weight != nullptr) v = mul(v, get(weight + i));
    if (bias != nullptr) v = add(v, get(bias + i));
    put(out + i, v);
  });
}

float inverse_root(float squares, int64_t n, float eps) {
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
}

void layer_norm(const Norm& norm, const float* x, int64_t n, float total, float* out) {
  const float mean = total / static_cast<float>(n);
  const Vec center = broadcast(mean);
  const float squares = sum_of(x, n, center, [=](Vec v) {
    const Vec d = sub(v, center);
    return mul(d, d);
  });
  finish_norm(norm, x, n, mean, inverse_root(squares, n, norm.eps), out);
}

void norm_rows(const Norm& norm, const float* x, int64_t n, float* out) {
  if (norm.kind == NormKind::layer) {
    layer_norm(norm, x, n, sum_of(x, n, broadcast(0.0f), [](Vec v) { return v; }), out);
  } else {
    const float squares = sum_of(x, n, broadcast(0.0f), [](Vec v) { return mul(v, v); });
    finish_norm(norm, x, n, 0, inverse_root(squares, n, norm.eps), out);
  }
}

// x += scale * y; the sum of fn(x) over the result.
template <class Fn>
float add_and_sum(float* x, const float* y, float scale, int64_t n, Fn&& fn) {
  const Vec factor = broadcast(scale);
  const auto one = [=](int64_t i) {
    const Vec v = fma(load(y + i), factor, load(x + i));
    store(x + i, v);
    return fn(v);
  };
  Vec a = broadcast(0.0f), b = broadcast(0.0f), c = broadcast(0.0f), d = broadcast(0.0f);
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    a = add(a, one(i));
    b = add(b, one(i + kLanes));
    c = add(c, one(i + 2 * kLanes));
    d = add(d, one(i + 3 * kLanes));
  }
  for (; i + kLanes <= n; i += kLanes) a = add(a, one(i));
  if (i < n) {
    const Vec v = fma(load_n(y + i, n - i, broadcast(0.0f)), factor, load_n(x + i, n - i, broadcast(0.0f)));
    store_n(x + i, n - i, v);
    b = add(b, fn(v));
  }
  return sum(add(add(a, b), add(c, d)));
}

void add_norm_rows(float* x, const float* y, float scale, const Norm& norm, int64_t n, float* out) {
  if (norm.kind == NormKind::layer) {
    layer_norm(norm, x, n, add_and_sum(x, y, scale, n, [](Vec v) { return v; }), out);
  } else {
    const float squares = add_and_sum(x, y, scale, n, [](Vec v) { return mul(v, v); });
    finish_norm(norm, x, n, 0, inverse_root(squares, n, norm.eps), out);
  }
}

void rope_halves(float* x, const float* cosine, const float* sine, int half) {
  float* y = x + half;
  each(half, broadcast(0.0f), [=](int64_t i, auto get, auto put) {
    const Vec a = get(x + i), b = get(y + i), c = get(cosine + i), s = get(sine + i);
    put(x + i, fnma(b, s, mul(a, c)));
    put(y + i, fma(a, s, mul(b, c)));
  });
}

void rope_pairs(float* x, const float* cosine, const float* sine, int half) {
  int i = 0;
  for (; kLanes > 1 && i + kLanes / 2 <= half; i += kLanes / 2) {
    const Vec v = load(x + 2 * i), c = load_twice(cosine + i), s = load_twice(sine + i);
    store(x + 2 * i, fma_addsub(v, c, mul(swap_pairs(v), s)));
  }
  for (; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cosine[i] - b * sine[i];
    x[2 * i + 1] = a * sine[i] + b * cosine[i];
  }
}

void rope_rows(float* x, int count, int64_t stride, const float* cosine, const float* sine, int half,
               bool interleaved) {
  for (int head = 0; head < count; ++head) {
    if (interleaved)
      rope_pairs(x + head * stride, cosine, sine, half);
    else
      rope_halves(x + head * stride, cosine, sine, half);
  }
}

template <class Fn>
void activate_with(const float* gate, const float* up, int64_t n, float* out, Fn&& fn) {
  if (up == nullptr)
    each(n, broadcast(0.0f), [=](int64_t i, auto get, auto put) { put(out + i, fn(get(gate + i))); });
  else
    each(n, broadcast(0.0f), [=](int64_t i, auto get, auto put) { put(out + i, mul(fn(get(gate + i)), get(up + i))); });
}

void activate_row(Activation kind, const float* gate, const float* up, int64_t n, float* out) {
  const auto quick = [](Vec x) { return mul(x, sigmoid(mul(x, broadcast(1.702f)))); };
  switch (kind) {
    case Activation::silu:
      return activate_with(gate, up, n, out, [](Vec x) { return mul(x, sigmoid(x)); });
    case Activation::gelu:
      return activate_with(gate, up, n, out, [](Vec x) { return mul(x, normal_cdf(x)); });
    case Activation::gelu_tanh:  // (1 + tanh(u)) / 2 = sigmoid(2u)
      return activate_with(gate, up, n, out, [](Vec x) {
        const Vec inner = mul(x, fma(mul(x, x), broadcast(0.044715f), broadcast(1.0f)));
        return mul(x, sigmoid(mul(inner, broadcast(1.5957691216057308f))));
      });
    case Activation::gelu_quick:
      return activate_with(gate, up, n, out, quick);
    case Activation::relu:
      return activate_with(gate, up, n, out, [](Vec x) { return max(broadcast(0.0f), x); });
    case Activation::relu2:
      return activate_with(gate, up, n, out, [](Vec x) {
        const Vec positive = max(broadcast(0.0f), x);
        return mul(positive, positive);
      });
    case Activation::swiglu_oai: {
      const Vec seven = broadcast(7.0f);
      each(n, broadcast(0.0f), [=](int64_t i, auto get, auto put) {
        Vec v = quick(min(seven, get(gate + i)));
        if (up != nullptr) v = mul(v, add(broadcast(1.0f), min(seven, max(broadcast(-7.0f), get(up + i)))));
        put(out + i, v);
      });
      return;
    }
    case Activation::xielu:  // has a function of its own
      return;
  }
}

// exp(x) - 1 loses what a small x says: there it is x + x^2 / 2 + ..., to the term that float still has.
Vec exp_minus_one(Vec x) {
  Vec series = broadcast(1.0f / 120);
  for (const float factor : {1.0f / 24, 1.0f / 6, 0.5f, 1.0f}) series = fma(series, x, broadcast(factor));
  return select(less(x, broadcast(-0.1f)), sub(exp(x), broadcast(1.0f)), mul(series, x));
}

void xielu_row(float positive, float negative, float beta, float eps, float* x, int64_t n) {
  const Vec rising = broadcast(positive), falling = broadcast(negative), line = broadcast(beta);
  each(n, broadcast(0.0f), [=](int64_t i, auto get, auto put) {
    const Vec v = get(x + i);
    const Vec above = mul(mul(rising, v), v);
    const Vec below = mul(falling, sub(exp_minus_one(min(broadcast(eps), v)), v));
    put(x + i, fma(line, v, select(less(broadcast(0.0f), v), above, below)));
  });
}

void cut_row(float* x, float cutoff, int64_t n) {
  const Vec from = broadcast(cutoff);
  each(n, broadcast(0.0f),
       [=](int64_t i, auto get, auto put) { put(x + i, max(broadcast(0.0f), sub(get(x + i), from))); });
}

void moments_of(const float* x, int64_t n, float* mean, float* squares) {
  *mean = sum_of(x, n, broadcast(0.0f), [](Vec v) { return v; }) / static_cast<float>(n);
  const Vec center = broadcast(*mean);
  *squares = sum_of(x, n, center, [=](Vec v) {
    const Vec d = sub(v, center);
    return mul(d, d);
  });
}

float dot_of(const float* x, const float* y, int64_t n) {
  Vec a = broadcast(0.0f), b = a;
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    a = fma(load(x + i), load(y + i), a);
    b = fma(load(x + i + kLanes), load(y + i + kLanes), b);
  }
  const Vec none = broadcast(0.0f);
  for (; i < n; i += kLanes) {
    const int64_t rest = n - i < kLanes ? n - i : kLanes;
    a = fma(load_n(x + i, rest, none), load_n(y + i, rest, none), a);
  }
  return sum(add(a, b));
}

void scale_row(float* x, float factor, int64_t n) {
  const Vec times = broadcast(factor);
  each(n, broadcast(0.0f), [=](int64_t i, auto get, auto put) { put(x + i, mul(get(x + i), times)); });
}

void add_row(float* x, const float* y, float factor, int64_t n) {
  const Vec times = broadcast(factor);
  each(n, broadcast(0.0f), [=](int64_t i, auto get, auto put) { put(x + i, fma(get(y + i), times, get(x + i))); });
}

void softcap_row(float* x, float cap, int64_t n) {
  const Vec up = broadcast(cap), down = broadcast(1.0f / cap);
  each(n, broadcast(0.0f), [=](int64_t i, auto get, auto put) { put(x + i, mul(up, tanh(mul(get(x + i), down)))); });
}

void clamp_row(float* x, float limit, int64_t n) {
  const Vec high = broadcast(limit), low = broadcast(-limit);
  each(n, broadcast(0.0f), [=](int64_t i, auto get, auto put) { put(x + i, min(high, max(low, get(x + i)))); });
}

void multiply_by_sigmoid_row(float* x, const float* gate, int64_t n) {
  each(n, broadcast(0.0f), [=](int64_t i, auto get, auto put) { put(x + i, mul(get(x + i), sigmoid(get(gate + i)))); });
}

float largest_of(const float* x, int64_t n) {
  Vec a = broadcast(-kInfinity), b = a;
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    a = max(load(x + i), a);
    b = max(load(x + i + kLanes), b);
  }
  for (; i + kLanes <= n; i += kLanes) a = max(load(x + i), a);
  if (i < n) b = max(load_n(x + i, n - i, broadcast(-kInfinity)), b);
  return largest(max(a, b));
}

// A NaN anywhere, or no finite value, makes all of the result NaN: as torch.softmax.
void softmax_row(float* x, int64_t n) {
  const Vec top = broadcast(largest_of(x, n));
  Vec total = broadcast(0.0f);
  each(n, broadcast(-kInfinity), [&](int64_t i, auto get, auto put) {
    const Vec v = exp(sub(get(x + i), top));
    put(x + i, v);
    total = add(total, v);
  });
  scale_row(x, 1.0f / sum(total), n);
}

// One pass: the largest value of each stretch; a stretch with a new maximum is remembered, and searched at the end.
int64_t argmax_row(const float* x, int64_t n) {
  constexpr int64_t kStretch = 1024;
  float best = -kInfinity;
  int64_t begin = -1;
  Mask nan = no_lanes();
  for (int64_t first = 0; first < n; first += kStretch) {
    const int64_t count = n - first < kStretch ? n - first : kStretch;
    Vec a = broadcast(-kInfinity), b = a;
    int64_t i = 0;
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
      const Vec v = load(x + first + i), w = load(x + first + i + kLanes);
      nan = either(nan, either(is_nan(v), is_nan(w)));
      a = max(v, a);
      b = max(w, b);
    }
    for (; i < count; i += kLanes) {
      const int64_t rest = count - i < kLanes ? count - i : kLanes;
      const Vec v = load_n(x + first + i, rest, broadcast(-kInfinity));
      nan = either(nan, is_nan(v));
      a = max(v, a);
    }
    const float top = largest(max(a, b));
    if (top > best) {
      best = top;
      begin = first;
    }
  }
  if (lanes(nan) != 0 || begin < 0 || best == kInfinity) return -1;
  while (x[begin] != best) ++begin;
  return begin;
}

constexpr OpKernels kKernels{norm_rows,
                             add_norm_rows,
                             rope_rows,
                             activate_row,
                             xielu_row,
                             cut_row,
                             moments_of,
                             dot_of,
                             scale_row,
                             add_row,
                             softcap_row,
                             clamp_row,
                             multiply_by_sigmoid_row,
                             softmax_row,
                             argmax_row};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::OpKernels, anyaccel::llm::kKernels)
