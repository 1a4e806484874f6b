# SPDX-License-Identifier: Apache-2.0
"""Leases of cores, for processes that start and end independently of each other (replicas on Ray).

A lease is a set of locks on bytes of a file of the user, one byte for each core. The kernel releases them when the
process ends in whatever way. All processes that use the file share the machine, whatever has started them.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.launch.local.apply import bind_this_process
from anyaccel.launch.plan.memory import memory_policy
from anyaccel.launch.plan.plan import RankBinding
from anyaccel.topology import Cpu, Machine

_CHOICE_BYTE = 1 << 20  # the byte that a process locks while it chooses; those of cores are below it
_PAUSE_S = 0.02


class Lease:
    """Cores that this process has leased until it ends or closes this."""

    def __init__(self, cores: tuple[int, ...], file: int) -> None:
        self.cores = cores
        self._file = file

    def close(self) -> None:
        """Release the cores."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def choose_cores(free: Mapping[int, Sequence[Cpu]], count: int) -> tuple[int, ...]:
    """`count` of the free cores, from as few NUMA nodes as possible; () if there are too few.

    Args:
        free: cores by node, as `Machine.nodes_with_cores` returns them.
    """
    fitting = [cores for cores in free.values() if len(cores) >= count]
    if fitting:  # best fit: the node with the fewest free cores, so that a whole node stays for a larger lease
        return tuple(cpu.id for cpu in min(fitting, key=len)[:count])
    if sum(map(len, free.values())) < count:
        return ()
    nodes = sorted(free.values(), key=len, reverse=True)
    return tuple(sorted([cpu.id for cores in nodes for cpu in cores][:count]))


def lease_cores(machine: Machine, count: int, wait_s: float = 30.0, folder: str | None = None) -> Lease:
    """Lease cores that no other process has leased. A process can have one lease, as file locks belong to processes.

    Args:
        wait_s: how long to wait until others release theirs.
        folder: the folder of the file; None: the machine's temporary folder.

    Raises:
        UsageError: this process may not use so many cores.
        AnyAccelError: other processes have leased too many of them.
    """
    nodes = machine.nodes_with_cores()
    there = sum(map(len, nodes.values()))
    if not 0 < count <= there:
        raise UsageError(f"{count} cores are wanted, and this process may use {there}")
    deadline = time.monotonic() + wait_s
    file = _open(Path(folder or tempfile.gettempdir()) / f"anyaccel-cores-{os.getuid()}")
    try:
        while True:
            left = 0
            if _lock(file, _CHOICE_BYTE):
                free = {node: [cpu for cpu in cores if _lock(file, cpu.core)] for node, cores in nodes.items()}
                left = sum(map(len, free.values()))
                chosen = choose_cores(free, count)
                for cpu in (cpu for cores in free.values() for cpu in cores if cpu.id not in chosen):
                    _unlock(file, cpu.core)
                _unlock(file, _CHOICE_BYTE)
                if chosen:
                    return Lease(chosen, file)
            if time.monotonic() >= deadline:
                raise AnyAccelError(
                    f"{count} cores are wanted, and of the {there} that this process may use only {left} are free: "
                    "other processes have leased the rest; start fewer of them, or with fewer cores each"
                )
            time.sleep(_PAUSE_S)
    except BaseException:
        os.close(file)
        raise


def bind_to(machine: Machine, cores: tuple[int, ...]) -> list[str]:
    """Bind this process with all its threads to cores, and its memory to their NUMA nodes.

    The memory policy holds for this thread and those that it starts; the kernel has no call for other threads.

    Returns:
        What the kernel refused, one line each.
    """
    policy, nodes = memory_policy(machine, cores)
    problems = bind_this_process(RankBinding(0, 0, cores, policy, nodes, {}))
    wanted = set(cores)
    if os.sched_getaffinity(0) != wanted:
        return problems
    changed = True
    while changed:  # a thread that is not bound yet may start another one meanwhile
        changed = False
        for thread in [int(entry.name) for entry in Path("/proc/self/task").iterdir()]:
            with suppress(ProcessLookupError):
                if os.sched_getaffinity(thread) != wanted:
                    os.sched_setaffinity(thread, wanted)
                    changed = True
    return problems


def _open(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    found = os.fstat(file)
    if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise AnyAccelError(f"{path} belongs to somebody else; remove it, or set TMPDIR to another folder")
    return file


def _lock(file: int, byte: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _unlock(file: int, byte: int) -> None:
    fcntl.lockf(file, fcntl.LOCK_UN, 1, byte)
