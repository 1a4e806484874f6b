# SPDX-License-Identifier: Apache-2.0
"""Divides the cores of a machine among its ranks. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyaccel.errors import UsageError
from anyaccel.launch.plan.memory import memory_policy
from anyaccel.launch.plan.options import BindingOptions
from anyaccel.topology import Cpu, Machine, format_cpu_list
from anyaccel.topology.model import counted


class RankShare:
    """The cores and the memory policy of one rank.

    Attributes:
        cores: logical CPUs; empty if it is not bound.
        memory_policy: a key of `memory.MEMORY_MODES`.
        memory_nodes: NUMA nodes of that policy; empty with "default".
    """

    __slots__ = ("cores", "memory_nodes", "memory_policy")

    def __init__(self, cores: tuple[int, ...], memory_policy: str, memory_nodes: tuple[int, ...]) -> None:
        self.cores, self.memory_policy, self.memory_nodes = cores, memory_policy, memory_nodes


class CoreShares:
    """The shares of all ranks of a machine.

    Attributes:
        ranks: by local rank.
        left_over: cores of the core list, or of the machine, that no rank has.
        reserved: cores that are left to the system.
        notes: remarks, one line each.
        warnings: what could not be done as asked, and what was done instead; errors if options are strict.
    """

    __slots__ = ("left_over", "notes", "ranks", "reserved", "warnings")

    def __init__(
        self,
        ranks: tuple[RankShare, ...],
        left_over: tuple[int, ...] = (),
        reserved: tuple[int, ...] = (),
        notes: tuple[str, ...] = (),
        warnings: tuple[str, ...] = (),
    ) -> None:
        self.ranks, self.left_over, self.reserved = ranks, left_over, reserved
        self.notes, self.warnings = notes, warnings


def bind_ranks(
    options: BindingOptions, machine: Machine, ranks: int, device_nodes: Sequence[int | None] = ()
) -> CoreShares:
    """Divide the machine among its ranks as the options say.

    Args:
        ranks: number of ranks of this machine.
        device_nodes: NUMA node of the device of each rank, None where it is unknown; empty without devices.

    Raises:
        UsageError: it cannot be divided as asked.
    """
    notes: list[str] = []
    warnings: list[str] = []
    reserved: tuple[int, ...] = ()
    left_over: tuple[int, ...] = ()
    cores: Sequence[tuple[int, ...]] = [()] * ranks
    if options.core_list is not None:
        cores, left_over = divide_core_list(machine, ranks, options.core_list)
        used = [core for share in cores for core in share]
        notes += [
            f"CPUs {format_cpu_list(group)} are threads of one physical core" for group in shared_cores(machine, used)
        ]
    elif options.bind_cores:
        nodes, reserved = reserve_cores(machine, options.cores_reserved)
        shares, obstacle = _share_by_device(machine, nodes, ranks, device_nodes)
        if obstacle:
            warnings.append(f"{obstacle}; workers are spread over the NUMA nodes as without devices")
        shares = shares or _spread(machine, nodes, ranks)
        notes += _describe_kinds(shares)
        if options.smt:
            notes.append("what is listed are threads: a worker has all threads of its cores")
        given = {cpu.id for share in shares for cpu in share}
        left_over = tuple(sorted(cpu.id for node in nodes.values() for cpu in node if cpu.id not in given))
        cores = [_threads(machine, share) if options.smt else tuple(cpu.id for cpu in share) for share in shares]

    found = tuple(RankShare(share, *_memory(options, machine, share)) for share in cores)
    if options.memory_policy in ("bind", "preferred", "interleave") and any(not share.memory_nodes for share in found):
        why = (
            "this process may use no memory there" if machine.allowed_memory_nodes else "this kernel has no NUMA nodes"
        )
        warnings.append(f"--mem-policy {options.memory_policy} is left out: {why}")
    return CoreShares(found, left_over, reserved, tuple(notes), tuple(warnings))


def _memory(options: BindingOptions, machine: Machine, cores: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    if cores or options.memory_policy == "interleave":
        return memory_policy(machine, cores, options.memory_policy)
    return ("default", ())


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
    if forbidden and set(forbidden).issubset(machine.isolated_cpus):
        raise UsageError(
            f"--bind_core_list names CPU {format_cpu_list(forbidden)}, which this kernel keeps from processes that do "
            f"not ask for them (isolcpus={format_cpu_list(machine.isolated_cpus)}); ask for them by putting "
            f"`taskset -c {format_cpu_list(sorted(core_list))}` in front of the command"
        )
    if forbidden:
        raise UsageError(
            f"--bind_core_list names CPU {format_cpu_list(forbidden)}, which this process may not use "
            f"(taskset, cpuset or container); it may use {format_cpu_list(machine.allowed_cpus)}"
        )
    size = len(core_list) // ranks
    if size == 0:
        raise UsageError(
            f"{ranks} workers cannot share the {counted(len(core_list), 'CPU')} of --bind_core_list "
            f"{format_cpu_list(core_list)}; name at least {ranks} CPUs or start fewer workers"
        )
    shares = [tuple(core_list[rank * size : (rank + 1) * size]) for rank in range(ranks)]
    return shares, tuple(core_list[ranks * size :])


def reserve_cores(machine: Machine, count: int) -> tuple[dict[int, tuple[Cpu, ...]], tuple[int, ...]]:
    """The allowed cores by NUMA node without the last `count` of each, slow ones first, and what is so reserved.

    Raises:
        UsageError: no core is left.
    """
    nodes = machine.nodes_with_cores()
    if not count:
        return nodes, ()
    # x86 numbers the slow kinds last, arm64 mostly first.
    order = {"efficiency": 1, "low power": 2}
    kept = {}
    for node, cores in nodes.items():
        reserved = sorted(cores, key=lambda cpu: order.get(cpu.kind, 0))[-count:]
        if len(cores) > count:
            kept[node] = tuple(cpu for cpu in cores if cpu not in reserved)
    if not kept:
        most = max(map(len, nodes.values()))
        raise UsageError(
            f"--cores-reserved {count} leaves no core for workers: no NUMA node has more than {counted(most, 'core')} "
            "that this process may use; reserve fewer"
        )
    left = {cpu.id for cores in kept.values() for cpu in cores}
    return kept, tuple(cpu.id for cpu in machine.cores() if cpu.id not in left)


def _spread(machine: Machine, by_node: Mapping[int, Sequence[Cpu]], ranks: int) -> list[list[Cpu]]:
    """Give each rank the same number of physical cores, inside one NUMA node, and spread the ranks over the nodes.

    A rank gets cores of several nodes only if no node has its share of all cores (mostly with fewer ranks than nodes),
    and if staying inside one node would cost it more than a quarter of that share.

    Raises:
        UsageError: there are more ranks than cores.
    """
    nodes = list(by_node.values())
    total = sum(map(len, nodes))
    share = total // ranks
    if share == 0:
        reserved = len(machine.cores()) - total
        but = f" beside the {reserved} of --cores-reserved" if reserved else ""
        raise UsageError(
            f"{ranks} workers cannot each have a core of their own: this process may use only "
            f"{counted(total, 'core')}{but} (CPU {format_cpu_list(machine.allowed_cpus)}); "
            f"start at most {total}, or do not bind them"
        )
    inside = _largest_inside(nodes, ranks)
    if any(len(node) >= share for node in nodes) or 4 * inside >= 3 * share:
        counts = _counts_inside(nodes, ranks, inside)
        return [
            cores for node, count in zip(nodes, counts, strict=True) if count for cores in _deal(node, count, inside)
        ]
    line = [cpu for node in nodes for cpu in node]
    return [line[rank * share : (rank + 1) * share] for rank in range(ranks)]


def _largest_inside(nodes: Sequence[Sequence[Cpu]], ranks: int) -> int:
    """The largest number of cores per rank with which all ranks fit, each inside one node."""
    size = max(map(len, nodes))
    while size and sum(len(node) // size for node in nodes) < ranks:
        size -= 1
    return size


def _counts_inside(nodes: Sequence[Sequence[Cpu]], ranks: int, size: int) -> list[int]:
    """The number of ranks of each node, as even as the room allows."""
    counts = [0] * len(nodes)
    for _ in range(ranks):
        free = [index for index, node in enumerate(nodes) if len(node) // size > counts[index]]
        counts[min(free, key=lambda index: (counts[index], index))] += 1
    return counts


def _deal(node: Sequence[Cpu], ranks: int, size: int) -> list[list[Cpu]]:
    """`size` cores of a node for each rank: neighbours, and as far as possible the same number of each kind.

    Ranks wait for each other, so one that had only efficiency cores would slow down all.
    """
    kinds: dict[str, list[Cpu]] = {}
    for cpu in node:
        kinds.setdefault(cpu.kind, []).append(cpu)
    shares: list[list[Cpu]] = [[] for _ in range(ranks)]
    for cpus in sorted(kinds.values(), key=lambda cpus: cpus[0].kind != "performance"):
        each = len(cpus) // ranks
        for share in shares:
            count = min(each, size - len(share))
            share += cpus[:count]
            del cpus[:count]
    rest = iter([cpu for cpus in kinds.values() for cpu in cpus])
    for share in shares:
        while len(share) < size:
            share.append(next(rest))
        share.sort(key=lambda cpu: node.index(cpu))
    return shares


def _share_by_device(
    machine: Machine, nodes: Mapping[int, Sequence[Cpu]], ranks: int, device_nodes: Sequence[int | None]
) -> tuple[list[list[Cpu]], str]:
    """Cores of the node of each rank's device, shared with the other ranks whose devices are there.

    Returns:
        The cores of each rank; or none and the reason, which is "" without devices or with one node only.
    """
    if not device_nodes or len(nodes) == 1:
        return [], ""
    if len(device_nodes) < ranks:
        return [], f"there are {len(device_nodes)} devices for {ranks} workers"
    homes: list[int] = []
    for rank, node in enumerate(device_nodes[:ranks]):
        home = None if node is None else _nearest_usable_node(machine, nodes, node)
        if home is None:
            where = "the kernel does not say at which NUMA node it is"
            return [], f"device {rank}: " + (where if node is None else f"there is no core to use at its node {node}")
        homes.append(home)
    for home in sorted(set(homes)):
        if homes.count(home) > len(nodes[home]):
            return [], f"node {home} has {counted(len(nodes[home]), 'core')} for the {homes.count(home)} devices there"
    counts = {home: homes.count(home) for home in homes}
    dealt = {home: iter(_deal(nodes[home], count, len(nodes[home]) // count)) for home, count in counts.items()}
    return [next(dealt[home]) for home in homes], ""


def _nearest_usable_node(machine: Machine, nodes: Mapping[int, Sequence[Cpu]], node: int) -> int | None:
    """The usable node nearest to this one; NUMA nodes that share their cores count as one."""
    for near in machine.nearest_nodes(node):
        shown = machine.node(near)
        for cpu_id in shown.cpus if shown else ():
            cpu = machine.cpu(cpu_id)
            if cpu is not None and cpu.node in nodes:
                return cpu.node
    return None


def _threads(machine: Machine, share: Sequence[Cpu]) -> tuple[int, ...]:
    """All allowed threads of the cores, first ones first."""
    allowed = set(machine.allowed_cpus)
    groups = [[thread for thread in cpu.siblings or (cpu.id,) if thread in allowed] for cpu in share]
    return tuple(sorted(thread for group in groups for thread in group))


def _describe_kinds(shares: Sequence[Sequence[Cpu]]) -> list[str]:
    """A note if cores differ in kind."""
    mixes = []
    for share in shares:
        kinds = [cpu.kind for cpu in share]
        mixes.append(" and ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)))
    if not any(cpu.kind for share in shares for cpu in share):
        return []
    if len(set(mixes)) == 1:
        return [f"cores differ in kind: each worker has {mixes[0]}"]
    return ["cores differ in kind: " + ", ".join(f"worker {rank} has {mix}" for rank, mix in enumerate(mixes))]


def shared_cores(machine: Machine, cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Groups of the given logical CPUs that are threads of one physical core."""
    groups: dict[int, list[int]] = {}
    for cpu in machine.cpus:
        if cpu.id in cores:
            groups.setdefault(cpu.core, []).append(cpu.id)
    return [tuple(group) for group in groups.values() if len(group) > 1]
