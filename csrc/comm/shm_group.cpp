// SPDX-License-Identifier: Apache-2.0
// Creation, waiting and errors of a group; its collectives are in shm_collectives.cpp and all_reduce.cpp.
#include "comm/shm_group.h"

#include <pthread.h>
#include <sched.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <new>
#include <stdexcept>
#include <utility>

#include "comm/errors.h"
#include "comm/shm_call.h"
#include "common/waiting.h"

namespace anyaccel::comm {
namespace {

constexpr size_t kPage = 4096;  // the alignment of buffers

// A waiting rank spins for longer than ranks drift apart between the phases of a large collective, then yields its
// core, and then sleeps until its peer wakes it; meanwhile it checks its peers. Where other work wants its core, it
// sleeps after spinning: yielding takes the time that it needs later.
constexpr int64_t kSpinNs = 200'000;
constexpr int64_t kSleepNs = 2'000'000;
constexpr int64_t kPeerCheckNs = 1'000'000;
constexpr int64_t kInterruptCheckNs = 50'000'000;

// Releases the interpreter's lock during its lifetime.
class Idle {
 public:
  Idle(const IdleHooks& hooks, bool wanted) : hooks_(hooks), active_(wanted && hooks.begin != nullptr) {
    if (active_) token_ = hooks_.begin();
  }
  ~Idle() {
    if (active_) hooks_.end(token_);
  }
  Idle(const Idle&) = delete;
  Idle& operator=(const Idle&) = delete;

 private:
  const IdleHooks& hooks_;
  const bool active_;
  void* token_ = nullptr;
};

// The number of forks between the first process that loaded this library and the current one.
std::atomic<uint32_t> forks_counted{0};

uint32_t forks() {
  static const int known = pthread_atfork(nullptr, nullptr, [] { forks_counted.fetch_add(1); });
  if (known != 0) throw std::bad_alloc();
  return forks_counted.load(std::memory_order_relaxed);
}

}  // namespace

ShmGroup::CallGuard::CallGuard(ShmGroup& group, bool waits) : group_(group) {
  const std::thread::id self = std::this_thread::get_id();
  const bool inside = group.calling_thread_.load(std::memory_order_relaxed) == self;
  if (waits) {
    group.check_process();
    if (inside)
      throw CommError(CommError::Kind::broken,
                      "a signal handler asked for an operation of the group while this thread waits in " +
                          group.describe(group.current_));
    group.call_mutex_.lock();
  } else if (group.is_forked() || inside || !group.call_mutex_.try_lock()) {
    return;
  }
  group.calling_thread_.store(self, std::memory_order_relaxed);
  acquired_ = true;
}

ShmGroup::CallGuard::~CallGuard() {
  if (!acquired_) return;
  group_.calling_thread_.store({}, std::memory_order_relaxed);
  group_.call_mutex_.unlock();
}

bool ShmGroup::is_forked() const { return forks_at_creation_ != forks_counted.load(std::memory_order_relaxed); }

void ShmGroup::check_process() const {
  if (is_forked())
    throw CommError(CommError::Kind::broken,
                    "the group is of the process that this one was forked from: make one in this process");
}

ShmGroup::ShmGroup(int rank, int size, size_t buffer_bytes, double timeout_s, ShmSegment::Kind kind,
                   size_t mailbox_bytes)
    : forks_at_creation_(forks()),
      rank_(rank),
      size_(size),
      buffer_bytes_(buffer_bytes),
      mailbox_bytes_(mailbox_bytes),
      timeout_s_(timeout_s),
      kernels_(reduce_kernels(selected_isa())) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size)
    throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(size) + "; there may be " +
                                std::to_string(kMaxRanks) + " ranks in a group");
  if (buffer_bytes < kLine * static_cast<size_t>(size) || buffer_bytes % kLine != 0)
    throw std::invalid_argument("a buffer of " + std::to_string(buffer_bytes) + " bytes for " + std::to_string(size) +
                                " ranks; needs a multiple of 64, at least 64 a rank");
  if (!(timeout_s > 0)) throw std::invalid_argument("timeout must be above 0");
  // With more ranks than cores, a spinning rank could take the core of the one that it waits for.
  spin_ns_ = size <= get_nprocs() ? kSpinNs : 0;
  own_ = ShmSegment::create(control_bytes() + kBuffers * buffer_bytes + mailbox_bytes, kind);
  auto* control = new (own_.data()) Control{};
  new (control + 1) Bell{};
}

ShmGroup::~ShmGroup() { leave(); }

void ShmGroup::leave() noexcept {
  // A peer that still waits for this rank gets an error at once.
  if (!controls_.empty() && !is_forked()) set_fate(Fate::left);
}

size_t ShmGroup::control_bytes() const {
  return round_up(sizeof(Control) + sizeof(Bell) + 2 * static_cast<size_t>(size_) * sizeof(uint64_t), kPage);
}

uint64_t* ShmGroup::table(int rank, uint64_t sequence) const {
  char* begin = reinterpret_cast<char*>(controls_[rank]) + sizeof(Control) + sizeof(Bell);
  return reinterpret_cast<uint64_t*>(begin) + (sequence & 1) * static_cast<size_t>(size_);
}

void ShmGroup::connect(const std::vector<std::string>& names, const std::vector<int>& pids) {
  if (names.size() != static_cast<size_t>(size_) || pids.size() != names.size())
    throw std::invalid_argument("connect: needs one name and one pid a rank");
  if (!peers_.empty()) throw std::invalid_argument("connect: already connected");
  // The group counts as connected once controls_ has all ranks, which add_peer() fills.
  for (int r = 0; r < size_; ++r)
    peers_.push_back(r == rank_ ? ShmSegment() : ShmSegment::open(names[r], own_.bytes()));
  for (int r = 0; r < size_; ++r)
    add_peer(static_cast<char*>(r == rank_ ? own_.data() : peers_[static_cast<size_t>(r)].data()),
             r == rank_ ? 0 : pids[static_cast<size_t>(r)]);
}

void ShmGroup::connect(const std::vector<ShmGroup*>& ranks) {
  if (ranks.size() != static_cast<size_t>(size_) || !controls_.empty())
    throw std::invalid_argument("connect: needs one group a rank, once");
  for (ShmGroup* group : ranks) add_peer(static_cast<char*>(group->own_.data()), 0);
}

void ShmGroup::add_peer(char* base, int pid) {
  processes_.push_back(Peer::watch(pid));
  buffers_.push_back(base + control_bytes());
  controls_.push_back(reinterpret_cast<Control*>(base));
}

void ShmGroup::set_timeout(double timeout_s) {
  if (!(timeout_s > 0)) throw std::invalid_argument("timeout must be above 0");
  timeout_s_.store(timeout_s, std::memory_order_relaxed);
}

void ShmGroup::abort() noexcept {
  aborted_.store(true, std::memory_order_release);
  if (controls_.empty() || is_forked()) return;
  control(rank_).fate.store(static_cast<uint32_t>(Fate::aborted), std::memory_order_release);
}

void ShmGroup::give_up() noexcept { set_fate(Fate::error); }

void ShmGroup::set_fate(Fate fate, int cause) const noexcept {
  uint32_t here = static_cast<uint32_t>(Fate::here);
  control(rank_).fate.compare_exchange_strong(here, static_cast<uint32_t>(fate) | static_cast<uint32_t>(cause) << 16);
}

// --- waiting

void ShmGroup::synchronise() {
  const uint64_t target = ++sequence_;
  Control& mine = control(rank_);
  mine.descriptor[target & 1] = current_;
  mine.arrived.exchange(target);
  wake_sleepers();
  int64_t deadline = 0;  // of spinning
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const std::atomic<uint64_t>& arrived = control(peer).arrived;
    int spins = 0;
    while (arrived.load(std::memory_order_acquire) < target) {
      cpu_pause();
      if (++spins % 32 != 0) continue;
      const int64_t now = now_ns();
      if (deadline == 0) deadline = now + spin_ns_;
      if (now < deadline) continue;
      wait_slowly(now);  // this waits for all peers
      return;
    }
  }
}

void ShmGroup::wake_sleepers() noexcept {
  // Either this rank sees that a peer is about to sleep, or the peer sees that this rank has arrived: all of these are
  // in one order, which exchange() keeps on every processor.
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    std::atomic<uint32_t>& sleeper = control(peer).sleeper;
    uint32_t waits_for_this = static_cast<uint32_t>(rank_) + 1;
    if (sleeper.load() != waits_for_this) continue;
    if (sleeper.compare_exchange_strong(waits_for_this, 0)) wake_all(sleeper);
  }
}

void ShmGroup::sleep_for(int peer) noexcept {
  std::atomic<uint32_t>& sleeper = control(rank_).sleeper;
  const uint32_t waits_for = static_cast<uint32_t>(peer) + 1;
  sleeper.exchange(waits_for);
  if (control(peer).arrived.load() < sequence_) sleep_while(sleeper, waits_for, kSleepNs);
  sleeper.store(0, std::memory_order_relaxed);
}

void ShmGroup::ring(int rank) noexcept {
  // Either this rank sees a listener, or the listener sees what this rank has changed, with an exchange() as well.
  Bell& its = bell(rank);
  if (its.listeners.load() == 0) return;
  its.rung.fetch_add(1);
  wake_all(its.rung);
}

void ShmGroup::wait_slowly(int64_t start) {
  const Idle idle(idle_hooks_, holds_lock_);
  int64_t peer_checked = start, interrupt_checked = start;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const std::atomic<uint64_t>& arrived = control(peer).arrived;
    while (arrived.load(std::memory_order_acquire) < sequence_) {
      const int64_t now = now_ns();
      if (now - start < kYieldNs && !core_is_shared(now)) {
        sched_yield();
      } else {
        sleep_for(peer);
      }
      if (aborted_.load(std::memory_order_acquire))
        throw CommError(CommError::Kind::broken,
                        "the group was aborted while this rank waited in " + describe(current_));
      if (now - peer_checked > kPeerCheckNs) {
        peer_checked = now;
        // All peers are checked, since the late one may itself wait for a rank that died.
        for (int r = 0; r < size_; ++r) {
          if (r == rank_ || control(r).arrived.load(std::memory_order_acquire) >= sequence_) continue;
          try {
            check_peer(r, describe(current_));
          } catch (const CommError&) {
            // The peer may have arrived just before it ended.
            if (control(r).arrived.load(std::memory_order_acquire) < sequence_) throw;
          }
        }
      }
      if (interrupt_check_ && now - interrupt_checked > kInterruptCheckNs) {
        interrupt_checked = now;
        interrupt_check_();
      }
      if (static_cast<double>(now - start) * 1e-9 > call_timeout_s_) time_out();
    }
  }
}

void ShmGroup::time_out() const {
  std::string missing;
  int first = -1;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || control(r).arrived.load(std::memory_order_acquire) >= sequence_) continue;
    if (first < 0) first = r;
    missing += (missing.empty() ? "" : ", ") + peer_name(r);
  }
  if (first < 0) first = rank_ == 0 ? 1 : 0;  // all have arrived by now, but peers may have given up on this rank
  set_fate(Fate::timed_out, first);
  throw CommError(CommError::Kind::timeout, (missing.empty() ? "a rank" : missing) +
                                                " did not come within the timeout of " + seconds_text(call_timeout_s_) +
                                                " for " + describe(current_));
}

std::string ShmGroup::number(int rank) const {
  return std::to_string(numbers_.empty() ? rank : numbers_[static_cast<size_t>(rank)]);
}

std::string ShmGroup::peer_name(int peer) const {
  const int pid = processes_[peer]->pid();
  return "rank " + number(peer) + (pid > 0 ? " (pid " + std::to_string(pid) + ")" : "");
}

void ShmGroup::check_peer(int peer, const std::string& doing) const {
  if (aborted_.load(std::memory_order_acquire))
    throw CommError(CommError::Kind::broken, "the group was aborted while this rank waited in " + doing);
  const uint32_t code = control(peer).fate.load(std::memory_order_acquire);
  if (code != 0) {
    const std::string cause = number(static_cast<int>(code >> 16));
    std::string why;
    switch (static_cast<Fate>(code & 0xffff)) {
      case Fate::left:
        why = " has left the group";
        break;
      case Fate::peer_lost:
        why = " has given up because rank " + cause + " ended";
        break;
      case Fate::timed_out:
        why = " has given up because rank " + cause + " did not come in time";
        break;
      case Fate::aborted:
        why = " has aborted the group";
        break;
      default:
        why = " has given up after an error";
    }
    throw CommError(CommError::Kind::broken, peer_name(peer) + why + ", while this rank waited in " + doing);
  }
  if (!processes_[peer]->ended()) return;
  set_fate(Fate::peer_lost, peer);
  throw CommError(CommError::Kind::peer_lost,
                  peer_name(peer) + " has ended, while this rank waited for it in " + doing);
}

// --- descriptors

std::string ShmGroup::describe(const Descriptor& d) const {
  const std::string dtype = dtype_name(static_cast<DType>(d.caller_dtype == 0 ? d.dtype : d.caller_dtype));
  const bool pairs = d.caller_dtype != 0 && dtype.starts_with("complex");
  const std::string elements = std::to_string(pairs ? d.count / 2 : d.count) + " " + dtype;
  const std::string with =
      d.reduce_op == 0 ? "" : std::string(" with ") + reduce_op_name(static_cast<ReduceOp>(d.reduce_op));
  const std::string root = " rank " + number(d.root);
  switch (d.op) {
    case Op::all_reduce:
      return "all_reduce of " + elements + with;
    case Op::broadcast:
      return "broadcast of " + elements + " from" + root;
    case Op::barrier:
      return "barrier";
    case Op::reduce:
      return "reduce of " + elements + with + " to" + root;
    case Op::reduce_scatter:
      return "reduce_scatter to " + elements + " a rank" + with;
    case Op::all_gather:
      return "all_gather of " + elements + " a rank";
    case Op::all_gather_uneven:
      return std::string("all_gather of ") + dtype_name(static_cast<DType>(d.dtype)) + ", another number a rank";
    case Op::gather:
      return "gather of " + elements + " a rank to" + root;
    case Op::scatter:
      return "scatter of " + elements + " a rank from" + root;
    case Op::all_to_all:
      return std::string("all_to_all of ") + dtype_name(static_cast<DType>(d.dtype));
    case Op::all_reduce_add_rms_norm:
      return "all_reduce_add_rms_norm of " + elements + " in rows of " + std::to_string(d.offset);
  }
  return "an unknown operation";
}

void ShmGroup::check_descriptors() const {
  for (int peer = 0; peer < size_; ++peer) {
    const Descriptor& theirs = control(peer).descriptor[sequence_ & 1];
    if (theirs == current_) continue;
    throw CommError(CommError::Kind::broken, "ranks disagree: rank " + number(rank_) + " called " + describe(current_) +
                                                 ", rank " + number(peer) + " called " + describe(theirs));
  }
}

void ShmGroup::check_root(const char* what, int root) const {
  if (root < 0 || root >= size_)
    throw std::invalid_argument(std::string(what) + " with root " + std::to_string(root) + " in a group of " +
                                std::to_string(size_) + " ranks");
}

}  // namespace anyaccel::comm
