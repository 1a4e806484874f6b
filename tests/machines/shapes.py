# SPDX-License-Identifier: Apache-2.0
"""Topologies that machines are booted with, as arguments of qemu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from architecture import ARM64, X86, Architecture


@dataclass(frozen=True)
class Node:
    """A NUMA node.

    Attributes:
        cpus: as qemu numbers them, "0-3"; empty: memory only.
        megabytes: of memory; 0: none.
        initiator: the node whose cores are nearest, for a machine with a table of bandwidths (HMAT).
        bandwidth: in GB/s, as that table says it.
        cache: megabytes of a cache on the memory's side, such as HBM in cache mode.
    """

    cpus: str = ""
    megabytes: int = 768
    initiator: int | None = None
    bandwidth: int = 0
    cache: int = 0


@dataclass(frozen=True)
class Shape:
    """A machine.

    Attributes:
        smp: as qemu's -smp has it.
        nodes: empty: one, with all memory.
        distances: of nodes that are not 20 from each other.
        model: a processor of qemu's; "": the host's own.
        before: shell commands that are run after the boot.
        capacities: of the cores, as an arm64 device tree says them; empty: none.
        kernel: more words of the kernel's command line.
    """

    name: str
    smp: str
    nodes: tuple[Node, ...] = ()
    distances: Mapping[tuple[int, int], int] = field(default_factory=dict)
    model: str = ""
    before: tuple[str, ...] = ()
    megabytes: int = 3072
    architecture: Architecture = X86
    capacities: tuple[int, ...] = ()
    kernel: str = ""

    def arguments(self) -> list[str]:
        """qemu's, but for those of the processor and the devices."""
        hmat = any(node.bandwidth for node in self.nodes)
        found = ["-machine", f"{self.architecture.machine}{',hmat=on' if hmat else ''}", "-smp", self.smp]
        found += ["-m", f"{sum(node.megabytes for node in self.nodes) or self.megabytes}M"]
        for number, node in enumerate(self.nodes):
            numa = f"node,nodeid={number}"
            if node.megabytes:
                found += ["-object", f"memory-backend-ram,id=m{number},size={node.megabytes}M"]
                numa += f",memdev=m{number}"
            numa += f",cpus={node.cpus}" if node.cpus else ""
            numa += f",initiator={node.initiator}" if node.initiator is not None else ""
            found += ["-numa", numa]
        for (of, to), value in self.distances.items():
            found += ["-numa", f"dist,src={of},dst={to},val={value}"]
        if hmat:
            found += self._bandwidths()
        return found

    def _bandwidths(self) -> list[str]:
        found = []
        for number, node in enumerate(self.nodes):
            near = f"hmat-lb,initiator={node.initiator},target={number},hierarchy=memory,data-type=access-"
            found += ["-numa", f"{near}latency,latency=100", "-numa", f"{near}bandwidth,bandwidth={node.bandwidth}G"]
        for number, node in enumerate(self.nodes):
            if node.cache:
                size = f"size={node.cache}M,level=1,associativity=direct,policy=write-back,line=64"
                found += ["-numa", f"hmat-cache,node-id={number},{size}"]
        return found


def _even(sockets: int, cores: int, nodes: int, megabytes: int, threads: int = 1) -> tuple[Node, ...]:
    """Nodes that divide the CPUs evenly, in their order."""
    each = sockets * cores * threads // nodes
    return tuple(Node(f"{at * each}-{at * each + each - 1}", megabytes) for at in range(nodes))


def _flat(far: int, own: int, other: int) -> dict[tuple[int, int], int]:
    """Distances of two nodes of cores and a node of memory beside each."""
    return {(0, 1): far, (0, 2): own, (0, 3): other, (1, 2): other, (1, 3): own, (2, 3): other}


SHAPES = (
    Shape("one-node", "4,sockets=1,cores=4"),
    Shape("two-nodes", "8,sockets=2,cores=4", _even(2, 4, 2, 1536)),
    Shape("four-nodes", "8,sockets=4,cores=2", _even(4, 2, 4, 1024)),
    Shape("eight-nodes", "16,sockets=8,cores=2", _even(8, 2, 8, 512)),
    Shape("smt", "16,sockets=2,cores=4,threads=2", _even(2, 4, 2, 1536, threads=2), model="max,vendor=GenuineIntel"),
    Shape(
        "sub-numa",
        "8,sockets=2,cores=4",
        _even(2, 4, 4, 768),
        {(0, 1): 12, (2, 3): 12, (0, 2): 21, (0, 3): 21, (1, 2): 21, (1, 3): 21},
    ),
    Shape(
        "hbm-flat",
        "8,sockets=2,cores=4",
        (
            Node("0-3", 1024, 0, 100),
            Node("4-7", 1024, 1, 100),
            Node(megabytes=512, initiator=0, bandwidth=400),
            Node(megabytes=512, initiator=1, bandwidth=400),
        ),
        _flat(21, 13, 23),
    ),
    Shape(
        "hbm-cache",
        "8,sockets=2,cores=4",
        (Node("0-3", 1536, 0, 400, cache=256), Node("4-7", 1536, 1, 400, cache=256)),
    ),
    Shape(
        "far-memory",
        "8,sockets=2,cores=4",
        (
            Node("0-3", 1024, 0, 100),
            Node("4-7", 1024, 1, 100),
            Node(megabytes=1024, initiator=0, bandwidth=20),
        ),
        {(0, 1): 21, (0, 2): 28, (1, 2): 38},
    ),
    Shape("no-memory", "6,sockets=3,cores=2", (Node("0-1", 1536), Node("2-3", 0), Node("4-5", 1536))),
    Shape(
        "cores-offline",
        "8,sockets=2,cores=4",
        _even(2, 4, 2, 1536),
        before=("echo 0 > /sys/devices/system/cpu/cpu2/online", "echo 0 > /sys/devices/system/cpu/cpu5/online"),
    ),
    Shape(
        "isolated",
        "8,sockets=2,cores=4",
        (Node("0-3", 1024), Node("4-5", 1024), Node("6-7", 768)),
        before=("echo 0 > /sys/devices/system/cpu/cpu6/online", "echo 0 > /sys/devices/system/cpu/cpu7/online"),
        kernel="isolcpus=2-3 nohz_full=2-3",
    ),
    Shape(
        "uneven",
        "8,sockets=2,cores=4",
        (Node("0", 512), Node("1-3", 1024), Node("4-7", 2048)),
    ),
    Shape("core-complexes", "16,sockets=1,dies=4,cores=4", _even(1, 16, 1, 3072), model="max,+topoext"),
    Shape("many-cpus", "64,sockets=2,cores=32", _even(2, 32, 4, 1024)),
    Shape("arm64", "8,sockets=2,cores=4", _even(2, 4, 2, 1536), model="neoverse-n1", architecture=ARM64),
    Shape(
        "arm64-capacities",
        "6,sockets=1,clusters=2,cores=3",
        model="cortex-a72",
        architecture=ARM64,
        capacities=(446, 446, 446, 1024, 1024, 1024),
    ),
)
