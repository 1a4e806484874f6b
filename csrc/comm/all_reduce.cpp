// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "comm/shm_call.h"

namespace anyaccel::comm {
namespace {

// Every rank reduces everything while a rank reads at most so many bytes from its peers in all, and at most so many
// more than where each reduces a part for all: a synchronisation more would cost as much as reading these does.
// tools/model_collectives.py has the model; two ranks read the same number of bytes either way.
constexpr size_t kSmallBytes = 64 << 10, kMoreBytes = 16 << 10;
// Symmetric tensors are reduced and written to all ranks in blocks that fit into the L1 cache.
constexpr size_t kSymmetricBlock = 8 << 10;

}  // namespace

ReduceFn ShmGroup::kernel(DType dtype, ReduceOp op) const {
  const int d = static_cast<int>(dtype), o = static_cast<int>(op);
  if (d < 0 || d >= kDTypes || o < 0 || o >= kReduceOps || kernels_.by[d][o] == nullptr)
    throw std::invalid_argument(std::string("there is no reduction ") + reduce_op_name(op) + " of " +
                                dtype_name(dtype));
  return kernels_.by[d][o];
}

ShmGroup::Descriptor ShmGroup::reduction(Op what, size_t count, DType dtype, ReduceOp op, int root,
                                         DType caller_dtype) const {
  Descriptor d;
  d.count = count;
  d.op = what;
  d.dtype = static_cast<uint8_t>(dtype);
  d.reduce_op = static_cast<uint8_t>(op);
  d.root = static_cast<uint16_t>(root);
  d.caller_dtype = static_cast<uint8_t>(caller_dtype);
  return d;
}

void ShmGroup::all_reduce(void* data, size_t count, DType dtype, ReduceOp op, bool holds_lock, DType caller_dtype) {
  const CallGuard guard(*this);
  holds_lock_ = holds_lock;
  all_reduce_locked(static_cast<char*>(data), count, dtype, op, caller_dtype);
}

bool ShmGroup::try_all_reduce(void* data, size_t count, DType dtype, ReduceOp op) {
  const CallGuard guard(*this, false);
  if (!guard.acquired()) return false;
  holds_lock_ = true;
  all_reduce_locked(static_cast<char*>(data), count, dtype, op, DType::f32);
  return true;
}

void ShmGroup::all_reduce_locked(char* data, size_t count, DType dtype, ReduceOp op, DType caller_dtype) {
  const ReduceFn fn = kernel(dtype, op);
  Descriptor descriptor = reduction(Op::all_reduce, count, dtype, op, 0, caller_dtype);
  const Symmetric* memory = symmetric_.empty() ? nullptr : find_symmetric(data, count * dtype_bytes(dtype));
  if (memory != nullptr) {
    descriptor.symmetric = memory->id;
    descriptor.offset = static_cast<uint64_t>(data - memory->bases[rank_]);
  }
  call_locked(descriptor, [&] {
    if (memory != nullptr) {
      synchronise();
      if (same_placement()) {
        all_reduce_symmetric(*memory, descriptor.offset, count, dtype, fn);
        return;
      }
    } else if (all_reduce_copying(data, count, dtype, fn)) {
      return;
    }
    // Some tensors are not symmetric, or their offsets differ, so all ranks copy.
    current_.symmetric = 0;
    current_.offset = 0;
    all_reduce_copying(data, count, dtype, fn);
  });
}

bool ShmGroup::same_placement() const {
  for (int peer = 0; peer < size_; ++peer) {
    if (control(peer).descriptor[sequence_ & 1] == current_) continue;
    // The placement of the tensors may differ, but everything else must be equal.
    bool same = true;
    for (int other = 0; other < size_; ++other) {
      Descriptor theirs = control(other).descriptor[sequence_ & 1];
      theirs.symmetric = current_.symmetric;
      if (theirs.op == Op::all_reduce) theirs.offset = current_.offset;
      same = same && theirs == current_;
    }
    if (!same) check_descriptors();  // throws
    return false;
  }
  return true;
}

bool ShmGroup::is_small(size_t bytes) const {
  const size_t peers = static_cast<size_t>(size_ - 1);
  const size_t all = bytes * peers, parts = 2 * all / static_cast<size_t>(size_);
  return all <= kSmallBytes && all - std::min(all, parts) <= kMoreBytes && bytes <= buffer_bytes_;
}

bool ShmGroup::all_reduce_copying(char* data, size_t count, DType dtype, ReduceFn fn) {
  return is_small(count * dtype_bytes(dtype)) ? all_reduce_small(data, count, dtype, fn)
                                              : all_reduce_large(data, count, dtype, fn);
}

bool ShmGroup::all_reduce_small(char* data, size_t count, DType dtype, ReduceFn fn) {
  const uint64_t chunk = chunk_;
  std::memcpy(buffer(rank_, chunk), data, count * dtype_bytes(dtype));
  synchronise();
  if (!same_placement()) return false;
  ++chunk_;
  const void* sources[kMaxRanks];
  for (int r = 0; r < size_; ++r) sources[r] = r == rank_ ? data : buffer(r, chunk);
  fn(sources, size_, data, nullptr, count);
  return true;
}

bool ShmGroup::all_reduce_large(char* data, size_t count, DType dtype, ReduceFn fn) {
  const size_t item = dtype_bytes(dtype);
  const size_t total = count * item;
  // Chunks are large, so that a peer's data has been evicted to the shared cache by the time it is read, which is
  // faster than reading it from the peer's own cache.
  const size_t wanted = std::min(round_up(total, kLine * size_), buffer_bytes_);
  const size_t part_bytes = std::max(wanted / size_ / kLine * kLine, kLine);
  const size_t chunk_bytes = part_bytes * size_;
  const size_t n_chunks = (total + chunk_bytes - 1) / chunk_bytes;
  const uint64_t first = chunk_;

  // Calls body(offset in the chunk, bytes) for the part of chunk i that `owner` reduces.
  const auto part = [&](size_t i, int owner, auto body) {
    const size_t length = std::min(chunk_bytes, total - i * chunk_bytes);
    const size_t begin = std::min(part_bytes * owner, length);
    const size_t end = std::min(begin + part_bytes, length);
    if (end > begin) body(begin, end - begin);
  };
  for (size_t i = 0; i < n_chunks + 2; ++i) {
    if (i < n_chunks) {
      char* in = data + i * chunk_bytes;
      char* mine = buffer(rank_, first + i);
      for (int r = 0; r < size_; ++r)
        if (r != rank_) part(i, r, [&](size_t at, size_t n) { std::memcpy(mine + at, in + at, n); });
    }
    if (i >= 1 && i <= n_chunks) {
      const size_t c = i - 1;
      part(c, rank_, [&](size_t at, size_t n) {
        char* own = data + c * chunk_bytes + at;
        const void* sources[kMaxRanks];
        for (int r = 0; r < size_; ++r) sources[r] = r == rank_ ? own : buffer(r, first + c) + at;
        fn(sources, size_, own, buffer(rank_, first + c) + at, n / item);
      });
    }
    if (i >= 2) {
      const size_t c = i - 2;
      char* out = data + c * chunk_bytes;
      for (int r = 0; r < size_; ++r)
        if (r != rank_) part(c, r, [&](size_t at, size_t n) { std::memcpy(out + at, buffer(r, first + c) + at, n); });
    }
    if (i <= n_chunks) synchronise();
    if (i == 0) {
      if (!same_placement()) return false;
      chunk_ += n_chunks;
    }
  }
  return true;
}

void ShmGroup::all_reduce_symmetric(const Symmetric& memory, size_t offset, size_t count, DType dtype, ReduceFn fn) {
  const size_t item = dtype_bytes(dtype);
  const size_t total = count * item;
  const size_t share = round_up((total + size_ - 1) / size_, kLine);
  const size_t begin = std::min(share * rank_, total), end = std::min(begin + share, total);
  for (size_t at = begin; at < end; at += kSymmetricBlock) {
    const size_t n = std::min(kSymmetricBlock, end - at);
    const void* sources[kMaxRanks];
    for (int r = 0; r < size_; ++r) sources[r] = memory.bases[r] + offset + at;
    char* own = memory.bases[rank_] + offset + at;
    const int next = rank_ + 1 < size_ ? rank_ + 1 : 0;
    fn(sources, size_, own, next == rank_ ? nullptr : memory.bases[next] + offset + at, n / item);
    for (int r = 0; r < size_; ++r)
      if (r != rank_ && r != next) std::memcpy(memory.bases[r] + offset + at, own, n);
  }
  synchronise();
}

void ShmGroup::all_reduce_add_rms_norm(void* partial, void* residual, const void* weight, float eps, size_t rows,
                                       size_t width, DType dtype, bool holds_lock) {
  const size_t count = rows * width;
  const ReduceFn fn = kernel(dtype, ReduceOp::sum);
  if (static_cast<int>(dtype) > static_cast<int>(DType::f16))
    throw std::invalid_argument(std::string("all_reduce_add_rms_norm of ") + dtype_name(dtype) +
                                "; it takes float32, bfloat16 and float16");
  const AddRmsNormFn norm = kernels_.add_rms_norm[static_cast<int>(dtype)];
  Descriptor descriptor = reduction(Op::all_reduce_add_rms_norm, count, dtype, ReduceOp::sum);
  descriptor.offset = width;
  const CallGuard guard(*this);
  holds_lock_ = holds_lock;
  call_locked(descriptor, [&] {
    const size_t bytes = count * dtype_bytes(dtype);
    char* data = static_cast<char*>(partial);
    const void* sources[kMaxRanks];
    if (is_small(bytes)) {
      const uint64_t chunk = chunk_++;
      std::memcpy(buffer(rank_, chunk), data, bytes);
      synchronise();
      check_descriptors();
      for (int r = 0; r < size_; ++r) sources[r] = r == rank_ ? data : buffer(r, chunk);
      norm(sources, size_, residual, weight, eps, data, rows, width);
    } else {
      all_reduce_large(data, count, dtype, fn);
      sources[0] = data;
      norm(sources, 1, residual, weight, eps, data, rows, width);
    }
  });
}

void ShmGroup::add_symmetric(uint16_t id, const std::vector<char*>& bases, size_t bytes) {
  if (id == 0 || bases.size() != static_cast<size_t>(size_))
    throw std::invalid_argument("symmetric memory needs a number above 0 and one address a rank");
  const CallGuard guard(*this);
  symmetric_.push_back({id, bytes, bases});
}

void ShmGroup::remove_symmetric(uint16_t id) {
  // This does not lock call_mutex_, since a garbage collection may call it within a call that holds it.
  const std::lock_guard<std::mutex> lock(retired_mutex_);
  retired_.push_back(id);
  any_retired_.store(true, std::memory_order_release);
}

const ShmGroup::Symmetric* ShmGroup::find_symmetric(const void* data, size_t bytes) {
  if (any_retired_.load(std::memory_order_acquire)) {
    const std::lock_guard<std::mutex> lock(retired_mutex_);
    for (uint16_t id : retired_) std::erase_if(symmetric_, [id](const Symmetric& memory) { return memory.id == id; });
    retired_.clear();
    any_retired_.store(false, std::memory_order_release);
  }
  for (const Symmetric& memory : symmetric_) {
    const char* base = memory.bases[rank_];
    const char* at = static_cast<const char*>(data);
    if (at >= base && at + bytes <= base + memory.bytes) return &memory;
  }
  return nullptr;
}

}  // namespace anyaccel::comm
