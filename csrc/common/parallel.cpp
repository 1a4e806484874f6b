// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#ifdef __linux__
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>

#include <cstring>
#endif

namespace anyaccel {
namespace {

constexpr int kMaxThreads = 256;

std::atomic<const char*> last_team{"caller"};

struct alignas(64) Range {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

// One loop. Lives on the caller's stack: nobody may touch it once all members have left.
class Loop {
 public:
  Loop(int64_t chunks, int members, ChunkFn fn, void* context, Range* ranges)
      : members_(members), fn_(fn), context_(context), ranges_(ranges) {
    for (int m = 0; m < members; ++m) {
      ranges_[m].next.store(chunks * m / members, std::memory_order_relaxed);
      ranges_[m].end = chunks * (m + 1) / members;
    }
  }

  // The work of one member: its own range, then what is left of the others'. One member alone would do it all.
  void run(int member) {
    for (int offset = 0; offset < members_; ++offset) {
      Range& range = ranges_[(member + offset) % members_];
      while (range.next.load(std::memory_order_relaxed) < range.end) {
        const int64_t chunk = range.next.fetch_add(1, std::memory_order_relaxed);
        if (chunk >= range.end) break;
        fn_(context_, chunk);
      }
    }
  }

 private:
  int members_;
  ChunkFn fn_;
  void* context_;
  Range* ranges_;
};

// --- threads of our own

// One loop at a time; who finds the pool busy does the work alone.
class Pool {
 public:
  bool run(Loop& loop, int members) {
    std::unique_lock<std::mutex> busy(busy_, std::try_to_lock);
    if (!busy.owns_lock()) return false;
    if (!grow(members - 1)) return false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      loop_ = &loop;
      wanted_ = members - 1;
      running_ = members - 1;
      ++generation_;
    }
    wake_.notify_all();
    loop.run(0);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return running_ == 0; });
    loop_ = nullptr;
    return true;
  }

  int size() const { return size_.load(std::memory_order_relaxed); }

 private:
  bool grow(int size) {
    while (size_.load(std::memory_order_relaxed) < size) {
      const int member = size_.load(std::memory_order_relaxed) + 1;
#ifdef __linux__
      // Signals are for the threads that the program knows.
      sigset_t all, before;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
      bool started = true;
      try {
        std::thread([this, member, seen = generation_] { serve(member, seen); }).detach();
      } catch (...) {
        started = false;
      }
#ifdef __linux__
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
      if (!started) return false;
      size_.fetch_add(1, std::memory_order_relaxed);
    }
    return true;
  }

  void serve(int member, uint64_t seen) {
    for (;;) {
      Loop* loop = nullptr;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_ != seen; });
        seen = generation_;
        if (member > wanted_) continue;
        loop = loop_;
      }
      loop->run(member);
      const std::lock_guard<std::mutex> lock(mutex_);
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex busy_, mutex_;
  std::condition_variable wake_, done_;
  Loop* loop_ = nullptr;
  int wanted_ = 0, running_ = 0;
  uint64_t generation_ = 0;
  std::atomic<int> size_{0};
};

// Never deleted: its threads wait in it until the process ends. A child after fork() has none of them, so it starts
// with another one.
std::atomic<Pool*> the_pool{nullptr};

Pool& pool() {
  Pool* found = the_pool.load(std::memory_order_acquire);
  if (found == nullptr) {
    Pool* fresh = new Pool;
    if (the_pool.compare_exchange_strong(found, fresh)) return *fresh;
    delete fresh;
  }
  return *found;
}

// --- torch's threads

#ifdef __linux__

using GompParallel = void (*)(void (*fn)(void*), void* data, unsigned threads, unsigned flags);
using GompMember = int (*)();

std::atomic<bool> forked{false};

struct OpenMp {
  GompParallel parallel = nullptr;
  GompMember member = nullptr;
};

bool take_from(void* handle, OpenMp& found) {
  found.parallel = reinterpret_cast<GompParallel>(dlsym(handle, "GOMP_parallel"));
  found.member = reinterpret_cast<GompMember>(dlsym(handle, "omp_get_thread_num"));
  return found.parallel != nullptr && found.member != nullptr;
}

// Asked of libtorch_cpu, the name is looked up among the libraries that it was linked with: of several OpenMP runtimes
// in the process this is the one that torch's loops use, be it GCC's, LLVM's or Intel's (all have GCC's entry point).
int look(dl_phdr_info* info, size_t, void* data) {
  if (info->dlpi_name == nullptr || std::strstr(info->dlpi_name, "libtorch_cpu.so") == nullptr) return 0;
  void* handle = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return 0;
  const bool done = take_from(handle, *static_cast<OpenMp*>(data));
  dlclose(handle);
  return done ? 1 : 0;
}

int tasks() {
  struct stat status;
  return stat("/proc/self/task", &status) == 0 ? static_cast<int>(status.st_nlink) - 2 : 0;
}

// The team of a parent does not live in its child, and GCC's runtime would wait for it for ever.
// fork() before this library was loaded goes unseen, but leaves a process with one thread: there is no team then, or
// none yet.
const OpenMp* openmp() {
  static std::atomic<const OpenMp*> adopted{nullptr};
  static std::atomic<bool> absent{false};
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    forked.store(true, std::memory_order_relaxed);
    the_pool.store(nullptr, std::memory_order_relaxed);
  });
  (void)registered;
  if (forked.load(std::memory_order_relaxed) || absent.load(std::memory_order_relaxed)) return nullptr;
  if (const OpenMp* found = adopted.load(std::memory_order_acquire)) return found;
  const Pool* own = the_pool.load(std::memory_order_acquire);
  if (tasks() - (own == nullptr ? 0 : own->size()) <= 1) return nullptr;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  static OpenMp symbols;
  if (adopted.load(std::memory_order_relaxed) != nullptr) return &symbols;
  // Symbols that are visible to the whole process, such as by LD_PRELOAD, come first, as they do for torch itself.
  if (!take_from(RTLD_DEFAULT, symbols) && dl_iterate_phdr(look, &symbols) == 0) {
    absent.store(true, std::memory_order_relaxed);
    return nullptr;
  }
  adopted.store(&symbols, std::memory_order_release);
  return &symbols;
}

struct Team {
  Loop* loop;
  GompMember member;
};

void run_member(void* data) {
  const Team& team = *static_cast<const Team*>(data);
  team.loop->run(team.member());
}

bool run_on_openmp(Loop& loop, int members) {
  const OpenMp* found = openmp();
  if (found == nullptr) return false;
  Team team{&loop, found->member};
  // Fewer may come, within a parallel region for one.
  found->parallel(run_member, &team, static_cast<unsigned>(members), 0);
  return true;
}

#else

bool run_on_openmp(Loop&, int) { return false; }

#endif

}  // namespace

void parallel_for_chunks(int64_t chunks, int threads, ChunkFn fn, void* context) noexcept {
  const int members = static_cast<int>(std::min<int64_t>(std::clamp(threads, 1, kMaxThreads), chunks));
  if (members <= 1) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) fn(context, chunk);
    last_team.store("caller", std::memory_order_relaxed);
    return;
  }
  constexpr int kFew = 16;
  Range few[kFew];
  std::unique_ptr<Range[]> many(members > kFew ? new Range[members] : nullptr);
  Loop loop(chunks, members, fn, context, many ? many.get() : few);
  const char* team = "openmp";
  if (!run_on_openmp(loop, members)) {
    team = "own";
    if (!pool().run(loop, members)) {
      team = "caller";
      loop.run(0);
    }
  }
  last_team.store(team, std::memory_order_relaxed);
}

const char* parallel_team() noexcept { return last_team.load(std::memory_order_relaxed); }

}  // namespace anyaccel
