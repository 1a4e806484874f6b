# SPDX-License-Identifier: Apache-2.0
"""The machine as data: frozen and without I/O, so that planning is a pure function of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# Linux is built for at most 8192 CPUs; a larger number in a list is a mistake, not a reason to fill memory.
_MAX_CPU = 1 << 16


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The numbers of a list such as ``"0-3,8"``, in the order given and with duplicates kept.

    An empty text is an empty list, as in sysfs.

    Raises:
        ValueError: the text is no such list; the message quotes the part that is wrong.
    """
    numbers: list[int] = []
    if not text.strip():
        return ()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not _is_number(first) or (dash and not _is_number(last)):
            raise ValueError(f"{part.strip()!r} is neither a number nor a range such as 0-3")
        low, high = int(first), int(last if dash else first)
        if high < low:
            raise ValueError(f"the range {part.strip()!r} ends before it starts")
        if high >= _MAX_CPU:
            raise ValueError(f"{part.strip()!r} is out of range, numbers go up to {_MAX_CPU - 1}")
        numbers.extend(range(low, high + 1))
    return tuple(numbers)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def format_cpu_list(numbers: Iterable[int]) -> str:
    """The shortest list for `numbers` that keeps their order: ``(0, 1, 2, 8)`` is ``"0-2,8"``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


# Kinds of memory that a node without cores may have, and what people call them.
MEMORY_KINDS = {
    "hbm": "HBM",
    "cxl": "CXL memory",
    "pmem": "persistent memory",
    "gpu": "memory of a GPU",
    "slow": "memory slower than that of the cores",
}


@dataclass(frozen=True)
class Cpu:
    """One logical CPU that is online.

    Attributes:
        id: the kernel's number.
        package: socket; numbers need not be dense.
        die: die within the package.
        core_id: core number as the firmware gives it; unique at most within package and die.
        node: NUMA node (the lowest one, where several nodes show the same CPU).
        siblings: ids of the logical CPUs of the same physical core, itself included, ascending.
        kind: "performance", "efficiency" or "low power" on a machine whose cores differ, else "".
    """

    id: int
    package: int = 0
    die: int = 0
    core_id: int = 0
    node: int = 0
    siblings: tuple[int, ...] = ()
    kind: str = ""

    @property
    def core(self) -> int:
        """Identity of the physical core on the whole machine: its lowest logical CPU."""
        return self.siblings[0] if self.siblings else self.id


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node.

    Attributes:
        id: the kernel's number.
        cpus: ids of its online logical CPUs, ascending; empty for a node that only has memory.
        memory_bytes: its memory in bytes; 0 for a node that only has CPUs.
        distances: distance to each node by node id, as the firmware gives it (10 is local); may be empty.
        memory_kind: technology of the memory of a node without cores, where the kernel tells it: a key of
            MEMORY_KINDS. "" where it is not known, and for nodes with cores, whose memory is the usual one.
        memory_evidence: how `memory_kind` is known, for people; "" where it is not.
        initiators: nodes that the firmware names as the closest to the memory of a node without cores; may be empty.
        offline_cpus: ids of its logical CPUs, ascending, where all of them are switched off; else empty.
    """

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int
    distances: dict[int, int] = field(default_factory=dict, hash=False)
    memory_kind: str = ""
    memory_evidence: str = ""
    initiators: tuple[int, ...] = ()
    offline_cpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Machine:
    """The whole machine, and the part of it that this process may use.

    Attributes:
        cpus: all online logical CPUs by ascending id.
        nodes: all online NUMA nodes by ascending id; one node 0 where the kernel shows none.
        allowed_cpus: ids this process may run on, ascending; always online ones.
        allowed_memory_nodes: ids of nodes this process may bind memory to, ascending; empty where the kernel
            has no NUMA support, so that nobody asks it for what it cannot do.
        cpu_quota: how many CPUs' time a cgroup leaves this process (cpu.max); None without a limit.
        isolated_cpus: ids of CPUs among which the kernel moves no threads (isolcpus=), ascending.
    """

    cpus: tuple[Cpu, ...]
    nodes: tuple[NumaNode, ...]
    allowed_cpus: tuple[int, ...]
    allowed_memory_nodes: tuple[int, ...]
    cpu_quota: float | None = None
    isolated_cpus: tuple[int, ...] = ()

    def cpu(self, cpu_id: int) -> Cpu | None:
        """The online logical CPU of this id, or None."""
        return next((cpu for cpu in self.cpus if cpu.id == cpu_id), None)

    def node(self, node_id: int) -> NumaNode | None:
        """The node of this id, or None."""
        return next((node for node in self.nodes if node.id == node_id), None)

    def cores(self) -> tuple[Cpu, ...]:
        """One logical CPU (the lowest allowed) of each physical core that has an allowed one, ascending."""
        allowed = set(self.allowed_cpus)
        first: dict[int, Cpu] = {}
        for cpu in self.cpus:
            if cpu.id in allowed:
                first.setdefault(cpu.core, cpu)
        return tuple(sorted(first.values(), key=lambda cpu: cpu.id))

    def nodes_with_cores(self) -> dict[int, tuple[Cpu, ...]]:
        """`cores()` by node id, only of nodes that have some; nodes of one package come together."""
        by_node: dict[int, list[Cpu]] = {}
        for cpu in self.cores():
            by_node.setdefault(cpu.node, []).append(cpu)
        order = sorted(by_node, key=lambda node: (by_node[node][0].package, node))
        return {node: tuple(by_node[node]) for node in order}

    def nearest_nodes(self, node_id: int) -> tuple[int, ...]:
        """The nodes with cores that a node is closest to, itself where it has cores.

        What the firmware names as initiators wins over the distance table. Empty where nothing tells.
        """
        node = self.node(node_id)
        if node is None:
            return ()
        with_cores = [other.id for other in self.nodes if other.cpus]
        if node_id in with_cores:
            return (node_id,)
        named = tuple(other for other in with_cores if other in node.initiators)
        if named:
            return named
        known = {other: node.distances[other] for other in with_cores if other in node.distances}
        return tuple(other for other, distance in known.items() if distance == min(known.values()))

    def memory_near(self, node_id: int, kind: str | None = None) -> tuple[NumaNode, ...]:
        """The nodes without cores whose memory is closest to this node, the nearest first.

        Args:
            kind: only memory of this kind, such as "hbm".
        """
        found = [
            node
            for node in self.nodes
            if node.memory_bytes and not node.cpus and node_id in self.nearest_nodes(node.id)
            if kind is None or node.memory_kind == kind
        ]
        return tuple(sorted(found, key=lambda node: node.distances.get(node_id, 1 << 16)))

    def summary(self) -> str:
        """The topology in one line."""
        packages = len({cpu.package for cpu in self.cpus})
        cores = len({cpu.core for cpu in self.cpus})
        threads = sorted({len(cpu.siblings) or 1 for cpu in self.cpus})
        each = f"{threads[0]}" if len(threads) == 1 else f"{threads[0]}-{threads[-1]}"
        return (
            f"{counted(packages, 'package')}, {counted(len(self.nodes), 'NUMA node')} ({self._memory()}), "
            f"{counted(cores, 'core')}, {each} {'thread' if each == '1' else 'threads'} each; "
            f"allowed: {format_cpu_list(self.allowed_cpus)}"
            + (f", and {self.cpu_quota:g} CPUs' time (cpu.max)" if self.cpu_quota is not None else "")
        )

    def _memory(self) -> str:
        sizes = [node.memory_bytes for node in self.nodes]
        if len(sizes) > 4:
            return f"{_gib(sum(sizes))} in all"
        return ", ".join(map(_gib, sizes))


def counted(number: int, noun: str) -> str:
    """A number with its noun, which gets an s where it is not 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size else "no memory"
