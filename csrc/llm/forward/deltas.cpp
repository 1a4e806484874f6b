// SPDX-License-Identifier: Apache-2.0
// What layers add to the residual: deltas of this rank, or of all ranks, which the next norm adds.
//
// Of few tokens each rank reads the rows of all others and adds them itself, after one synchronisation. Of a prompt,
// from three ranks on, they divide the rows among them, each adds a part, and the others copy the sums (a
// reduce-scatter and an all-gather: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations
// in MPICH", 2005): a rank reads 2 (n - 1) / n of the deltas' bytes from others instead of n - 1 times those, for one
// synchronisation more. Sums are made in the order of ranks either way, so the results have the same bits.
//
// Where sockets have several ranks each, these do so in two levels, so that what crosses the link between sockets is no
// more than with one rank a socket: the ranks of a socket add up their own deltas; the ranks of one place on all
// sockets add these sums, and take each other's results; their neighbours copy them from there. That takes two
// synchronisations more, and rounds in another order. tools/model_collectives.py counts the bytes.
//
// Ranks of other hosts cannot be read from a second time: they read all rows.
#include <algorithm>
#include <cstring>
#include <exception>

#include "llm/forward/forward.h"
#include "llm/forward/step_thread.h"

namespace anyaccel::llm {
namespace {

// From so many ranks on they divide the rows of deltas among them; two read the same number of bytes either way.
constexpr int kRanksThatDivideRows = 3;

}  // namespace

float* StepThread::delta(int which) noexcept {
  if (forward_.ranks_ == nullptr) return shared_.delta[which].get();
  return forward_.ranks_->slot(spec_.rank, turn_) + which * tokens_ * hidden_stride_;
}

void StepThread::pend(int count, const Norm& post, float scale) noexcept {
  pending_ = count;
  pending_post_ = post;
  pending_scale_ = scale;
}

void StepThread::exchange(Work kind, const ParallelRanks::Parts& parts) noexcept {
  barrier(kind);
  if (forward_.ranks_ == nullptr) return;
  await_ranks(turn_, parts);
  pending_turn_ = turn_++;
}

void StepThread::await_ranks(unsigned turn, const ParallelRanks::Parts& parts) noexcept {
  // After an error the step goes on without waiting, so that all threads come to its end, and throws there.
  if (thread_ == 0 && !forward_.failure_) {
    try {
      forward_.ranks_->exchange(turn, parts);
    } catch (...) {
      forward_.failure_ = std::current_exception();
    }
  }
  barrier(Work::ranks);
}

// Other cores have written some of it, so that each line is a miss; asked for together, the misses overlap.
void StepThread::fetch_pending(int64_t t) const noexcept {
  const auto fetch = [&](const float* row) {
    for (int64_t i = 0; i < spec_.hidden; i += 16) __builtin_prefetch(row + i);
  };
  fetch(residual_ + t * hidden_stride_);
  if (forward_.ranks_ != nullptr) return;
  for (int i = 0; i < pending_; ++i) fetch(shared_.delta[i].get() + t * hidden_stride_);
}

int StepThread::pending_rows() const noexcept {
  if (sockets_summed_) return forward_.ranks_->sockets().count;
  return pending_ * (forward_.ranks_ == nullptr ? 1 : forward_.ranks_->size());
}

const float* StepThread::pending_row(int index, int64_t t) const noexcept {
  if (sockets_summed_) return row_of(forward_.ranks_->sockets().across(index), t);
  const int which = index % pending_;
  if (forward_.ranks_ == nullptr) return shared_.delta[which].get() + t * hidden_stride_;
  return forward_.ranks_->slot(index / pending_, pending_turn_) + (which * tokens_ + t) * hidden_stride_;
}

bool StepThread::divides_rows() const noexcept {
  return forward_.ranks_ != nullptr && forward_.ranks_->on_one_host() && pending_ > 0 && !small_ &&
         spec_.size >= kRanksThatDivideRows;
}

float* StepThread::row_of(int rank, int64_t t) const noexcept {
  return forward_.ranks_->slot(rank, pending_turn_) + t * hidden_stride_;
}

// Puts the new residual of the rows that this rank adds into its slot, in place of its own delta; and where a socket
// has several ranks, the rows that its place on other sockets adds.
void StepThread::add_rows_for_all() noexcept {
  const SocketRanks& sockets = forward_.ranks_->sockets();
  const size_t bytes = static_cast<size_t>(spec_.hidden) * sizeof(float);
  const auto each_row = [&](Range rows, const auto& with) {
    const Range own = part_of(rows.end - rows.begin, thread_, threads_);
    for (int64_t t = rows.begin + own.begin; t < rows.begin + own.end; ++t) with(t);
  };
  const auto meet = [&] {
    barrier(Work::norm);
    await_ranks(pending_turn_, {});
  };
  if (sockets.each > 1) {
    each_row(part_of(tokens_, sockets.place, sockets.each), [&](int64_t t) {
      float* const sum = x_ + t * hidden_stride_;  // nobody reads it any more
      for (int i = 0; i < sockets.each * pending_; ++i) {
        const float* const from = row_of(sockets.beside(i / pending_), (i % pending_) * tokens_ + t);
        if (i == 0)
          std::memcpy(sum, from, bytes);
        else
          add(sum, from, 1.0f, spec_.hidden);
      }
      std::memcpy(row_of(spec_.rank, t), sum, bytes);
    });
    meet();
    sockets_summed_ = true;
  }
  each_row(rows_added_by(sockets.place, sockets.socket), [&](int64_t t) {
    float* const sum = x_ + t * hidden_stride_;
    std::memcpy(sum, residual_ + t * hidden_stride_, bytes);
    add_pending(t, sum, pending_rows());
    std::memcpy(row_of(spec_.rank, t), sum, bytes);
  });
  meet();
  if (sockets.each == 1) return;
  sockets_summed_ = false;
  for (int socket = 0; socket < sockets.count; ++socket) {
    if (socket == sockets.socket) continue;
    each_row(rows_added_by(sockets.place, socket),
             [&](int64_t t) { std::memcpy(row_of(spec_.rank, t), row_of(sockets.across(socket), t), bytes); });
  }
  meet();
}

Range StepThread::rows_added_by(int place, int socket) const noexcept {
  const SocketRanks& sockets = forward_.ranks_->sockets();
  const Range rows = part_of(tokens_, place, sockets.each);
  const Range part = part_of(rows.end - rows.begin, socket, sockets.count);
  return {rows.begin + part.begin, rows.begin + part.end};
}

// Where add_rows_for_all() has left the new residual of a row for this rank.
const float* StepThread::added_row(int64_t t) const noexcept {
  const SocketRanks& sockets = forward_.ranks_->sockets();
  if (sockets.each > 1) return row_of(sockets.beside(part_with(tokens_, t, sockets.each)), t);
  return row_of(sockets.across(part_with(tokens_, t, sockets.count)), t);
}

// Adds the first of what is pending to a row; all of it where it is normed first.
void StepThread::add_pending(int64_t t, float* row, int count) noexcept {
  const int64_t n = spec_.hidden;
  if (pending_post_.kind == NormKind::none) {
    for (int i = 0; i < count; ++i) add(row, pending_row(i, t), pending_scale_, n);
    return;
  }
  add(row, normed_pending(t), pending_scale_, n);
}

const float* StepThread::normed_pending(int64_t t) noexcept {
  const int64_t n = spec_.hidden;
  float* sum = own_.row.get();
  std::memcpy(sum, pending_row(0, t), static_cast<size_t>(n) * sizeof(float));
  for (int i = 1; i < pending_rows(); ++i) add(sum, pending_row(i, t), 1.0f, n);
  norm(pending_post_, sum, n, sum);
  return sum;
}

void StepThread::advance(int64_t t, const Norm& norm_, float* out) noexcept {
  const int64_t n = spec_.hidden;
  float* row = residual_ + t * hidden_stride_;
  if (pending_ == 0) return norm(norm_, row, n, out);
  if (pending_post_.kind != NormKind::none) return add_norm(row, normed_pending(t), pending_scale_, norm_, n, out);
  const int last = pending_rows() - 1;
  add_pending(t, row, last);
  add_norm(row, pending_row(last, t), pending_scale_, norm_, n, out);
}

void StepThread::advance(const Norm& norm_, bool residual_from_norm) noexcept {
  const size_t bytes = static_cast<size_t>(spec_.hidden) * sizeof(float);
  const bool divided = divides_rows();
  if (divided) add_rows_for_all();
  for (int64_t t = mine_.begin; t < mine_.end; ++t) {
    float* row = residual_ + t * hidden_stride_;
    float* out = x_ + t * hidden_stride_;
    if (!small_ && t + 1 < mine_.end) fetch_pending(t + 1);
    if (divided) {
      std::memcpy(row, added_row(t), bytes);
      norm(norm_, row, spec_.hidden, out);
    } else {
      advance(t, norm_, out);
    }
    if (residual_from_norm) std::memcpy(row, out, bytes);
  }
  pending_ = 0;
  fresh();
  mark(Work::norm);
}

}  // namespace anyaccel::llm
