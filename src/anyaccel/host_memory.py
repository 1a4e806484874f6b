# SPDX-License-Identifier: Apache-2.0
"""Memory of this process and of the host as the kernel reports it, in bytes: /proc and the cgroup limits."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import NamedTuple

from anyaccel._native import available_bytes, resident_bytes
from anyaccel._native import release_free_memory as release_free_memory

_STATUS = "/proc/self/status"
_CLEAR_REFS = "/proc/self/clear_refs"
_NO_LIMIT = 1 << 62  # cgroup v1 writes "no limit" as the largest multiple of the page size


class ResidentSet:
    """Resident set of this process, now and at its peak.

    The peak is the kernel's own high-water mark (VmHWM), so it also catches what came and went between calls.
    Starting a new peak lowers that mark for the whole process, `getrusage().ru_maxrss` with it. Where the
    kernel refuses that (a sandbox, a hardened /proc), the new peak is exact once the old one is exceeded, and
    until then the highest value that a call has seen.

    There is one, RESIDENT_SET, since there is one mark.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._stale_mark = 0  # a high-water mark from before the reset, when it could not be lowered
        self._seen = 0  # highest value that a call has seen since then

    def restart_in_child(self) -> None:
        """After a fork: the mark of the child has started anew."""
        self._forget()

    def current(self) -> int:
        """Bytes resident now."""
        now = resident_bytes()
        if now > self._seen:
            self._seen = now
        return now

    def peak(self) -> int:
        """Highest number of bytes resident since the process began or reset_peak was called."""
        now = self.current()
        mark = high_water_mark()
        return max(mark, now) if mark > self._stale_mark else max(self._seen, now)

    def reset_peak(self) -> None:
        """Start a new peak at what is resident now."""
        self._forget()
        try:
            with open(_CLEAR_REFS, "w") as file:
                file.write("5")
        except OSError:
            self._stale_mark = high_water_mark()
        self.current()


RESIDENT_SET = ResidentSet()
os.register_at_fork(after_in_child=RESIDENT_SET.restart_in_child)


def high_water_mark() -> int:
    """Most bytes that this process has had in memory since its start, or since the mark was lowered."""
    with open(_STATUS, "rb") as file:
        for line in file:
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) << 10
    return 0  # a sandboxed /proc may leave it out


class _Group(NamedTuple):
    """The files of one cgroup, and the fields of memory.stat that the kernel can drop under pressure."""

    limit: str
    usage: str
    stat: str
    droppable: tuple[str, ...]


_ROOT = Path("/")
_LIMITS_FOR = 1.0  # seconds for which limits are taken to be what they were


class _Limits(NamedTuple):
    """What an administrator may change while the process runs, and seldom does."""

    until: float
    total: int
    groups: tuple[tuple[_Group, int], ...]  # those with a limit


_limits = _Limits(0.0, 0, ())


def total(root: Path = _ROOT) -> int:
    """Bytes that this process can use at most: the host's memory, or the lowest cgroup limit below that.

    Args:
        root: where the file system begins; tests give a tree of their own.
    """
    return (_limits if root is _ROOT and time.monotonic() < _limits.until else _read_limits(root)).total


def available(root: Path = _ROOT) -> int:
    """Bytes that can be allocated now without swapping, neither on the host nor in any enclosing cgroup."""
    limits = _limits if root is _ROOT and time.monotonic() < _limits.until else _read_limits(root)
    free = available_bytes() if root is _ROOT else _meminfo(root, "MemAvailable:")
    for group, limit in limits.groups:
        free = min(free, limit - _used(group))
    return max(0, free)


def _read_limits(root: Path) -> _Limits:
    global _limits
    groups = tuple((group, limit) for group in _cgroups(root) if (limit := _limit(group)) is not None)
    host = _meminfo(root, "MemTotal:")
    found = _Limits(time.monotonic() + _LIMITS_FOR, min([host, *(limit for _, limit in groups)]), groups)
    if root is _ROOT:
        _limits = found
    return found


def _meminfo(root: Path, name: str) -> int:
    with open(f"{root}/proc/meminfo") as file:
        for line in file:
            if line.startswith(name):
                return int(line.split()[1]) << 10
    raise OSError(f"{root}/proc/meminfo has no {name}")


def _v1(folder: Path) -> _Group:
    # The plain names of memory.stat count the group alone; total_ includes the groups below, as usage does.
    return _Group(
        limit=f"{folder}/memory.limit_in_bytes",
        usage=f"{folder}/memory.usage_in_bytes",
        stat=f"{folder}/memory.stat",
        droppable=("total_active_file", "total_inactive_file"),
    )


def _v2(folder: Path) -> _Group:
    return _Group(
        limit=f"{folder}/memory.max",
        usage=f"{folder}/memory.current",
        stat=f"{folder}/memory.stat",
        droppable=("active_file", "inactive_file", "slab_reclaimable"),
    )


def _limit(group: _Group) -> int | None:
    lines = _lines(group.limit)  # missing in the root group
    if not lines or lines[0] == "max" or int(lines[0]) >= _NO_LIMIT:
        return None
    return int(lines[0])


def _used(group: _Group) -> int:
    usage = _lines(group.usage)
    stat = dict(line.split(maxsplit=1) for line in _lines(group.stat))
    droppable = sum(int(stat.get(name, 0)) for name in group.droppable)
    return max(0, int(usage[0]) - droppable) if usage else 0


@functools.cache
def _cgroups(root: Path) -> tuple[_Group, ...]:
    """Every cgroup that counts the memory of this process, both hierarchies, each from the leaf to the top.

    Read once: a process is put into its group before it starts.
    """
    groups = []
    for line in _lines(f"{root}/proc/self/cgroup"):
        _number, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, group = _mount(root, "cgroup2", ""), _v2
        elif "memory" in controllers.split(","):
            mount, group = _mount(root, "cgroup", "memory"), _v1
        else:
            continue
        if mount is None:
            continue
        top, shown = mount
        # In a container without a cgroup namespace the path is the host's, while the mount shows a part of
        # it; a path outside that part (or "/.." with a namespace) cannot be seen, so only the top is read.
        inside = Path(path).is_relative_to(shown) and ".." not in Path(path).parts
        below = Path(path).relative_to(shown) if inside else Path()
        groups += [group(top / part) for part in [below, *below.parents]]
    return tuple(groups)


def _mount(root: Path, kind: str, option: str) -> tuple[Path, str] | None:
    """Mount point of a cgroup hierarchy and the part of the hierarchy that it shows; the last mount wins."""
    found = None
    for line in _lines(f"{root}/proc/self/mountinfo"):
        before, separator, after = line.partition(f" - {kind} ")
        if separator and (not option or option in after.split()[1].split(",")):
            shown, point = before.split()[3:5]
            found = (root / point.replace("\\040", " ").lstrip("/"), shown)
    return found


def _lines(file: str) -> list[str]:
    try:
        with open(file, "rb", buffering=0) as stream:  # half the time of a text file
            return os.fsdecode(stream.read()).splitlines()
    except OSError:  # no such kernel feature, or hidden by a sandbox
        return []
