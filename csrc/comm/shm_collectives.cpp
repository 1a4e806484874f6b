// SPDX-License-Identifier: Apache-2.0
// The collectives that move data chunk by chunk: each rank writes to its buffer, synchronises, and reads from its
// peers.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "comm/shm_call.h"

namespace anyaccel::comm {
namespace {

const char* at(const void* data, size_t offset) { return static_cast<const char*>(data) + offset; }
char* at(void* data, size_t offset) { return static_cast<char*>(data) + offset; }

void copy(void* out, const void* in, size_t bytes) {
  if (out != in && bytes != 0) std::memcpy(out, in, bytes);
}

// Calls body(offset, bytes, is_first) for each piece of at most `step` out of `total` bytes; once where these are 0.
template <class Body>
void for_each_chunk(size_t total, size_t step, Body body) {
  size_t done = 0;
  do {
    const size_t n = std::min(step, total - done);
    body(done, n, done == 0);
    done += n;
  } while (done < total);
}

}  // namespace

void ShmGroup::broadcast(void* data, size_t count, DType dtype, int root) {
  check_root("broadcast", root);
  call(reduction(Op::broadcast, count, dtype, ReduceOp::sum, root), [&] {
    for_each_chunk(count * dtype_bytes(dtype), buffer_bytes_, [&](size_t done, size_t n, bool first) {
      const uint64_t chunk = chunk_++;
      if (rank_ == root) copy(buffer(rank_, chunk), at(data, done), n);
      synchronise();
      if (first) check_descriptors();
      if (rank_ != root) copy(at(data, done), buffer(root, chunk), n);
    });
  });
}

void ShmGroup::reduce(const void* in, void* out, size_t count, DType dtype, ReduceOp op, int root, DType caller_dtype) {
  check_root("reduce", root);
  const ReduceFn fn = kernel(dtype, op);
  const size_t item = dtype_bytes(dtype);
  call(reduction(Op::reduce, count, dtype, op, root, caller_dtype), [&] {
    for_each_chunk(count * item, buffer_bytes_, [&](size_t done, size_t n, bool first) {
      const uint64_t chunk = chunk_++;
      if (rank_ != root) copy(buffer(rank_, chunk), at(in, done), n);
      synchronise();
      if (first) check_descriptors();
      if (rank_ != root) return;
      const void* sources[kMaxRanks];
      for (int r = 0; r < size_; ++r) sources[r] = r == rank_ ? at(in, done) : buffer(r, chunk);
      fn(sources, size_, at(out, done), nullptr, n / item);
    });
  });
}

void ShmGroup::reduce_scatter(const void* const* ins, void* out, size_t count, DType dtype, ReduceOp op,
                              DType caller_dtype) {
  const ReduceFn fn = kernel(dtype, op);
  const size_t item = dtype_bytes(dtype);
  const size_t slot = buffer_bytes_ / size_ / kLine * kLine;
  call(reduction(Op::reduce_scatter, count, dtype, op, 0, caller_dtype), [&] {
    for_each_chunk(count * item, slot, [&](size_t done, size_t n, bool first) {
      const uint64_t chunk = chunk_++;
      for (int r = 0; r < size_; ++r)
        if (r != rank_) copy(buffer(rank_, chunk) + r * slot, at(ins[r], done), n);
      synchronise();
      if (first) check_descriptors();
      const void* sources[kMaxRanks];
      for (int r = 0; r < size_; ++r) sources[r] = r == rank_ ? at(ins[r], done) : buffer(r, chunk) + rank_ * slot;
      fn(sources, size_, at(out, done), nullptr, n / item);
    });
  });
}

void ShmGroup::all_gather(const void* in, void* const* outs, const size_t* counts, DType dtype) {
  const size_t item = dtype_bytes(dtype);
  const size_t most = *std::max_element(counts, counts + size_);
  const bool even = *std::min_element(counts, counts + size_) == most;
  call(reduction(even ? Op::all_gather : Op::all_gather_uneven, even ? most : 0, dtype, ReduceOp::sum), [&] {
    if (!even) std::copy(counts, counts + size_, table(rank_, sequence_ + 1));
    for_each_chunk(most * item, buffer_bytes_, [&](size_t done, size_t, bool first) {
      const auto left = [&](int r) {
        const size_t total = counts[r] * item;
        return total <= done ? 0 : std::min(total - done, buffer_bytes_);
      };
      const uint64_t chunk = chunk_++;
      copy(buffer(rank_, chunk), at(in, done), left(rank_));
      synchronise();
      if (first) {
        check_descriptors();
        if (!even) check_tables(counts);
      }
      for (int r = 0; r < size_; ++r) copy(at(outs[r], done), r == rank_ ? at(in, done) : buffer(r, chunk), left(r));
    });
  });
}

void ShmGroup::check_tables(const size_t* counts) const {
  for (int peer = 0; peer < size_; ++peer) {
    const uint64_t* theirs = table(peer, sequence_);
    for (int r = 0; r < size_; ++r)
      if (theirs[r] != counts[r])
        throw CommError(CommError::Kind::broken, "ranks disagree: in all_gather, rank " + std::to_string(rank_) +
                                                     " expects " + std::to_string(counts[r]) + " elements of rank " +
                                                     std::to_string(r) + ", rank " + std::to_string(peer) +
                                                     " expects " + std::to_string(theirs[r]));
  }
}

void ShmGroup::gather(const void* in, void* const* outs, size_t count, DType dtype, int root) {
  check_root("gather", root);
  call(reduction(Op::gather, count, dtype, ReduceOp::sum, root), [&] {
    for_each_chunk(count * dtype_bytes(dtype), buffer_bytes_, [&](size_t done, size_t n, bool first) {
      const uint64_t chunk = chunk_++;
      if (rank_ != root) copy(buffer(rank_, chunk), at(in, done), n);
      synchronise();
      if (first) check_descriptors();
      if (rank_ != root) return;
      for (int r = 0; r < size_; ++r) copy(at(outs[r], done), r == rank_ ? at(in, done) : buffer(r, chunk), n);
    });
  });
}

void ShmGroup::scatter(const void* const* ins, void* out, size_t count, DType dtype, int root) {
  check_root("scatter", root);
  const size_t slot = buffer_bytes_ / size_ / kLine * kLine;
  call(reduction(Op::scatter, count, dtype, ReduceOp::sum, root), [&] {
    for_each_chunk(count * dtype_bytes(dtype), slot, [&](size_t done, size_t n, bool first) {
      const uint64_t chunk = chunk_++;
      for (int r = 0; rank_ == root && r < size_; ++r)
        if (r != root) copy(buffer(root, chunk) + r * slot, at(ins[r], done), n);
      synchronise();
      if (first) check_descriptors();
      copy(at(out, done), rank_ == root ? at(ins[root], done) : buffer(root, chunk) + rank_ * slot, n);
    });
  });
}

void ShmGroup::all_to_all(const void* const* ins, const size_t* in_counts, void* const* outs, const size_t* out_counts,
                          DType dtype) {
  const size_t item = dtype_bytes(dtype);
  const size_t slot = buffer_bytes_ / size_ / kLine * kLine;
  call(reduction(Op::all_to_all, 0, dtype, ReduceOp::sum), [&] {
    std::copy(in_counts, in_counts + size_, table(rank_, sequence_ + 1));
    size_t most = 0, done = 0;  // the first round finds `most`
    do {
      const auto left = [&](size_t count) { return count * item <= done ? 0 : std::min(count * item - done, slot); };
      const uint64_t chunk = chunk_++;
      for (int r = 0; r < size_; ++r)
        if (r != rank_) copy(buffer(rank_, chunk) + r * slot, at(ins[r], done), left(in_counts[r]));
      synchronise();
      if (done == 0) {
        check_descriptors();
        for (int peer = 0; peer < size_; ++peer) {
          const uint64_t* theirs = table(peer, sequence_);
          if (theirs[rank_] != out_counts[peer])
            throw CommError(CommError::Kind::broken, "ranks disagree: in all_to_all, rank " + std::to_string(peer) +
                                                         " sends " + std::to_string(theirs[rank_]) +
                                                         " elements to rank " + std::to_string(rank_) +
                                                         ", which expects " + std::to_string(out_counts[peer]));
          most = std::max<size_t>(most, *std::max_element(theirs, theirs + size_) * item);
        }
      }
      for (int r = 0; r < size_; ++r)
        copy(at(outs[r], done), r == rank_ ? at(ins[r], done) : buffer(r, chunk) + rank_ * slot, left(out_counts[r]));
      done += slot;
    } while (done < most);
  });
}

void ShmGroup::barrier(double timeout_s) {
  if (size_ == 1) return;
  const CallGuard guard(*this);
  holds_lock_ = false;
  call_timeout_s_ = timeout_s;
  call_locked(Descriptor{}, [&] {
    synchronise();
    check_descriptors();
  });
}

}  // namespace anyaccel::comm
