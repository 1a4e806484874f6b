# SPDX-License-Identifier: Apache-2.0
"""From topology to core sets: which rank gets which cores and which memory. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from anyaccel.errors import UsageError
from anyaccel.topology import Cpu, Machine, format_cpu_list

# Modes of set_mempolicy(2) by the name that a plan shows.
MEMORY_POLICIES = {"default": 0, "bind": 2}


def divide_core_list(
    machine: Machine, ranks: int, core_list: Sequence[int]
) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Divide `core_list` evenly, in order: ``0-27,32-59`` for 4 ranks is 0-13, 14-27, 32-45, 46-59.

    Returns:
        Logical CPUs of each rank, and those at the end of the list that nobody got.

    Raises:
        UsageError: a CPU that this machine does not have or that this process may not use, or too few CPUs.
    """
    online = [cpu.id for cpu in machine.cpus]
    unknown = [core for core in core_list if core not in online]
    if unknown:
        raise UsageError(
            f"--bind_core_list names CPU {format_cpu_list(unknown)}, which this machine does not have "
            f"(or which is offline); it has {format_cpu_list(online)}"
        )
    forbidden = [core for core in core_list if core not in machine.allowed_cpus]
    if forbidden:
        raise UsageError(
            f"--bind_core_list names CPU {format_cpu_list(forbidden)}, which this process may not use "
            f"(taskset, cpuset or container); it may use {format_cpu_list(machine.allowed_cpus)}"
        )
    size = len(core_list) // ranks
    if size == 0:
        raise UsageError(
            f"{ranks} workers cannot share the {_count(len(core_list), 'CPU')} of --bind_core_list "
            f"{format_cpu_list(core_list)}; name at least {ranks} CPUs or start fewer workers"
        )
    shares = [tuple(core_list[rank * size : (rank + 1) * size]) for rank in range(ranks)]
    return shares, tuple(core_list[ranks * size :])


def spread_cores(machine: Machine, ranks: int) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Give each rank the same number of physical cores, ranks spread over NUMA nodes and no rank across two.

    Only where no node has a rank's share of all cores (fewer ranks than nodes, mostly) may a rank have cores
    of several nodes, and even then not when staying inside costs it at most a quarter of its share.

    Returns:
        One logical CPU per core for each rank, and the cores that nobody got.

    Raises:
        UsageError: there are more ranks than cores.
    """
    nodes = list(machine.nodes_with_cores().values())
    total = sum(map(len, nodes))
    share = total // ranks
    if share == 0:
        raise UsageError(
            f"{ranks} workers cannot each have a core of their own: this process may use only "
            f"{_count(total, 'core')} (CPU {format_cpu_list(machine.allowed_cpus)}); "
            f"start at most {total}, or do not bind them"
        )
    inside = _largest_inside(nodes, ranks)
    if any(len(node) >= share for node in nodes) or 4 * inside >= 3 * share:
        shares = _place_inside(nodes, ranks, inside)
    else:
        line = [cpu.id for node in nodes for cpu in node]
        shares = [tuple(line[rank * share : (rank + 1) * share]) for rank in range(ranks)]
    given = {core for cores in shares for core in cores}
    return shares, tuple(cpu.id for cpu in machine.cores() if cpu.id not in given)


def _largest_inside(nodes: Sequence[Sequence[Cpu]], ranks: int) -> int:
    """The largest number of cores per rank with which all ranks fit, each inside one node."""
    size = max(map(len, nodes))
    while size and sum(len(node) // size for node in nodes) < ranks:
        size -= 1
    return size


def _place_inside(nodes: Sequence[Sequence[Cpu]], ranks: int, size: int) -> list[tuple[int, ...]]:
    counts = [0] * len(nodes)
    for _ in range(ranks):
        free = [index for index, node in enumerate(nodes) if len(node) // size > counts[index]]
        counts[min(free, key=lambda index: (counts[index], index))] += 1
    return [
        tuple(cpu.id for cpu in node[place * size : (place + 1) * size])
        for node, count in zip(nodes, counts, strict=True)
        for place in range(count)
    ]


def memory_policy(machine: Machine, cores: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Where a rank on these cores takes its memory from: a key of MEMORY_POLICIES, and the nodes.

    Cores inside one node that has memory bind to that node (to all nodes that show the same cores, where the
    kernel was told to cut one node into several). Cores of several nodes, or of a node without memory, keep
    the kernel's default, which takes memory from the node that touches it, or the nearest one.
    """
    wanted = set(cores)
    nodes = tuple(
        node.id for node in machine.nodes if wanted.issubset(node.cpus) and node.id in machine.allowed_memory_nodes
    )
    return ("bind", nodes) if nodes else ("default", ())


def shared_cores(machine: Machine, cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Groups of the given logical CPUs that are threads of one physical core."""
    groups: dict[int, list[int]] = {}
    for cpu in machine.cpus:
        if cpu.id in cores:
            groups.setdefault(cpu.core, []).append(cpu.id)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
