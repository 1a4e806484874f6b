// SPDX-License-Identifier: Apache-2.0
#include "common/waiting.h"

#include <sys/resource.h>

#include <algorithm>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace anyaccel {
namespace {

// On a core of its own a thread is interrupted a few times a second, beside another one that computes a hundred times.
constexpr int64_t kWindowNs = 50'000'000;
constexpr int64_t kSwitches = 3;            // in a window
constexpr int64_t kSharedNs = 500'000'000;  // how long a core counts as shared after that was seen

#ifdef RUSAGE_THREAD
int64_t involuntary_switches() noexcept {
  rusage usage{};
  return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_nivcsw : 0;
}
#else
int64_t involuntary_switches() noexcept { return 0; }
#endif

struct Seen {
  int64_t since = 0;  // of the count
  int64_t switches = 0;
  int64_t shared_until = 0;
};

}  // namespace

bool core_is_shared(int64_t now) noexcept {
  thread_local Seen seen;
  if (now - seen.since > kWindowNs) {
    const int64_t switches = involuntary_switches();
    if (seen.since != 0 && (switches - seen.switches) * kWindowNs >= kSwitches * (now - seen.since))
      seen.shared_until = now + kSharedNs;
    seen = {now, switches, seen.shared_until};
  }
  return now < seen.shared_until;
}

#ifdef __linux__
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

void sleep_while(const std::atomic<uint32_t>& word, uint32_t value, int64_t ns) noexcept {
  const timespec length{ns / 1'000'000'000, ns % 1'000'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &length, nullptr, 0);
}

void wake_all(const std::atomic<uint32_t>& word) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}
#else
void sleep_while(const std::atomic<uint32_t>& word, uint32_t value, int64_t ns) noexcept {
  constexpr int64_t kNap = 50'000;
  if (word.load(std::memory_order_acquire) != value) return;
  const timespec length{0, std::min(ns, kNap)};
  nanosleep(&length, nullptr);
}

void wake_all(const std::atomic<uint32_t>&) noexcept {}
#endif

}  // namespace anyaccel
