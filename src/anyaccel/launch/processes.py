# SPDX-License-Identifier: Apache-2.0
"""Finding and ending the processes below this one.

They are found through /proc. If /proc is missing, or belongs to another PID namespace (`unshare --pid` without
`--mount-proc`), waitid() is called for each pid that a child may have. That finds children only, which is enough for a
subreaper that ends them, as their children become its own then.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator

# The largest number of a process that Linux can be set to.
_LARGEST = 1 << 22


def proc_is_ours() -> bool:
    """Whether /proc belongs to this PID namespace."""
    try:
        with open("/proc/self/status", "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return False
    # The line has a pid for each namespace, from that of /proc inwards; Linux before 4.1 does not have it.
    found = next((line.split()[1:] for line in lines if line.startswith(b"NSpid:")), None)
    if found is None:
        found = next(line.split()[1:] for line in lines if line.startswith(b"Pid:"))
    return found == [str(os.getpid()).encode()]


def _children_by_number() -> dict[int, str]:
    """Children of this process without /proc: process id -> state letter, "Z" or "R"."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return {}
    last = os.fork()
    if last == 0:
        os._exit(0)
    os.waitpid(last, 0)
    own = os.getpid()
    # The kernel assigns pids in turn, so children have pids above our own until the pids wrap around.
    likely = [range(own + 1, last)] if last > own else [range(own + 1, _LARGEST), range(1, last)]
    return _filter_children(likely) or _filter_children([range(1, _LARGEST)])


def _filter_children(numbers: Iterable[range]) -> dict[int, str]:
    found = {}
    for pid in (pid for some in numbers for pid in some):
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            continue
        found[pid] = "R" if ended is None else "Z"
    return found


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and parent of a process; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The name before it is in parentheses and may contain anything.
    fields = text.rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[1])


def _all() -> Iterator[tuple[int, str, int]]:
    """Process id, state letter and parent of every process."""
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    for pid in pids:
        found = _stat(pid)
        if found:
            yield pid, *found


def parent(pid: int) -> int | None:
    """The parent of a process; None when it is gone."""
    found = _stat(pid)
    return found[1] if found else None


def started(pid: int) -> int | None:
    """When a process was started, in clock ticks since the machine was; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return None


def name(pid: int) -> str:
    """The name that a process has given itself; "" when it is gone."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().decode(errors="replace").rstrip("\n")
    except OSError:
        return ""


def descendants(exclude: Iterable[int] = (), root: int | None = None) -> dict[int, str]:
    """All processes below this one, zombies included: process id -> state letter. Its children where /proc is not ours.

    Args:
        exclude: children that are left out, with everything below them.
        root: all processes below this one instead; only where /proc is ours.
    """
    if not proc_is_ours():
        skipped = set(exclude)
        return {pid: state for pid, state in _children_by_number().items() if pid not in skipped}
    children: dict[int, list[int]] = {}
    states: dict[int, str] = {}
    for pid, state, parent in _all():
        states[pid] = state
        children.setdefault(parent, []).append(pid)
    skipped = set(exclude)
    below: dict[int, str] = {}
    queue = [os.getpid() if root is None else root]
    while queue:
        for pid in children.get(queue.pop(), ()):
            if pid not in skipped and pid not in below:
                below[pid] = states[pid]
                queue.append(pid)
    return below


def children() -> set[int]:
    """Direct children of this process."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()  # the usual case, without a walk through /proc
    if not proc_is_ours():
        return set(_children_by_number())
    own = os.getpid()
    return {pid for pid, _, parent in _all() if parent == own}


def states_of_children(parent: int) -> dict[int, str]:
    """Children of another process: process id -> state letter; only if /proc is ours."""
    return {pid: state for pid, state, its_parent in _all() if its_parent == parent}


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes; those that are gone, or belong to another user, are passed over."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def describe(pids: Iterable[int]) -> str:
    """Processes for a message: ``"123 (sleep 40), 124 (python x.py)"``."""
    if not proc_is_ours():
        return ", ".join(map(str, sorted(pids)))
    return ", ".join(f"{pid} ({_command(pid)})" for pid in sorted(pids))


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
        if not words:
            with open(f"/proc/{pid}/comm", "rb") as file:
                words = file.read().strip().decode(errors="replace")
    except OSError:
        return "gone"
    printable = "".join(letter if letter.isprintable() else "?" for letter in words)
    return printable if len(printable) <= 60 else f"{printable[:57]}..."


def end_all(exclude: Iterable[int], timeout: float) -> set[int]:
    """Kill everything below this process and wait for it; SIGCHLD must be blocked.

    Args:
        exclude: children that are left alone, with everything below them.
        timeout: seconds after which to give up.

    Returns:
        What is still alive: processes of another user, or in the middle of a kernel call.
    """
    skipped = set(exclude)
    deadline = time.monotonic() + timeout
    while found := descendants(skipped):
        send(found, signal.SIGKILL)
        reaped = 0
        for pid, state in found.items():
            if state == "Z":
                try:
                    reaped += os.waitpid(pid, os.WNOHANG)[0]
                except ChildProcessError:
                    continue  # a zombie of another process; it becomes our child when that process is gone
        left = deadline - time.monotonic()
        if left <= 0:
            return set(found)
        if not reaped:
            # Each death may bring new children, of a process that has forked while we read /proc.
            signal.sigtimedwait([signal.SIGCHLD], min(left, 0.1))
    return set()
