# SPDX-License-Identifier: Apache-2.0
"""Memory of this process and of the host as the kernel reports it, in bytes: /proc and the cgroup limits."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_STATM = "/proc/self/statm"
_STATUS = "/proc/self/status"
_CLEAR_REFS = "/proc/self/clear_refs"
_NO_LIMIT = 1 << 62  # cgroup v1 writes "no limit" as the largest multiple of the page size


class ResidentSet:
    """Resident set of this process, now and at its peak.

    The peak is the kernel's own high-water mark (VmHWM), so it also catches what came and went between calls.
    Starting a new peak lowers that mark for the whole process, `getrusage().ru_maxrss` with it. Where the
    kernel refuses that (a sandbox, a hardened /proc), the new peak is exact once the old one is exceeded, and
    until then the highest value that a call has seen.

    One descriptor stays open: reading it again costs a third of opening, reading and closing the file.
    """

    _statm = -1

    def __init__(self) -> None:
        self._start()
        _LIVE.add(self)

    def _start(self) -> None:
        self._statm = os.open(_STATM, os.O_RDONLY)
        self._stale_mark = 0  # a high-water mark from before the reset, when it could not be lowered
        self._seen = 0  # highest value that a call has seen since then

    def _restart_in_child(self) -> None:
        # The descriptor still shows the parent, and the child's mark has started anew.
        os.close(self._statm)
        self._start()

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:
        if self._statm >= 0:
            _close(self._statm)

    def current(self) -> int:
        """Bytes resident now."""
        fields = self._read_statm()
        now = int(fields[1]) * _PAGE
        if now > self._seen:
            self._seen = now
        return now

    def _read_statm(self) -> list[bytes]:
        try:
            fields = os.pread(self._statm, 128, 0).split()
        except OSError:
            fields = []
        # Someone may have closed all descriptors and this number may be another file by now. statm has seven
        # fields, of which the fifth and the last are always 0.
        if len(fields) == 7 and fields[4] == fields[6] == b"0":
            return fields
        self._statm = os.open(_STATM, os.O_RDONLY)
        return os.pread(self._statm, 128, 0).split()

    def peak(self) -> int:
        """Highest number of bytes resident since the process began or reset_peak was called."""
        now = self.current()
        mark = _high_water_mark()
        return max(mark, now) if mark > self._stale_mark else max(self._seen, now)

    def reset_peak(self) -> None:
        """Start a new peak at what is resident now."""
        try:
            with open(_CLEAR_REFS, "w") as file:
                file.write("5")
            self._stale_mark = 0
        except OSError:
            self._stale_mark = _high_water_mark()
        self._seen = 0
        self.current()


_LIVE: weakref.WeakSet[ResidentSet] = weakref.WeakSet()


def _restart_all_in_child() -> None:
    for resident in list(_LIVE):
        resident._restart_in_child()


os.register_at_fork(after_in_child=_restart_all_in_child)


def _high_water_mark() -> int:
    with open(_STATUS, "rb") as file:
        for line in file:
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) << 10
    return 0  # a sandboxed /proc may leave it out


def total(root: Path = Path("/")) -> int:
    """Bytes that this process can use at most: the host's memory, or the lowest cgroup limit below that.

    Args:
        root: where the file system begins; tests give a tree of their own.
    """
    return min([_meminfo(root)["MemTotal"], *(level.limit for level in _cgroup_levels(root))])


def available(root: Path = Path("/")) -> int:
    """Bytes that can be allocated now without swapping, neither on the host nor in any enclosing cgroup."""
    free = [_meminfo(root)["MemAvailable"], *(level.limit - level.used for level in _cgroup_levels(root))]
    return max(0, min(free))


def _meminfo(root: Path) -> dict[str, int]:
    pairs = (line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    return {name: int(value.split()[0]) << 10 for name, value in pairs}


@dataclass(frozen=True)
class _Level:
    limit: int
    used: int


@dataclass(frozen=True)
class _Files:
    """Names in one cgroup version, with the fields of memory.stat that the kernel can drop under pressure."""

    limit: str
    usage: str
    droppable: tuple[str, ...]


# v1 counts only the group itself in the plain names; total_ includes the groups below it, as usage does.
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = _Files("memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable"))


def _cgroup_levels(root: Path) -> list[_Level]:
    """Every cgroup with a memory limit that this process is in, both hierarchies, leaf to top."""
    levels = []
    for line in _lines(root / "proc/self/cgroup"):
        _number, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, files = _mount(root, "cgroup2", ""), _V2
        elif "memory" in controllers.split(","):
            mount, files = _mount(root, "cgroup", "memory"), _V1
        else:
            continue
        if mount is None:
            continue
        top, shown = mount
        # In a container without a cgroup namespace the path is the host's, while the mount shows a part of
        # it; a path outside that part (or "/.." with a namespace) cannot be seen, so only the top is read.
        inside = Path(path).is_relative_to(shown) and ".." not in Path(path).parts
        folder = top / Path(path).relative_to(shown) if inside else top
        for group in [folder, *folder.parents]:
            level = _level(group, files)
            if level is not None:
                levels.append(level)
            if group == top:
                break
    return levels


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:  # no such kernel feature, or hidden by a sandbox
        return []


def _mount(root: Path, kind: str, option: str) -> tuple[Path, str] | None:
    """Mount point of a cgroup hierarchy and the part of the hierarchy that it shows; the last mount wins."""
    found = None
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        shown, point = before.split()[3:5]
        fields = after.split()
        if fields[0] == kind and (not option or option in fields[2].split(",")):
            found = (root / point.replace("\\040", " ").lstrip("/"), shown)
    return found


def _level(group: Path, files: _Files) -> _Level | None:
    limits = _lines(group / files.limit)
    if not limits or limits[0] == "max" or int(limits[0]) >= _NO_LIMIT:
        return None
    usage = _lines(group / files.usage)
    stat = dict(line.split(maxsplit=1) for line in _lines(group / "memory.stat"))
    used = int(usage[0]) if usage else 0
    return _Level(int(limits[0]), max(0, used - sum(int(stat.get(name, 0)) for name in files.droppable)))
