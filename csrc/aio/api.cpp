// SPDX-License-Identifier: Apache-2.0
// The functions that ops/aio/native.py calls. Each that returns int returns 0 or an errno.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <new>
#include <stdexcept>
#include <system_error>

#include "aio/handle.h"

#define ANYACCEL_EXPORT extern "C" __attribute__((visibility("default")))

using namespace anyaccel::aio;

namespace {

struct Status {
  int32_t step;
  int32_t error;
  int64_t offset;
  int32_t leftover;
  int32_t fell_back;
};

template <typename Call>
int guarded(Call&& call) {
  try {
    return call();
  } catch (const std::system_error& error) {
    return error.code().value();
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  } catch (const std::out_of_range&) {
    return ENOENT;
  } catch (const std::exception&) {
    return EINVAL;
  }
}

void report(const Request& request, const Failure& failure, Status* status) {
  *status = {static_cast<int32_t>(failure.step), failure.error, failure.offset, static_cast<int32_t>(request.leftover),
             request.fell_back ? 1 : 0};
}

// Larger blocks gain nothing, and the pool of bounce buffers must hold two.
constexpr int64_t kMaxBlock = 32 << 20;
constexpr int32_t kWrite = 1, kAtomic = 2, kCached = 4;

}  // namespace

ANYACCEL_EXPORT int anyaccel_aio_create(int64_t block_bytes, uint32_t depth, uint32_t threads, int32_t single_submit,
                                        int32_t engine, Handle** handle) {
  return guarded([&] {
    *handle =
        new Handle({std::min(block_bytes, kMaxBlock), depth, threads, single_submit != 0, static_cast<Engine>(engine)});
    return 0;
  });
}

ANYACCEL_EXPORT void anyaccel_aio_destroy(Handle* handle) { delete handle; }

ANYACCEL_EXPORT int32_t anyaccel_aio_engine(Handle* handle) { return static_cast<int32_t>(handle->engine()); }

// With a negative `descriptor`, the file is opened by its path. After an error that concerns the file, `status` has the
// step that failed.
ANYACCEL_EXPORT int anyaccel_aio_submit(Handle* handle, int64_t number, const char* path, int descriptor,
                                        const Segment* segments, size_t count, int32_t flags, Status* status) {
  *status = {};
  return guarded([&] {
    auto request = std::make_unique<Request>(std::vector<Segment>(segments, segments + count), handle->block_bytes());
    const FileOptions options{(flags & kWrite) != 0, (flags & kAtomic) != 0, (flags & kCached) != 0};
    if (const Failure failure = request->open(path, descriptor, options)) {
      report(*request, failure, status);
      return failure.error;
    }
    handle->submit(number, std::move(request));
    return 0;
  });
}

// Returns EAGAIN when the request is not done after `milliseconds`; else fills `status`. May be called again until the
// request is forgotten.
ANYACCEL_EXPORT int anyaccel_aio_wait(Handle* handle, int64_t number, int32_t milliseconds, Status* status) {
  return guarded([&] {
    const auto request = handle->wait(number, std::chrono::milliseconds(milliseconds));
    if (request == nullptr) return EAGAIN;
    report(*request, request->failure, status);
    return 0;
  });
}

// Forgets a request that is done.
ANYACCEL_EXPORT void anyaccel_aio_forget(Handle* handle, int64_t number) { handle->forget(number); }

// Drops the chunks that have not been started. The caller must still wait for the request.
ANYACCEL_EXPORT int anyaccel_aio_cancel(Handle* handle, int64_t number) {
  return guarded([&] {
    handle->find(number)->cancel();
    return 0;
  });
}

// The bytes of a request that have been transferred; -1 for an unknown number.
ANYACCEL_EXPORT int64_t anyaccel_aio_progress(Handle* handle, int64_t number) {
  int64_t bytes = -1;
  (void)guarded([&] {
    bytes = handle->find(number)->bytes_done.load(std::memory_order_relaxed);
    return 0;
  });
  return bytes;
}

// The bytes of the first `size` of an open file that are in the page cache; -1 where the kernel does not say.
ANYACCEL_EXPORT int64_t anyaccel_aio_cached(int descriptor, int64_t size) { return cached_bytes(descriptor, size); }
