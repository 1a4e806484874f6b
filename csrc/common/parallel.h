// SPDX-License-Identifier: Apache-2.0
// A loop over chunks on several threads: those of torch's OpenMP team, where torch is loaded, so that its waiting
// threads and ours do not fight for the same cores; else threads of our own.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace anyaccel {

// Must not throw.
using ChunkFn = void (*)(void* context, int64_t chunk);

// Calls fn(context, chunk) once for every chunk in 0 .. chunks-1, on up to `threads` threads, the caller's among them;
// returns when all calls have returned. Each thread starts with a range of its own, the same in each call with the same
// numbers, so that what it left in its caches is found again; who has finished takes chunks of the others.
// May be called from any thread, from several at once, from within a chunk, and in a child after fork().
void parallel_for_chunks(int64_t chunks, int threads, ChunkFn fn, void* context) noexcept;

// The same for a callable `fn(int64_t chunk)`.
template <class Fn>
void parallel_for(int64_t chunks, int threads, Fn&& fn) {
  using Callable = std::remove_reference_t<Fn>;
  parallel_for_chunks(
      chunks, threads, [](void* context, int64_t chunk) { (*static_cast<Callable*>(context))(chunk); },
      const_cast<void*>(static_cast<const void*>(std::addressof(fn))));
}

// Whose threads the last loop of this process ran on: "caller", "openmp" or "own". For tests and reports.
const char* parallel_team() noexcept;

}  // namespace anyaccel
