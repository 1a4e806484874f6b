// SPDX-License-Identifier: Apache-2.0
// The end of a step: from the residual to logits and hidden states.
#include <algorithm>
#include <cstring>

#include "llm/forward/step_thread.h"

namespace anyaccel::llm {

void StepThread::head() noexcept {
  const auto count = static_cast<int64_t>(step_.wanted.size());
  for (size_t i = 0; i < step_.hidden_wanted.size(); ++i) {
    const int64_t t = step_.hidden_wanted[i];
    if (t < mine_.begin || t >= mine_.end || (small_ && thread_ > 0)) continue;  // small: every thread has them all
    advance(t, weights_.final_norm, step_.hidden + static_cast<int64_t>(i) * spec_.hidden);
  }
  // Row i of x is the i-th wanted token; those before it are not needed any more, since i <= wanted[i].
  for (int64_t i = 0; i < count; ++i) {
    const int64_t t = step_.wanted[static_cast<size_t>(i)];
    if (t >= mine_.begin && t < mine_.end) advance(t, weights_.final_norm, x_ + i * hidden_stride_);
  }
  pending_ = 0;
  fresh();
  mark(Work::norm);
  const Matrix& w = weights_.head.w;
  int64_t at_once = step_.exact ? kGemvTokens : std::max<int64_t>(count, 1);
  if (forward_.ranks_ != nullptr && weights_.head_tokens.empty()) {
    ParallelRanks& ranks = *forward_.ranks_;
    int64_t widest = 1;
    for (int rank = 0; rank < ranks.size(); ++rank) widest = std::max(widest, ranks.header(rank).vocab_count);
    const auto room = static_cast<int64_t>(ranks.slot_floats());
    at_once = std::min(at_once, std::max<int64_t>(room / widest, 1));
  }
  for (int64_t first = 0; first < count; first += at_once) logits_of(w, x_, first, std::min(at_once, count - first));
}

void StepThread::finish_logits(float* logits, int64_t stride, int64_t tokens, int64_t begin, int64_t end) noexcept {
  if (spec_.logits_softcap <= 0 || begin >= end) return;
  for (int64_t t = 0; t < tokens; ++t) softcap(logits + t * stride + begin, spec_.logits_softcap, end - begin);
}

// The logits of all tokens, from those of the tokens that the head has; the others never come.
void StepThread::spread_logits(const float* from, int64_t first, int64_t count) noexcept {
  constexpr float kNever = -1e9f;
  barrier(Work::head);
  const auto rows = static_cast<int64_t>(weights_.head_tokens.size());
  const Range own = part_of(count, thread_, threads_);
  for (int64_t t = own.begin; t < own.end; ++t) {
    float* to = step_.logits + (first + t) * step_.logits_stride;
    std::fill(to, to + spec_.vocab, kNever);
    for (int64_t row = 0; row < rows; ++row) to[weights_.head_tokens[static_cast<size_t>(row)]] = from[t * rows + row];
  }
}

// Logits of the wanted tokens first, first + 1, ...
void StepThread::logits_of(const Matrix& w, const float* x, int64_t first, int64_t count) noexcept {
  const bool part = !weights_.head_tokens.empty();  // which every rank has whole
  const bool divided = forward_.ranks_ != nullptr && !part;
  const int64_t rows = w.shape().rows;
  const int64_t stride = divided || part ? rows : step_.logits_stride;
  float* out = part      ? shared_.draft_logits.get() + first * stride
               : divided ? forward_.ranks_->slot(spec_.rank, turn_)
                         : step_.logits + first * stride;
  if (first > 0) fresh();
  const Input& in = input(w.shape(), x + first * hidden_stride_, hidden_stride_, count, nullptr, true);
  multiply(w, in, Output{out, stride, weights_.head.bias, false, spec_.logits_scale}, thread_, threads_);
  if (small_) {
    const Range own = rows_of(w.shape());
    finish_logits(out, stride, count, own.begin, own.end);
  } else {
    barrier(Work::head);
    const Range own = part_of(count, thread_, threads_);
    finish_logits(out + own.begin * stride, stride, own.end - own.begin, 0, rows);
  }
  if (part) spread_logits(out, first, count);
  if (!divided) {
    mark(Work::head);
    return;  // all threads meet at the end of the run, before anybody reads the logits
  }
  exchange(Work::head, {0, count});
  for (int rank = 0; rank < forward_.ranks_->size(); ++rank) {
    const ParallelRanks::Header& header = forward_.ranks_->header(rank);
    const float* part = forward_.ranks_->slot(rank, pending_turn_);
    const Range own = part_of(header.vocab_count, thread_, threads_);
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(step_.logits + (first + i) * step_.logits_stride + header.vocab_first + own.begin,
                  part + i * header.vocab_count + own.begin, static_cast<size_t>(own.end - own.begin) * sizeof(float));
  }
  mark(Work::ranks);
}

}  // namespace anyaccel::llm
