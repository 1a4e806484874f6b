// SPDX-License-Identifier: Apache-2.0
// What a launcher needs from the kernel and Python's standard library does not offer.
#pragma once

#include <vector>

namespace anyaccel {

// set_mempolicy(2) for the calling thread. Throws std::system_error (EPERM and ENOSYS are usual in
// containers).
void set_mempolicy(int mode, const std::vector<int>& nodes);

// The kernel sends `signal` to this process when the thread that created it ends. Survives exec.
// Throws std::system_error.
void set_parent_death_signal(int signal);

// Orphans among the descendants of this process become its children. Throws std::system_error.
void set_child_subreaper(bool enabled);

}  // namespace anyaccel
