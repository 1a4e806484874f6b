// SPDX-License-Identifier: Apache-2.0
#include "common/process.h"

#include <cerrno>
#include <climits>
#include <stdexcept>
#include <string>
#include <system_error>

#ifdef __linux__
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace anyaccel {
namespace {

[[noreturn]] void fail(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

}  // namespace

#ifdef __linux__

void set_mempolicy(int mode, const std::vector<int>& nodes) {
  constexpr int kBits = sizeof(unsigned long) * CHAR_BIT;
  constexpr int kMaxNodes = 1 << 12;
  std::vector<unsigned long> mask;
  for (int node : nodes) {
    if (node < 0 || node >= kMaxNodes) fail(EINVAL, ("set_mempolicy: node " + std::to_string(node)).c_str());
    if (mask.size() <= static_cast<size_t>(node / kBits)) mask.resize(node / kBits + 1);
    mask[node / kBits] |= 1UL << (node % kBits);
  }
  // The kernel reads maxnode - 1 bits.
  const unsigned long maxnode = mask.empty() ? 0 : mask.size() * kBits + 1;
  if (syscall(SYS_set_mempolicy, mode, mask.empty() ? nullptr : mask.data(), maxnode) != 0)
    fail(errno, "set_mempolicy");
}

void set_parent_death_signal(int signal) {
  if (prctl(PR_SET_PDEATHSIG, static_cast<unsigned long>(signal), 0, 0, 0) != 0) fail(errno, "prctl(PR_SET_PDEATHSIG)");
}

void set_child_subreaper(bool enabled) {
  if (prctl(PR_SET_CHILD_SUBREAPER, enabled ? 1UL : 0UL, 0, 0, 0) != 0) fail(errno, "prctl(PR_SET_CHILD_SUBREAPER)");
}

#else

// Other systems have no such call; the caller treats ENOSYS as "not supported here".
void set_mempolicy(int, const std::vector<int>&) { fail(ENOSYS, "set_mempolicy: Linux only"); }
void set_parent_death_signal(int) { fail(ENOSYS, "prctl(PR_SET_PDEATHSIG): Linux only"); }
void set_child_subreaper(bool) { fail(ENOSYS, "prctl(PR_SET_CHILD_SUBREAPER): Linux only"); }

#endif

}  // namespace anyaccel
