// SPDX-License-Identifier: Apache-2.0
#include "aio/request.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace anyaccel::aio {
namespace {

int64_t round_down(int64_t value, int64_t unit) { return value - value % unit; }
int64_t round_up(int64_t value, int64_t unit) { return round_down(value + unit - 1, unit); }

// Copies bytes that will not be read soon: non-temporal stores bypass the caches, which need not fetch the old content.
void copy_out(char* to, const char* from, size_t bytes) {
#ifdef __SSE2__
  constexpr size_t kWorthIt = 1 << 16, kLine = 64;
  if (bytes >= kWorthIt) {
    const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
    std::memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    for (; bytes >= kLine; to += kLine, from += kLine, bytes -= kLine) {
      const auto* source = reinterpret_cast<const __m128i*>(from);
      auto* target = reinterpret_cast<__m128i*>(to);
      const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    _mm_sfence();
  }
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace

Request::Request(std::vector<Segment> segments, int64_t block_bytes)
    : segments_(std::move(segments)), block_(block_bytes) {
  if (!segments_.empty()) {
    begin_ = segments_.front().offset;
    end_ = segments_.back().offset + segments_.back().bytes;
  }
}

Failure Request::open(const std::string& path, int descriptor, const FileOptions& options) {
  write_ = options.write;
  if (const Failure failed = file.open(path, descriptor, options, begin_, end_)) return failed;
  fell_back = !options.cached && !file.uses_direct();
  const int64_t unit = file.uses_direct() ? file.alignment() : 1;
  block_ = round_up(block_, unit);
  middle_begin_ = begin_;
  middle_end_ = end_;
  if (write_) {
    middle_begin_ = std::min(end_, round_up(begin_, unit));
    middle_end_ = std::max(middle_begin_, round_down(end_, unit));
  }
  grid_ = round_down(middle_begin_, unit);
  // There is at least one chunk, which may be empty, since the thread that ends the last chunk calls finish().
  chunks_ = std::max<size_t>(1, static_cast<size_t>((middle_end_ - grid_ + block_ - 1) / block_));
  chunks_left.store(chunks_);
  return {};
}

Chunk Request::chunk(size_t index) const {
  const int64_t begin = grid_ + static_cast<int64_t>(index) * block_;
  return {std::max(begin, middle_begin_), std::min(begin + block_, middle_end_)};
}

template <typename Visit>
void Request::visit(const Chunk& chunk, Visit&& each) const {
  auto segment = std::upper_bound(segments_.begin(), segments_.end(), chunk.begin,
                                  [](int64_t at, const Segment& s) { return at < s.offset + s.bytes; });
  for (; segment != segments_.end() && segment->offset < chunk.end; ++segment) {
    const int64_t begin = std::max(chunk.begin, segment->offset);
    const int64_t end = std::min(chunk.end, segment->offset + segment->bytes);
    if (begin < end && !each(segment->address + (begin - segment->offset), begin, end - begin)) return;
  }
}

char* Request::contiguous(const Chunk& chunk) const {
  char* found = nullptr;
  visit(chunk, [&](char* address, int64_t, int64_t bytes) {
    if (bytes == chunk.end - chunk.begin) found = address;
    return false;
  });
  return found;
}

bool Request::wanted(const Chunk& chunk) const {
  bool any = false;
  visit(chunk, [&](char*, int64_t, int64_t) {
    any = true;
    return false;
  });
  return any;
}

void Request::scatter(const Chunk& chunk, const char* bounce, int64_t base) const {
  visit(chunk, [&](char* address, int64_t at, int64_t bytes) {
    copy_out(address, bounce + (at - base), static_cast<size_t>(bytes));
    return true;
  });
}

void Request::gather(const Chunk& chunk, char* bounce, int64_t base) const {
  visit(chunk, [&](char* address, int64_t at, int64_t bytes) {
    copy_out(bounce + (at - base), address, static_cast<size_t>(bytes));
    return true;
  });
}

Failure Request::transfer_buffered(const Chunk& chunk, int64_t from) {
  Failure failed;
  if (write_) file.touch();
  visit({from, chunk.end}, [&](char* address, int64_t at, int64_t bytes) {
    while (bytes > 0) {
      const auto size = static_cast<size_t>(bytes);
      const ssize_t moved =
          write_ ? pwrite(file.buffered(), address, size, at) : pread(file.buffered(), address, size, at);
      if (moved < 0 && errno == EINTR) continue;
      if (moved < 0) {
        failed = {write_ ? Step::write : Step::read, errno, at};
      } else if (moved == 0) {
        failed = write_ ? Failure{Step::write, EIO, at} : Failure{Step::end_of_file, ENODATA, at};
      }
      if (failed) return false;
      address += moved;
      at += moved;
      bytes -= moved;
    }
    return true;
  });
  return failed;
}

void Request::finish() {
  {
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    finishing_ = true;
  }
  if (write_ && !failure)
    for (const Chunk& edge : {Chunk{begin_, middle_begin_}, Chunk{middle_end_, end_}}) {
      failure = transfer_buffered(edge, edge.begin);
      if (failure) break;
      bytes_done.fetch_add(edge.end - edge.begin, std::memory_order_relaxed);
    }
  if (!failure) failure = file.commit();
  if (write_ && failure) leftover = file.abandon();
  fell_back = fell_back || file.refused_direct();
  file.close();
}

void Request::fail(const Failure& why) {
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  if (finishing_) return;
  // Chunks fail in any order, so the failure that is first in the file is the one to report.
  if (!failure || (failure.step == why.step && why.offset < failure.offset)) failure = why;
  stopped_.store(true, std::memory_order_release);
}

void Request::cancel() {
  cancelled_.store(true, std::memory_order_release);
  fail({Step::cancelled, ECANCELED, begin_});
}

}  // namespace anyaccel::aio
