// SPDX-License-Identifier: Apache-2.0
#include "llm/kernels/kernels_mixers.h"

#include "simd/pick.h"
#include "simd/simd.h"

namespace anyaccel::llm {
namespace {

using namespace simd::ANYACCEL_ISA_VARIANT;
using simd::ANYACCEL_ISA_VARIANT::add;
using simd::ANYACCEL_ISA_VARIANT::sigmoid;
using simd::ANYACCEL_ISA_VARIANT::sqrt;

struct Whole {
  static Vec get(const float* p) { return load(p); }
  static void put(float* p, Vec v) { store(p, v); }
};
// The short vector at the end.
struct Part {
  int64_t count;
  Vec get(const float* p) const { return load_n(p, count, broadcast(0.0f)); }
  void put(float* p, Vec v) const { store_n(p, count, v); }
};

// --- the convolution

// One vector of channels through all tokens. The window's oldest value is first; kTaps 0: as many as conv says.
template <int kTaps, class Io>
void convolve_vector(const Convolution& conv, Io io, int64_t at, float* x, int64_t stride, int64_t tokens, float* state,
                     int64_t state_stride) {
  const int taps = kTaps > 0 ? kTaps : conv.kernel;
  Vec window[kTaps > 0 ? kTaps : kMostTaps], weight[kTaps > 0 ? kTaps : kMostTaps];
  for (int j = 0; j < taps; ++j) weight[j] = io.get(conv.taps + j * conv.tap_stride + at);
  for (int j = 0; j + 1 < taps; ++j) window[j] = io.get(state + j * state_stride + at);
  const Vec bias = conv.bias == nullptr ? broadcast(0.0f) : io.get(conv.bias + at);
  for (int64_t t = 0; t < tokens; ++t) {
    float* row = x + t * stride + at;
    Vec in = io.get(row);
    if (conv.in_gate != nullptr) in = mul(in, io.get(conv.in_gate + t * stride + at));
    window[taps - 1] = in;
    Vec out = bias;
    for (int j = 0; j < taps; ++j) out = fma(window[j], weight[j], out);
    for (int j = 0; j + 1 < taps; ++j) window[j] = window[j + 1];
    if (conv.silu) out = mul(out, sigmoid(out));
    if (conv.out_gate != nullptr) out = mul(out, io.get(conv.out_gate + t * stride + at));
    io.put(row, out);
  }
  for (int j = 0; j + 1 < taps; ++j) io.put(state + j * state_stride + at, window[j]);
}

template <int kTaps>
void convolve_taps(const Convolution& conv, float* x, int64_t stride, int64_t tokens, int64_t channels, float* state,
                   int64_t state_stride) {
  int64_t at = 0;
  for (; at + kLanes <= channels; at += kLanes)
    convolve_vector<kTaps>(conv, Whole{}, at, x, stride, tokens, state, state_stride);
  if (at < channels) convolve_vector<kTaps>(conv, Part{channels - at}, at, x, stride, tokens, state, state_stride);
}

void convolve_rows(const Convolution& conv, float* x, int64_t stride, int64_t tokens, int64_t channels, float* state,
                   int64_t state_stride) {
  switch (conv.kernel) {
    case 3:
      return convolve_taps<3>(conv, x, stride, tokens, channels, state, state_stride);
    case 4:
      return convolve_taps<4>(conv, x, stride, tokens, channels, state, state_stride);
    default:
      return convolve_taps<0>(conv, x, stride, tokens, channels, state, state_stride);
  }
}

// --- linear attention

// kWide vectors of columns of the state, which stay in the first cache from token to token. Sums over keys go into two
// accumulators, so that enough of them are under way at a time.
template <int kWide, bool kChannels, class Io>
void attend_columns(const LinearHead& h, Io io, int64_t at) {
  const int64_t n = h.value_dim;
  for (int t = 0; t < h.tokens; ++t) {
    const float* q = h.q + t * h.key_stride;
    const float* k = h.k + t * h.key_stride;
    const float* v = h.v + t * h.value_stride + at;
    float* const state = h.state + at;
    const float* const channels = kChannels ? h.decays + t * h.key_stride : nullptr;
    const Vec decay = broadcast(kChannels ? 1.0f : h.decay[t]), strength = broadcast(h.strength[t]);
    Vec written[kWide], even[kWide], odd[kWide];
    for (int w = 0; w < kWide; ++w) written[w] = io.get(v + w * kLanes);
    if (h.delta) {
      for (int w = 0; w < kWide; ++w) even[w] = odd[w] = broadcast(0.0f);
      int i = 0;
      for (; i + 1 < h.key_dim; i += 2) {
        const Vec a = broadcast(kChannels ? k[i] * channels[i] : k[i]);
        const Vec b = broadcast(kChannels ? k[i + 1] * channels[i + 1] : k[i + 1]);
        for (int w = 0; w < kWide; ++w) even[w] = fma(io.get(state + i * n + w * kLanes), a, even[w]);
        for (int w = 0; w < kWide; ++w) odd[w] = fma(io.get(state + (i + 1) * n + w * kLanes), b, odd[w]);
      }
      if (i < h.key_dim) {
        const Vec last = broadcast(kChannels ? k[i] * channels[i] : k[i]);
        for (int w = 0; w < kWide; ++w) even[w] = fma(io.get(state + i * n + w * kLanes), last, even[w]);
      }
      for (int w = 0; w < kWide; ++w) written[w] = fnma(add(even[w], odd[w]), decay, written[w]);
    }
    const Vec skip = broadcast(h.skip);
    for (int w = 0; w < kWide; ++w) {
      written[w] = mul(written[w], strength);
      even[w] = h.skip == 0 ? broadcast(0.0f) : mul(skip, io.get(v + w * kLanes));
      odd[w] = broadcast(0.0f);
    }
    const auto row = [&](int i, Vec* sum) {
      const Vec key = broadcast(k[i]), query = broadcast(q[i]), kept = kChannels ? broadcast(channels[i]) : decay;
      float* const s = state + i * n;
      for (int w = 0; w < kWide; ++w) {
        const Vec next = fma(key, written[w], mul(io.get(s + w * kLanes), kept));
        io.put(s + w * kLanes, next);
        sum[w] = fma(query, next, sum[w]);
      }
    };
    int i = 0;
    for (; i + 1 < h.key_dim; i += 2) {
      row(i, even);
      row(i + 1, odd);
    }
    if (i < h.key_dim) row(i, even);
    float* const out = h.out + t * h.out_stride + at;
    for (int w = 0; w < kWide; ++w) io.put(out + w * kLanes, add(even[w], odd[w]));
  }
}

template <bool kChannels>
void attend_columns_of(const LinearHead& h) {
  int64_t at = 0;
  for (; at + 4 * kLanes <= h.value_dim; at += 4 * kLanes) attend_columns<4, kChannels>(h, Whole{}, at);
  for (; at + kLanes <= h.value_dim; at += kLanes) attend_columns<1, kChannels>(h, Whole{}, at);
  if (at < h.value_dim) attend_columns<1, kChannels>(h, Part{h.value_dim - at}, at);
}

void attend_head(const LinearHead& h) {
  h.decays == nullptr ? attend_columns_of<false>(h) : attend_columns_of<true>(h);
}

// --- the selective scan

// log(1 + exp(x)): max(x, 0) + log(1 + e) with e = exp(-|x|), whose logarithm is 2 atanh(e / (2 + e)), here a series of
// a number up to 1/3.
Vec softplus_of(Vec x) {
  const Vec e = exp(sub(broadcast(0.0f), abs(x)));
  const Vec s = div(e, add(e, broadcast(2.0f))), square = mul(s, s);
  Vec p = broadcast(2.0f / 13);
  for (const float k : {2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3, 2.0f}) p = fma(p, square, broadcast(k));
  return fma(p, s, max(x, broadcast(0.0f)));
}

template <class Io>
void scan_vector(const SelectiveScan& scan, Io io, int64_t at, float* x, int64_t stride, int64_t tokens, float* state,
                 int64_t state_stride) {
  const Vec skip = io.get(scan.skip + at);
  for (int64_t t = 0; t < tokens; ++t) {
    float* const row = x + t * stride + at;
    const float* const b = scan.b + t * scan.key_stride;
    const float* const c = scan.c + t * scan.key_stride;
    const Vec step = softplus_of(io.get(scan.steps + t * scan.steps_stride + at)), in = io.get(row);
    const Vec written = mul(step, in);
    Vec out = mul(skip, in);
    for (int n = 0; n < scan.state_dim; ++n) {
      float* const s = state + n * state_stride + at;
      const Vec decay = exp(mul(io.get(scan.rates + n * scan.rate_stride + at), step));
      const Vec next = fma(written, broadcast(b[n]), mul(io.get(s), decay));
      io.put(s, next);
      out = fma(broadcast(c[n]), next, out);
    }
    const Vec gate = io.get(scan.gates + t * stride + at);
    io.put(row, mul(out, mul(gate, sigmoid(gate))));
  }
}

void scan_rows(const SelectiveScan& scan, float* x, int64_t stride, int64_t tokens, int64_t channels, float* state,
               int64_t state_stride) {
  int64_t at = 0;
  for (; at + kLanes <= channels; at += kLanes) scan_vector(scan, Whole{}, at, x, stride, tokens, state, state_stride);
  if (at < channels) scan_vector(scan, Part{channels - at}, at, x, stride, tokens, state, state_stride);
}

// --- the gated recurrence

template <class Io>
void recur_vector(const GatedRecurrence& unit, Io io, int64_t at, float* x, int64_t stride, int64_t tokens,
                  float* state) {
  const Vec rate = mul(broadcast(-8.0f), softplus_of(io.get(unit.rates + at)));
  const Vec input_bias = io.get(unit.input_bias + at), decay_bias = io.get(unit.decay_bias + at);
  Vec s = io.get(state + at);
  for (int64_t t = 0; t < tokens; ++t) {
    float* const row = x + t * stride + at;
    const int64_t gate = t * unit.gates_stride + at;
    const Vec decay = exp(mul(rate, sigmoid(add(io.get(unit.decay_gates + gate), decay_bias))));
    Vec in = mul(io.get(row), sigmoid(add(io.get(unit.input_gates + gate), input_bias)));
    if (t > 0 || !unit.opens) in = mul(in, sqrt(fnma(decay, decay, broadcast(1.0f))));
    s = fma(decay, s, in);
    io.put(row, s);
  }
  io.put(state + at, s);
}

void recur_rows(const GatedRecurrence& unit, float* x, int64_t stride, int64_t tokens, int64_t channels, float* state) {
  int64_t at = 0;
  for (; at + kLanes <= channels; at += kLanes) recur_vector(unit, Whole{}, at, x, stride, tokens, state);
  if (at < channels) recur_vector(unit, Part{channels - at}, at, x, stride, tokens, state);
}

template <class Io>
void decay_vector(Io io, const float* x, const float* bias, float rate, float* out) {
  io.put(out, exp(mul(broadcast(-rate), softplus_of(add(io.get(x), io.get(bias))))));
}

void decay_row(const float* x, const float* bias, float rate, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) decay_vector(Whole{}, x + i, bias + i, rate, out + i);
  if (i < n) decay_vector(Part{n - i}, x + i, bias + i, rate, out + i);
}

constexpr MixerKernels kKernels{convolve_rows, attend_head, scan_rows, recur_rows, decay_row};

}  // namespace
}  // namespace anyaccel::llm

ANYACCEL_KERNELS(anyaccel::llm::MixerKernels, anyaccel::llm::kKernels)
