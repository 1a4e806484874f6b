// SPDX-License-Identifier: Apache-2.0
// A layer of this package's decoder on one thread: see instructions.h.
#include <cstring>

#include "instructions.h"
#include "llm/attention/attention.h"
#include "llm/kernels/multiply.h"
#include "llm/kernels/ops.h"
#include "llm/pack/matrix.h"

using namespace anyaccel::llm;
using namespace layer;

namespace {

Matrix matrix(const std::string& format, int64_t rows, int64_t cols, uint32_t seed) {
  Shape shape{Format::bf16, rows, cols};
  if (format == "int8") shape = {Format::i8, rows, cols, 32};
  if (format == "int4") shape = {Format::i4, rows, cols, 32};
  Matrix result(shape);
  const std::vector<float> values = numbers(static_cast<size_t>(rows * cols), seed, 0.1f);
  result.set_rows(0, rows, {values.data(), SourceType::f32, cols * 4, 0});
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments what = arguments(argc, argv);
  const int tokens = what.tokens, qkv_width = (kHeads + 2 * kKvHeads) * kHeadDim;
  const Matrix qkv = matrix(what.format, qkv_width, kHidden, 1), out = matrix(what.format, kHidden, kHidden, 2),
               up = matrix(what.format, 2 * kMlp, kHidden, 3), down = matrix(what.format, kHidden, kMlp, 4);
  const std::vector<float> ones(kHidden, 1.0f);
  const Norm rms{NormKind::rms, kEps, ones.data(), nullptr};
  const AttentionShape heads{kHeads, kKvHeads, kHeadDim, kHeadDim};
  KvCache cache({heads}, CacheFormat::bf16, size_t{1} << 30);
  const int sequence = cache.create();
  AttentionScratch scratch;
  auto attend_to = [&](int position, int count, const float* rows, int64_t stride, float* result) {
    const std::vector<Query> queries{{sequence, position, count, 0, count > 1}};
    const AttentionStep step{&cache,
                             0,
                             {1.0f / std::sqrt(static_cast<float>(kHeadDim))},
                             &queries,
                             rows,
                             rows + kHeads * kHeadDim,
                             rows + (kHeads + kKvHeads) * kHeadDim,
                             stride,
                             stride,
                             stride,
                             result,
                             kHeads * kHeadDim};
    scratch.reserve(heads, queries, 1);
    cache.extend(sequence, count);
    if (needs_append(step)) append(step, 0, 1);
    attend(step, scratch, 0, 1);
    if (needs_combine(step, 1)) combine(step, scratch, 0, 1);
  };
  std::vector<float> rows(static_cast<size_t>(tokens) * qkv_width), mixed(static_cast<size_t>(tokens) * kHidden),
      residual(mixed.size()), normed(mixed.size()), wide(static_cast<size_t>(tokens) * 2 * kMlp), both(wide.size() / 2);
  if (what.context > 0) {
    const std::vector<float> before = numbers(static_cast<size_t>(what.context) * qkv_width, 5, 1.0f);
    std::vector<float> unused(static_cast<size_t>(what.context) * kHidden);
    attend_to(0, what.context, before.data(), qkv_width, unused.data());
  }
  std::vector<float> cosine(static_cast<size_t>(tokens) * kHeadDim / 2), sine(cosine.size());
  for (int t = 0; t < tokens; ++t)
    for (int i = 0; i < kHeadDim / 2; ++i) {
      const double angle = (what.context + t) * std::pow(10000.0, -2.0 * i / kHeadDim);
      cosine[static_cast<size_t>(t * kHeadDim / 2 + i)] = static_cast<float>(std::cos(angle));
      sine[static_cast<size_t>(t * kHeadDim / 2 + i)] = static_cast<float>(std::sin(angle));
    }
  Input of_hidden, of_mlp;
  of_hidden.reserve(qkv.shape(), tokens);
  of_mlp.reserve(down.shape(), tokens);
  const std::vector<float> start = numbers(residual.size(), 6, 1.0f);
  for (int turn = 0; turn < what.times; ++turn) {
    residual = start;
    for (int t = 0; t < tokens; ++t) norm(rms, &residual[t * kHidden], kHidden, &normed[t * kHidden]);
    of_hidden.prepare(qkv.shape(), normed.data(), kHidden, nullptr, tokens, 0, 1);
    multiply(qkv, of_hidden, {rows.data(), qkv_width}, 0, 1);
    for (int t = 0; t < tokens; ++t)
      rope(&rows[t * qkv_width], kHeads + kKvHeads, kHeadDim, &cosine[t * kHeadDim / 2], &sine[t * kHeadDim / 2],
           kHeadDim / 2, false);
    attend_to(what.context, tokens, rows.data(), qkv_width, mixed.data());
    of_hidden.prepare(out.shape(), mixed.data(), kHidden, nullptr, tokens, 0, 1);
    multiply(out, of_hidden, {residual.data(), kHidden, nullptr, true}, 0, 1);
    for (int t = 0; t < tokens; ++t) norm(rms, &residual[t * kHidden], kHidden, &normed[t * kHidden]);
    of_hidden.prepare(up.shape(), normed.data(), kHidden, nullptr, tokens, 0, 1);
    multiply(up, of_hidden, {wide.data(), 2 * kMlp}, 0, 1);
    for (int t = 0; t < tokens; ++t)
      activate(Activation::silu, &wide[t * 2 * kMlp], &wide[t * 2 * kMlp + kMlp], kMlp, &both[t * kMlp]);
    of_mlp.prepare(down.shape(), both.data(), kMlp, nullptr, tokens, 0, 1);
    multiply(down, of_mlp, {residual.data(), kHidden, nullptr, true}, 0, 1);
    cache.truncate(sequence, what.context);
  }
  print(&residual[static_cast<size_t>(tokens - 1) * kHidden]);
  return 0;
}
