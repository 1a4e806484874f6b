# SPDX-License-Identifier: Apache-2.0
"""deepspeed.utils.numa: lists of cores and the numactl command of a rank, from anyaccel's topology.

Nothing here starts a program: `anyaccel run` binds by system calls, and the command is for those who want one.
"""

from __future__ import annotations

import os
import shutil

from anyaccel.launch.plan.binding import bind_ranks
from anyaccel.launch.plan.memory import memory_policy
from anyaccel.launch.plan.options import BindingOptions
from anyaccel.topology import format_cpu_list, read_machine

from .._cover import cover

__all__ = ["check_for_numactl_pkg", "get_numa_cores", "get_numactl_cmd", "parse_range", "parse_range_list"]

_MEMORY_FLAGS = {"bind": "-m", "preferred": "-p", "interleave": "-i"}


def parse_range(rng: str) -> range:
    """The numbers of ``"4"`` or ``"4-7"``.

    Raises:
        ValueError: it is neither.
    """
    first, dash, last = rng.partition("-")
    numbers = (first, last if dash else first)
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise ValueError(f"Bad range: {rng!r}, it must be a number or two numbers with a dash between, as in 0-27")
    start, end = map(int, numbers)
    if start > end:
        raise ValueError(f"Bad range: {rng!r}, its end is below its start; write {end}-{start}")
    return range(start, end + 1)


def parse_range_list(range_str: str) -> list[int]:
    """The numbers of ``"0-27,32-59"``; ranges ascend and do not overlap.

    Raises:
        ValueError: it is no such list.
    """
    found: list[int] = []
    for part in range_str.split(","):
        numbers = parse_range(part)
        if found and numbers[0] <= found[-1]:
            raise ValueError(f"Bad range: {range_str!r}, {part} does not come after {found[-1]}; sort the list")
        found += numbers
    return found


def get_numa_cores() -> list[list[int]]:
    """Logical CPUs of each NUMA node, by its number; a node of memory alone has none."""
    machine = read_machine()
    by_id = {node.id: sorted(node.cpus) for node in machine.nodes}
    return [by_id.get(number, []) for number in range(max(by_id, default=-1) + 1)]


def check_for_numactl_pkg() -> bool:
    """Whether there is a program numactl."""
    return shutil.which("numactl") is not None


def get_numactl_cmd(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> tuple[int, list[str]]:
    """Cores of each rank, and the numactl command that gives a rank its cores and memory.

    Args:
        bind_core_list: CPUs to divide, as in ``0-27,32-59``; None for one of each physical core that is allowed.

    Raises:
        ValueError: the list is none, there is not a core for each rank, no such rank, or KMP_AFFINITY is set.
    """
    if num_local_procs < 1:
        raise ValueError(f"num_local_procs={num_local_procs}: must be at least 1")
    if not 0 <= local_rank < num_local_procs:
        raise ValueError(f"local_rank={local_rank}: must be from 0 to {num_local_procs - 1}")
    if "KMP_AFFINITY" in os.environ:
        raise ValueError("KMP_AFFINITY is set, which takes the cores out of numactl's hands: unset KMP_AFFINITY")
    machine = read_machine()
    if bind_core_list is None:
        cores = bind_ranks(BindingOptions(bind_cores=True), machine, num_local_procs).ranks[local_rank].cores
    else:
        # The list may be about another machine than this one, as in a launcher's dry run.
        listed = parse_range_list(bind_core_list)
        share = len(listed) // num_local_procs
        if not share:
            raise ValueError(f"{len(listed)} cores in {bind_core_list!r} are too few for {num_local_procs} ranks")
        cores = tuple(listed[share * local_rank : share * (local_rank + 1)])
    policy, nodes = memory_policy(machine, cores)
    memory = [_MEMORY_FLAGS[policy], format_cpu_list(nodes)] if policy in _MEMORY_FLAGS and nodes else []
    return len(cores), ["numactl", *memory, "-C", format_cpu_list(cores)]


cover(globals())
