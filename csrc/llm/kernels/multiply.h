// SPDX-License-Identifier: Apache-2.0
// Products of packed matrices and activations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/shared_items.h"
#include "llm/pack/matrix.h"

namespace anyaccel::llm {

// Products with up to this many tokens read the weights once ("gemv"); many are blocked for the caches ("gemm"). What
// is between, and which that is (gemm_from()), is multiplied by gemv in turns while a part of the weights is in a
// cache.
constexpr int kGemvTokens = 16;

// Activations x[tokens, cols] in the form in which matrices of one format are multiplied: made once, used by all
// matrices that read the same activations.
class Input {
 public:
  // Room for up to `tokens` rows of `cols` values for matrices like `shape` (format, group and cols count). Throws
  // std::bad_alloc.
  void reserve(const Shape& shape, int64_t tokens);

  // Which form is made depends on `tokens` (gemv or gemm; where the caller says so not on them, and mostly gemm) and on
  // the instruction set. Row i is row rows[i] of x, or row i when `rows` is null. With parts > 1 the caller's threads
  // share the work, and all must have returned (a barrier) before the result is used. Never allocates.
  void prepare(const Shape& shape, const float* x, int64_t stride, const int32_t* rows, int tokens, int part, int parts,
               bool always_gemm = false) noexcept;
  bool gemm() const { return gemm_; }
  int tokens() const { return tokens_; }

  // For the kernels: see gemv.h and gemm.h.
  const uint8_t* data() const { return static_cast<const uint8_t*>(memory_.get()); }
  uint8_t* data() { return static_cast<uint8_t*>(memory_.get()); }
  size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<void> memory_;
  size_t bytes_ = 0;
  int tokens_ = 0;
  bool gemm_ = false;
};

struct Output {
  float* data;  // [tokens, rows]: token t, row r at data[t * stride + r]
  int64_t stride;
  const float* bias = nullptr;  // [rows], added once
  bool add = false;             // out += scale * (W x + bias), else out = scale * (W x + bias)
  float scale = 1.0f;
};

// Where threads take each other's pieces of a product that they compute together, and which call this is: see
// SharedItems. Without items each has its own part.
struct Sharing {
  SharedItems* items = nullptr;
  uint64_t call = 0;
};

// What part `part` of `parts` computes of out = W x: every block of rows belongs to exactly one part, the same one in
// every call with the same numbers (gemv; a thread may use its own rows of the result without a barrier).
// Matrix products (gemm) divide the tokens too when that is faster: use the result after a barrier only.
// Rows from shape().rows up to padded_rows() are not written.
void multiply(const Matrix& w, const Input& x, const Output& out, int part, int parts,
              const Sharing& sharing = {}) noexcept;
// The blocks of a part of gemv.
struct Blocks {
  int64_t begin, end;
};
Blocks blocks_of(const Shape& shape, int part, int parts);

}  // namespace anyaccel::llm
