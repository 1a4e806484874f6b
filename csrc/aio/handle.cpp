// SPDX-License-Identifier: Apache-2.0
#include "aio/handle.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <system_error>

#include "common/huge_pages.h"

namespace anyaccel::aio {
namespace {

constexpr size_t kLargestPage = 64 << 10;  // the largest page size of any kernel
// This holds a full queue of 1 MiB blocks. More would be evicted from the caches between the device's write and our
// copy.
constexpr int64_t kBounceBytes = 32 << 20;
// A synchronous queue has a depth of one, so up to this many threads stand in for a deeper queue.
constexpr unsigned kSynchronousThreads = 8;

// Page-aligned bounce buffers for transfers whose memory is not aligned. They are in huge pages where there are any, so
// that the device sees each block as one contiguous piece.
class BouncePool {
 public:
  ~BouncePool() {
    if (memory_ != nullptr) munmap(memory_, mapped_);
  }

  // Returns a free block, or null when there is none. The first call allocates the pool, and may throw std::bad_alloc.
  char* take(Queue& queue, int64_t block, unsigned depth) {
    if (memory_ == nullptr) allocate(queue, block, depth);
    if (free_.empty()) return nullptr;
    char* found = free_.back();
    free_.pop_back();
    return found;
  }

  void give_back(char* block) { free_.push_back(block); }

 private:
  void allocate(Queue& queue, int64_t block, unsigned depth) {
    block += (kMaxAlignment - block % kMaxAlignment) % kMaxAlignment;
    const auto count = std::clamp<int64_t>(kBounceBytes / block, 2, depth + 1);
    const size_t bytes = static_cast<size_t>(count * block);
    mapped_ = (bytes + kLargestPage - 1) / kLargestPage * kLargestPage;
    memory_ = reinterpret_cast<char*>(map_huge_pages(mapped_));
    if (memory_ == nullptr) throw std::bad_alloc();
    queue.pin(memory_, bytes);
    for (int64_t i = count; i-- > 0;) free_.push_back(memory_ + i * block);
  }

  char* memory_ = nullptr;
  size_t mapped_ = 0;
  std::vector<char*> free_;
};

}  // namespace

// Runs the transfers of one thread.
class Handle::Worker {
 public:
  Worker(Handle& handle, std::unique_ptr<Queue> queue, unsigned depth)
      : handle_(handle), queue_(std::move(queue)), slots_(depth) {
    for (unsigned i = depth; i-- > 0;) free_.push_back(i);
  }

  void run() {
    while (fill()) {
      queue_->submit();
      done_.clear();
      queue_->reap(done_);
      for (const Completion& completion : done_) {
        complete(completion);
        // New transfers start before the next copy, so that the device is not idle during it.
        if (done_.size() > 1 && fill()) queue_->submit();
      }
    }
  }

 private:
  struct Slot {
    std::shared_ptr<Request> request;
    Chunk chunk{};
    int64_t from = 0;  // everything before it has been transferred
    int64_t base = 0;  // the offset in the file that `address` corresponds to
    char* address = nullptr;
    char* bounce = nullptr;
  };

  bool busy() const { return free_.size() < slots_.size(); }

  // Starts transfers until the queue is full or there is no chunk. Returns false when the handle is being destroyed and
  // nothing is in flight.
  bool fill() {
    while (!free_.empty()) {
      if (!held_request_) {
        held_request_ = handle_.take(!busy(), held_chunk_);
        if (!held_request_) return busy();
      }
      if (!begin(held_request_, held_request_->chunk(held_chunk_)))
        break;  // no bounce block is free, so the chunk is held until the next completion
      held_request_.reset();
    }
    return true;
  }

  // Returns false when the chunk needs a bounce block and none is free.
  bool begin(const std::shared_ptr<Request>& request, const Chunk& chunk) {
    if (request->stopped() || !request->wanted(chunk)) {
      handle_.finish_chunk(request, 0);
      return true;
    }
    File& file = request->file;
    if (!file.uses_direct()) {
      if (const Failure failed = request->transfer_buffered(chunk, chunk.begin)) request->fail(failed);
      handle_.finish_chunk(request, chunk.end - chunk.begin);
      return true;
    }
    const int64_t unit = file.alignment();
    Slot slot{request, chunk, chunk.begin, chunk.begin - chunk.begin % unit, nullptr, nullptr};
    slot.address = request->contiguous(chunk);
    const bool aligned =
        slot.address != nullptr && slot.base == chunk.begin && chunk.end % unit == 0 &&
        reinterpret_cast<uintptr_t>(slot.address) % static_cast<uintptr_t>(file.memory_alignment()) == 0;
    if (!aligned) {
      try {
        slot.bounce = bounce_.take(*queue_, handle_.block_bytes(), static_cast<unsigned>(slots_.size()));
      } catch (const std::bad_alloc&) {
        request->fail({request->write() ? Step::write : Step::read, ENOMEM, chunk.begin});
        handle_.finish_chunk(request, 0);
        return true;
      }
      if (slot.bounce == nullptr) return false;
      slot.address = slot.bounce;
      if (request->write()) request->gather(chunk, slot.bounce, slot.base);
    }
    const unsigned index = free_.back();
    free_.pop_back();
    slots_[index] = slot;
    if (request->write()) file.touch();
    start(index);
    // The transfer is submitted now, so that the device works while the next block is copied.
    if (slot.bounce != nullptr && request->write()) queue_->submit();
    return true;
  }

  void start(unsigned index) {
    const Slot& slot = slots_[index];
    const int64_t unit = slot.request->file.alignment();
    const int64_t from = slot.from - slot.from % unit;
    const int64_t end = slot.chunk.end + (unit - slot.chunk.end % unit) % unit;
    queue_->add(index, {slot.request->file.direct(), slot.request->write(), slot.address + (from - slot.base),
                        static_cast<uint32_t>(end - from), from});
    if (handle_.config_.single_submit) queue_->submit();
  }

  void complete(const Completion& completion) {
    Slot& slot = slots_[completion.slot];
    Request& request = *slot.request;
    const int64_t unit = request.file.alignment();
    if (completion.result == -EAGAIN || completion.result == -EINTR) {
      if (!request.cancelled()) return start(completion.slot);
    } else if (completion.result == -EINVAL || completion.result == -EOPNOTSUPP) {
      request.file.refuse_direct();
      return finish_buffered(completion.slot);
    } else if (completion.result < 0) {
      request.fail({request.write() ? Step::write : Step::read, static_cast<int>(-completion.result), slot.from});
    } else {
      const int64_t reached = slot.from - slot.from % unit + completion.result;
      if (reached < slot.chunk.end && !request.cancelled()) {
        const bool can_resume = reached > slot.from && reached % unit == 0;
        slot.from = std::max(slot.from, reached);
        // A transfer that ends within a block has met the end of the file. That may have moved since, so the rest goes
        // through the page cache.
        return can_resume ? start(completion.slot) : finish_buffered(completion.slot);
      }
      if (slot.bounce != nullptr && !request.write()) request.scatter(slot.chunk, slot.bounce, slot.base);
    }
    release(completion.slot, request.stopped() ? 0 : slot.chunk.end - slot.chunk.begin);
  }

  void finish_buffered(unsigned index) {
    Slot& slot = slots_[index];
    Request& request = *slot.request;
    if (slot.bounce != nullptr && !request.write())
      request.scatter({slot.chunk.begin, slot.from}, slot.bounce, slot.base);
    if (!request.cancelled())
      if (const Failure failed = request.transfer_buffered(slot.chunk, slot.from)) request.fail(failed);
    release(index, slot.chunk.end - slot.chunk.begin);
  }

  void release(unsigned index, int64_t bytes) {
    Slot slot = std::move(slots_[index]);
    slots_[index] = {};
    if (slot.bounce != nullptr) bounce_.give_back(slot.bounce);
    free_.push_back(index);
    handle_.finish_chunk(slot.request, bytes);
  }

  Handle& handle_;
  std::unique_ptr<Queue> queue_;
  BouncePool bounce_;
  std::vector<Slot> slots_;
  std::vector<unsigned> free_;
  std::vector<Completion> done_;
  std::shared_ptr<Request> held_request_;
  size_t held_chunk_ = 0;
};

Handle::Handle(const Config& config) : config_(config), engine_(config.engine) { make_queues(); }

void Handle::make_queues() {
  struct Choice {
    Engine engine;
    std::unique_ptr<Queue> (*make)(unsigned depth);
  };
  for (const Choice& choice : {Choice{Engine::io_uring, make_io_uring}, Choice{Engine::linux_aio, make_linux_aio}}) {
    if (config_.engine != Engine::automatic && config_.engine != choice.engine) continue;
    try {
      queues_.clear();
      for (unsigned i = 0; i < config_.threads; ++i) queues_.push_back(choice.make(config_.depth));
      engine_ = choice.engine;
      return;
    } catch (const std::system_error&) {
      if (config_.engine != Engine::automatic) throw;
    }
  }
  queues_.clear();
  engine_ = Engine::threads;
  const unsigned threads = config_.threads * std::min(config_.depth, kSynchronousThreads);
  for (unsigned i = 0; i < threads; ++i) queues_.push_back(make_synchronous());
}

Handle::~Handle() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    for (const auto& [number, request] : requests_)
      if (!request->done) request->cancel();
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Handle::submit(int64_t number, std::unique_ptr<Request> request) {
  std::shared_ptr<Request> shared = std::move(request);
  const std::lock_guard<std::mutex> lock(mutex_);
  requests_.emplace(number, shared);
  waiting_.push_back(std::move(shared));
  if (threads_.empty()) {
    // The threads inherit this mask, so that signals are delivered to the threads of the program only.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const unsigned depth = engine_ == Engine::threads ? 1 : config_.depth;
    try {
      for (std::unique_ptr<Queue>& queue : queues_)
        threads_.emplace_back(
            [this, depth, mine = std::move(queue)]() mutable { Worker(*this, std::move(mine), depth).run(); });
    } catch (const std::system_error&) {
      if (threads_.empty()) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        waiting_.back()->file.abandon();
        waiting_.pop_back();
        requests_.erase(number);
        throw;
      }
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  work_.notify_all();
}

std::shared_ptr<Request> Handle::take(bool block, size_t& chunk) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (block) work_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
  if (waiting_.empty()) return nullptr;
  std::shared_ptr<Request> request = waiting_.front();
  chunk = request->next_chunk++;
  if (request->next_chunk == request->chunks()) waiting_.pop_front();
  return request;
}

void Handle::finish_chunk(const std::shared_ptr<Request>& request, int64_t bytes) {
  request->bytes_done.fetch_add(bytes, std::memory_order_relaxed);
  if (request->chunks_left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  request->finish();
  const std::lock_guard<std::mutex> lock(mutex_);
  request->done = true;
  done_.notify_all();
}

std::shared_ptr<Request> Handle::wait(int64_t number, std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  const std::shared_ptr<Request> request = requests_.at(number);
  return done_.wait_for(lock, timeout, [&] { return request->done; }) ? request : nullptr;
}

std::shared_ptr<Request> Handle::find(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return requests_.at(number);
}

void Handle::forget(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = requests_.find(number);
  if (found != requests_.end() && found->second->done) requests_.erase(found);
}

}  // namespace anyaccel::aio
