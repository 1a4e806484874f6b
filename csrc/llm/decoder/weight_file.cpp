// SPDX-License-Identifier: Apache-2.0
#include "llm/decoder/weight_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <numeric>
#include <system_error>
#include <thread>
#include <vector>

#include "common/chunks.h"
#include "common/huge_pages.h"

namespace anyaccel::llm {
namespace {

constexpr size_t kChunk = size_t{512} << 10;     // stays in a core's own cache between reading and hashing
constexpr size_t kReadAhead = size_t{16} << 20;  // what the disk is asked for at a time, before it is hashed
constexpr uint64_t kPrime = 0x9E3779B185EBCA87ULL;
constexpr uint64_t kSecondPrime = 0xC2B2AE3D27D4EB4FULL;
constexpr int kLanes = 8;

// One step for one word: a bijection of `state` for each word and of `word` for each state, so that one changed word
// always changes the result.
uint64_t mix(uint64_t state, uint64_t word) { return std::rotl(state ^ word, 31) * kPrime; }

uint64_t finish(uint64_t value) {
  value = (value ^ (value >> 33)) * kSecondPrime;
  value = (value ^ (value >> 29)) * kPrime;
  return value ^ (value >> 32);
}

uint64_t chunk_checksum(const uint8_t* data, size_t bytes) {
  uint64_t lanes[kLanes];  // independent, so that their multiplications overlap
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = kSecondPrime * static_cast<uint64_t>(lane + 1);
  size_t at = 0;
  for (; at + sizeof lanes <= bytes; at += sizeof lanes) {
    uint64_t words[kLanes];
    std::memcpy(words, data + at, sizeof words);
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = mix(lanes[lane], words[lane]);
  }
  uint64_t state = bytes;
  for (uint64_t lane : lanes) state = mix(state, finish(lane));
  for (; at < bytes; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, data + at, std::min(sizeof word, bytes - at));
    state = mix(state, word);
  }
  return finish(state);
}

// Whether a file's pages stay what they are while it is mapped, also when it is removed: where other hosts may remove
// it, a page that is read again ends the process.
bool is_local(int fd) {
  constexpr uint32_t kLocal[] = {0xef53 /* ext4 */,
                                 0x58465342 /* xfs */,
                                 0x9123683e /* btrfs */,
                                 0x01021994 /* tmpfs */,
                                 0x794c7630 /* overlay */,
                                 0xf2f52010 /* f2fs */,
                                 0x2fc12fc1 /* zfs */};
  struct statfs system;
  if (fstatfs(fd, &system) != 0) return false;
  return std::find(std::begin(kLocal), std::end(kLocal), static_cast<uint32_t>(system.f_type)) != std::end(kLocal);
}

// Whether the pages of a mapped file lie on the nodes that this process takes its memory from. Those that another
// process has read first lie where that one is: a copy then costs memory, and each step reads it from near.
bool is_near(uint8_t* data, size_t bytes) {
#if defined(SYS_get_mempolicy) && defined(SYS_move_pages)
  constexpr int kPreferred = 1, kBind = 2, kPreferredMany = 5, kMode = 0xff;
  constexpr size_t kPages = 256, kNodes = 1024, kWord = 8 * sizeof(unsigned long);
  int mode = 0;
  unsigned long nodes[kNodes / kWord] = {};
  if (syscall(SYS_get_mempolicy, &mode, nodes, kNodes, nullptr, 0) != 0) return true;
  mode &= kMode;
  if (mode != kPreferred && mode != kBind && mode != kPreferredMany) return true;
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t step = std::max(bytes / page_bytes / kPages, size_t{1}) * page_bytes;
  std::vector<void*> pages;
  for (size_t at = 0; at < bytes; at += step) {
    unsigned char resident = 0;
    if (mincore(data + at, 1, &resident) != 0 || (resident & 1) == 0) continue;  // it will be read to our own node
    [[maybe_unused]] const uint8_t touched = *static_cast<volatile uint8_t*>(data + at);
    pages.push_back(data + at);
  }
  std::vector<int> where(pages.size());
  if (pages.empty() || syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, where.data(), 0) != 0)
    return true;
  const auto is_far = [&](int node) {
    const auto bit = static_cast<size_t>(node);
    return node >= 0 && bit < kNodes && (nodes[bit / kWord] >> bit % kWord & 1) == 0;
  };
  return static_cast<size_t>(std::count_if(where.begin(), where.end(), is_far)) * 100 <= pages.size();
#else
  (void)data, (void)bytes;
  return true;
#endif
}

void read_all(int fd, int64_t offset, uint8_t* to, size_t bytes) {
  while (bytes > 0) {
    const ssize_t got = pread(fd, to, bytes, offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw std::system_error(errno, std::generic_category(), "pread");
    if (got == 0) throw std::system_error(EIO, std::generic_category(), "pread: the file ends too early");
    to += got;
    offset += got;
    bytes -= static_cast<size_t>(got);
  }
}

void write_all(int fd, int64_t offset, const uint8_t* from, size_t bytes) {
  while (bytes > 0) {
    const ssize_t put = pwrite(fd, from, bytes, offset);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) throw std::system_error(errno, std::generic_category(), "pwrite");
    from += put;
    offset += put;
    bytes -= static_cast<size_t>(put);
  }
}

// Calls work(begin, length) for every chunk, none of which is of two pieces, and combines what it returns of each
// piece, in the order of the chunks.
template <class Work>
std::vector<uint64_t> in_chunks(const std::vector<size_t>& pieces, int threads, const FileProgress& progress,
                                Work work) {
  struct Chunk {
    size_t begin, length;
  };
  std::vector<Chunk> chunks;
  size_t bytes = 0;
  for (const size_t piece : pieces) {
    for (size_t at = 0; at < piece; at += kChunk) chunks.push_back({bytes + at, std::min(kChunk, piece - at)});
    bytes += piece;
  }
  std::vector<uint64_t> sums(chunks.size());
  std::atomic<size_t> done{0};
  const auto caller = std::this_thread::get_id();
  for_each_chunk(chunks.size(), threads, [&](size_t i) {
    const auto [begin, length] = chunks[i];
    sums[i] = work(begin, length);
    const size_t so_far = done.fetch_add(length) + length;
    // The end is told below, once.
    if (progress && so_far < bytes && std::this_thread::get_id() == caller) progress(so_far);
  });
  if (progress) progress(bytes);
  std::vector<uint64_t> found;
  size_t next = 0;
  for (const size_t piece : pieces) {
    uint64_t state = piece;
    for (size_t at = 0; at < piece; at += kChunk) state = mix(state, sums[next++]);
    found.push_back(finish(state));
  }
  return found;
}

size_t sum_of(const std::vector<size_t>& pieces) { return std::accumulate(pieces.begin(), pieces.end(), size_t{0}); }

}  // namespace

std::vector<uint64_t> write_weights(int fd, int64_t offset, const void* data, const std::vector<size_t>& pieces,
                                    int threads, const FileProgress& progress) {
  const auto* from = static_cast<const uint8_t*>(data);
  return in_chunks(pieces, threads, progress, [&](size_t begin, size_t length) {
    const uint64_t sum = chunk_checksum(from + begin, length);
    write_all(fd, offset + static_cast<int64_t>(begin), from + begin, length);
    return sum;
  });
}

std::vector<uint64_t> read_weights(int fd, int64_t offset, void* data, const std::vector<size_t>& pieces, int threads,
                                   const FileProgress& progress) {
  auto* to = static_cast<uint8_t*>(data);
  return in_chunks(pieces, threads, progress, [&](size_t begin, size_t length) {
    read_all(fd, offset + static_cast<int64_t>(begin), to + begin, length);
    return chunk_checksum(to + begin, length);
  });
}

std::vector<uint64_t> map_weights(int fd, int64_t offset, void* data, const std::vector<size_t>& pieces, int threads,
                                  const FileProgress& progress) {
  const size_t bytes = sum_of(pieces);
  struct stat status;
  if (fstat(fd, &status) != 0) throw std::system_error(errno, std::generic_category(), "fstat");
  if (offset < 0 || status.st_size < offset || static_cast<uint64_t>(status.st_size - offset) < bytes)
    throw std::system_error(EIO, std::generic_category(), "mmap: the file ends too early");
  // Less than a huge page is on the heap (allocate_weights()), among other things.
  void* pages = MAP_FAILED;
  if (bytes >= kHugePage && is_local(fd))
    pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, offset);
  if (pages != MAP_FAILED && !is_near(static_cast<uint8_t*>(pages), bytes)) {
    munmap(pages, bytes);
    pages = MAP_FAILED;
  }
  if (pages == MAP_FAILED) return read_weights(fd, offset, data, pieces, threads, progress);
  // Mapped elsewhere first: a mapping that fails in the place of `data` would leave no memory there.
  if (mremap(pages, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, data) == MAP_FAILED) {
    const int error = errno;
    munmap(pages, bytes);
    throw std::system_error(error, std::generic_category(), "mremap");
  }
  const auto* from = static_cast<const uint8_t*>(data);
  return in_chunks(pieces, threads, progress, [&](size_t begin, size_t length) {
#ifdef POSIX_FADV_WILLNEED
    if (begin == 0 || begin / kReadAhead != (begin + length) / kReadAhead)
      posix_fadvise(fd, offset + static_cast<int64_t>(begin), 2 * kReadAhead, POSIX_FADV_WILLNEED);
#endif
#ifdef MADV_POPULATE_READ
    // All pages at once, where the system can; else each line that is hashed brings its own.
    madvise(static_cast<uint8_t*>(data) + begin, length, MADV_POPULATE_READ);
#endif
    return chunk_checksum(from + begin, length);
  });
}

uint64_t weights_checksum(const void* data, size_t bytes) {
  const auto* from = static_cast<const uint8_t*>(data);
  return in_chunks({bytes}, 1, {}, [&](size_t begin, size_t length) { return chunk_checksum(from + begin, length); })
      .front();
}

}  // namespace anyaccel::llm
