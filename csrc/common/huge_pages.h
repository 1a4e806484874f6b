// SPDX-License-Identifier: Apache-2.0
// Memory for what is large and stays: aligned to huge pages, in huge pages where the system has them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace anyaccel {

constexpr size_t kHugePage = size_t{2} << 20;

// `bytes` (a multiple of the system's page size) of zeros, to be given back by munmap(); null when the system has none.
// One huge page more is mapped, so that the start can be moved to a huge page's; the rest is given back.
inline uint8_t* map_huge_pages(size_t bytes, int flags = 0) {
  void* memory = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto* first = static_cast<uint8_t*>(memory);
  const size_t skip = (kHugePage - reinterpret_cast<uintptr_t>(first) % kHugePage) % kHugePage;
  if (skip != 0) munmap(first, skip);
  munmap(first + skip + bytes, kHugePage - skip);
  madvise(first + skip, bytes, MADV_HUGEPAGE);
  return first + skip;
}

}  // namespace anyaccel
