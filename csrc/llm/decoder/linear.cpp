// SPDX-License-Identifier: Apache-2.0
#include "llm/decoder/linear.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>

#include "common/parallel.h"
#include "common/team.h"
#include "llm/decoder/workspace.h"
#include "llm/errors.h"
#include "llm/kernels/ops.h"
#include "simd/convert.h"

namespace anyaccel::llm {
namespace {

using namespace simd;

constexpr int64_t kRunTokens = 512;

// Memory that all matrices and norms share: it is used by one call at a time. They run on torch's threads, since the
// rest of such a model does: waiting threads of two pools take the cores from each other.
struct Pool {
  const int threads = usable_cpus();
  const pid_t pid = getpid();
  std::mutex mutex;
  std::vector<Inputs> inputs;  // of small products, each thread's own
  Inputs shared;               // of large ones
  std::vector<float> x, y;
  std::vector<Shape> known;
  int64_t tokens = 0;
  bool shared_fits = true;  // `shared` has room for every known shape

  // fn(thread) for each of `threads`.
  template <class Fn>
  void run(Fn&& fn) const {
    parallel_for(threads, threads, [&](int64_t thread) { fn(static_cast<int>(thread)); });
  }

  // Throws std::bad_alloc.
  void reserve(const Shape& shape, int64_t count) {
    const auto same = [&](const Shape& s) { return Inputs::same(s, shape) && s.cols >= shape.cols; };
    const bool first = std::none_of(known.begin(), known.end(), same);
    if (first) {
      known.push_back(shape);
      shared_fits = false;
      inputs.resize(static_cast<size_t>(threads));
      for (Inputs& one : inputs) one.reserve({shape}, kGemvTokens);
    }
    if (count > kGemvTokens && (!shared_fits || count > tokens)) {
      tokens = std::max(tokens, count);
      shared.reserve(known, tokens);
      shared_fits = true;
    }
  }
};

// A forked child makes a pool of its own: it has none of the parent's threads, and the lock may have been held by one.
Pool& pool() {
  static std::atomic<Pool*> current{nullptr};
  Pool* found = current.load();
  while (found == nullptr || found->pid != getpid()) {
    auto made = std::make_unique<Pool>();
    if (current.compare_exchange_strong(found, made.get())) return *made.release();  // the parent's is left as it is
  }
  return *found;
}

size_t bytes_of(Values type) { return type == Values::f32 ? 4 : 2; }

void to_floats(const uint8_t* from, Values type, int64_t count, float* to) {
  const auto* halves = reinterpret_cast<const uint16_t*>(from);
  if (type == Values::f32)
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
  else if (type == Values::bf16)
    for (int64_t i = 0; i < count; ++i) to[i] = from_bf16(halves[i]);
  else
    for (int64_t i = 0; i < count; ++i) to[i] = from_f16(halves[i]);
}

void from_floats(const float* from, Values type, int64_t count, uint8_t* to) {
  auto* halves = reinterpret_cast<uint16_t*>(to);
  if (type == Values::f32)
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
  else if (type == Values::bf16)
    for (int64_t i = 0; i < count; ++i) halves[i] = to_bf16(from[i]);
  else
    for (int64_t i = 0; i < count; ++i) halves[i] = to_f16(from[i]);
}

// One run's memory and what it computes.
struct Product {
  Pool& pool;
  const Matrix& w;
  const uint8_t* x;
  uint8_t* y;
  int64_t tokens;
  Values type;
  const float* bias;

  const float* x_floats() const { return type == Values::f32 ? reinterpret_cast<const float*>(x) : pool.x.data(); }
  float* y_floats() const { return type == Values::f32 ? reinterpret_cast<float*>(y) : pool.y.data(); }

  void convert_x(Range rows) const {
    const int64_t cols = w.shape().cols;
    if (type == Values::f32) return;
    to_floats(x + static_cast<size_t>(rows.begin * cols) * bytes_of(type), type, (rows.end - rows.begin) * cols,
              pool.x.data() + rows.begin * cols);
  }
  void convert_y(Range of_tokens, Range rows) const {
    const int64_t width = w.shape().rows;
    if (type == Values::f32) return;
    for (int64_t t = of_tokens.begin; t < of_tokens.end; ++t)
      from_floats(pool.y.data() + t * width + rows.begin, type, rows.end - rows.begin,
                  y + static_cast<size_t>(t * width + rows.begin) * bytes_of(type));
  }

  // Each thread makes the input for itself, and converts the rows that it has computed.
  void small(int thread, int threads) const {
    const Shape& shape = w.shape();
    Inputs& inputs = pool.inputs[static_cast<size_t>(thread)];
    Input& input = inputs.at(inputs.index(shape));
    input.prepare(shape, x_floats(), shape.cols, nullptr, static_cast<int>(tokens), 0, 1);
    anyaccel::llm::multiply(w, input, Output{y_floats(), shape.rows, bias}, thread, threads);
    const Blocks blocks = blocks_of(shape, thread, threads);
    convert_y({0, tokens},
              {std::min(blocks.begin * kBlockRows, shape.rows), std::min(blocks.end * kBlockRows, shape.rows)});
  }

  void large() const {
    const Shape& shape = w.shape();
    const int threads = pool.threads;
    Input& input = pool.shared.at(pool.shared.index(shape));
    if (type != Values::f32) pool.run([&](int thread) { convert_x(part_of(tokens, thread, threads)); });
    pool.run([&](int thread) {
      input.prepare(shape, x_floats(), shape.cols, nullptr, static_cast<int>(tokens), thread, threads);
    });
    pool.run(
        [&](int thread) { anyaccel::llm::multiply(w, input, Output{y_floats(), shape.rows, bias}, thread, threads); });
    if (type != Values::f32)
      pool.run([&](int thread) { convert_y(part_of(tokens, thread, threads), {0, shape.rows}); });
  }
};

void grow(std::vector<float>& vector, int64_t count) {
  if (vector.size() < static_cast<size_t>(count)) vector.resize(static_cast<size_t>(count));
}

}  // namespace

Linear::Linear(const Shape& shape) : matrix_(shape) {}

void Linear::set_rows(int64_t first, int64_t count, const Source& source) { matrix_.set_rows(first, count, source); }
void Linear::set_quantised_rows(int64_t first, int64_t count, const uint8_t* q, const float* scales,
                                const float* minima) {
  matrix_.set_quantised_rows(first, count, q, scales, minima);
}

void Linear::multiply(const void* x, void* y, int64_t tokens, Values type, const float* bias) const {
  if (tokens < 0) throw UsageError("a product of " + std::to_string(tokens) + " tokens");
  if (tokens == 0) return;
  Pool& shared = pool();
  const std::lock_guard<std::mutex> lock(shared.mutex);
  const Shape& shape = matrix_.shape();
  const int64_t most = std::min(tokens, kRunTokens);
  shared.reserve(shape, most);
  if (type != Values::f32) {
    grow(shared.x, most * shape.cols);
    grow(shared.y, most * shape.rows);
  }
  for (int64_t first = 0; first < tokens; first += most) {
    const int64_t count = std::min(most, tokens - first);
    const Product product{shared,
                          matrix_,
                          static_cast<const uint8_t*>(x) + static_cast<size_t>(first * shape.cols) * bytes_of(type),
                          static_cast<uint8_t*>(y) + static_cast<size_t>(first * shape.rows) * bytes_of(type),
                          count,
                          type,
                          bias};
    if (count <= kGemvTokens) {
      product.convert_x({0, count});
      shared.run([&](int thread) { product.small(thread, shared.threads); });
    } else {
      product.large();
    }
  }
}

void Linear::copy_rows(const int64_t* rows, int64_t count, void* y, Values type) const {
  const Shape& shape = matrix_.shape();
  for (int64_t i = 0; i < count; ++i)
    if (rows[i] < 0 || rows[i] >= shape.rows)
      throw UsageError("token " + std::to_string(rows[i]) + " is outside the vocabulary of " +
                       std::to_string(shape.rows));
  std::vector<float> values(type == Values::f32 ? 0 : static_cast<size_t>(shape.cols));
  auto* to = static_cast<uint8_t*>(y);
  for (int64_t i = 0; i < count; ++i, to += static_cast<size_t>(shape.cols) * bytes_of(type)) {
    if (type == Values::f32) {
      matrix_.row(rows[i], reinterpret_cast<float*>(to));
      continue;
    }
    matrix_.row(rows[i], values.data());
    from_floats(values.data(), type, shape.cols, to);
  }
}

void rms_norm(const void* x, void* y, int64_t rows, int64_t cols, Values type, const float* weight, float eps) {
  if (rows < 0 || cols < 1) throw UsageError("a norm of " + std::to_string(rows) + " x " + std::to_string(cols));
  const Norm kind{NormKind::rms, eps, weight, nullptr};
  const auto* from = static_cast<const uint8_t*>(x);
  auto* to = static_cast<uint8_t*>(y);
  const size_t row_bytes = static_cast<size_t>(cols) * bytes_of(type);
  Pool& shared = pool();
  const std::lock_guard<std::mutex> lock(shared.mutex);
  const int threads = rows * cols < 16384 ? 1 : shared.threads;
  if (type != Values::f32) grow(shared.x, cols * threads);
  const auto part = [&](int thread) {
    const Range own = part_of(rows, thread, threads);
    for (int64_t row = own.begin; row < own.end; ++row) {
      const uint8_t* in = from + static_cast<size_t>(row) * row_bytes;
      uint8_t* out = to + static_cast<size_t>(row) * row_bytes;
      if (type == Values::f32) {
        norm(kind, reinterpret_cast<const float*>(in), cols, reinterpret_cast<float*>(out));
        continue;
      }
      float* values = shared.x.data() + thread * cols;
      to_floats(in, type, cols, values);
      norm(kind, values, cols, values);
      from_floats(values, type, cols, out);
    }
  };
  if (threads == 1)
    part(0);
  else
    shared.run(part);
}

}  // namespace anyaccel::llm
