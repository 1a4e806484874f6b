# SPDX-License-Identifier: Apache-2.0
"""What `anyaccel topo` shows: a machine arranged for drawing, in words, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from anyaccel.topology import Cpu, Machine, NumaNode
from anyaccel.topology.details import Cache, Details, PciDevice
from anyaccel.topology.model import MEMORY_KINDS


@dataclass(frozen=True)
class RankCores:
    """What one rank gets.

    Attributes:
        rank: its number.
        cpus: logical CPUs it is bound to; empty when it is not bound.
        memory: where its memory comes from, for people.
    """

    rank: int
    cpus: tuple[int, ...]
    memory: str


@dataclass(frozen=True)
class NodeBlock:
    """NUMA nodes that are drawn as one: a node, or several that show the same CPUs.

    Attributes:
        nodes: at least one, ascending.
        cores: all threads of each of their cores, by lowest thread.
        memory: nodes without cores that are the nearest to this one alone.
        devices: accelerators that are attached to it.
    """

    nodes: tuple[NumaNode, ...]
    cores: tuple[tuple[Cpu, ...], ...]
    memory: tuple[NumaNode, ...]
    devices: tuple[PciDevice, ...]

    @property
    def name(self) -> str:
        """Such as "node 0" or "nodes 0-3"."""
        return f"node{'s' if len(self.nodes) > 1 else ''} {short_list(node.id for node in self.nodes)}"

    @property
    def cpus(self) -> frozenset[int]:
        """Its logical CPUs."""
        return frozenset(cpu.id for core in self.cores for cpu in core)


@dataclass(frozen=True)
class Section:
    """Packages that are drawn as one: a package, or several with a NUMA node in common."""

    packages: tuple[int, ...]
    blocks: tuple[NodeBlock, ...]

    @property
    def name(self) -> str:
        """Such as "package 0"."""
        return f"package{'s' if len(self.packages) > 1 else ''} {short_list(self.packages)}"

    @property
    def cpus(self) -> frozenset[int]:
        """Its logical CPUs."""
        return frozenset().union(*(block.cpus for block in self.blocks))


@dataclass(frozen=True)
class MachineLayout:
    """A machine, arranged for drawing.

    Attributes:
        sections: by lowest package.
        far_memory: nodes with memory and without cores that are not the nearest of one node alone.
        empty: nodes with neither.
        far_devices: accelerators of no known node.
    """

    sections: tuple[Section, ...]
    far_memory: tuple[NumaNode, ...]
    empty: tuple[NumaNode, ...]
    far_devices: tuple[PciDevice, ...]


def arrange(machine: Machine, details: Details) -> MachineLayout:
    """Sort everything of a machine into the place where it is drawn."""
    cores: dict[int, dict[int, list[Cpu]]] = {}
    for cpu in machine.cpus:
        cores.setdefault(cpu.node, {}).setdefault(cpu.core, []).append(cpu)
    # Nodes that were cut out of one (fake NUMA) all show its CPUs; each CPU names the first of them.
    same: dict[object, list[NumaNode]] = {}
    for node in machine.nodes:
        if node.cpus or node.id in cores:
            same.setdefault(node.cpus or node.id, []).append(node)
    memory = {
        node.id: machine.nearest_nodes(node.id)
        for node in machine.nodes
        if node.memory_bytes and not node.cpus and node.id not in cores
    }

    blocks, placed = [], set()
    for nodes in same.values():
        ids = {node.id for node in nodes}
        threads = [core for node in nodes for core in cores.get(node.id, {}).values()]
        if not threads:
            continue
        near = tuple(n for n in machine.nodes if n.id in memory and memory[n.id] and set(memory[n.id]) <= ids)
        # A GPU whose memory is a node without cores is attached to that node, not to the one that is drawn.
        around = ids.union(node.id for node in near)
        devices = tuple(device for device in details.devices if device.node in around)
        ordered = sorted((tuple(core) for core in threads), key=lambda core: (core[0].package, core[0].id))
        blocks.append(NodeBlock(tuple(nodes), tuple(ordered), near, devices))
        placed |= {*(node.id for node in near), *(device.address for device in devices)}

    sections: list[tuple[set[int], list[NodeBlock]]] = []
    for block in blocks:
        packages = {cpu.package for core in block.cores for cpu in core}
        joined = [section for section in sections if section[0] & packages]
        for section in joined:
            sections.remove(section)
        sections.append(
            (packages.union(*(s[0] for s in joined)), [b for s in joined for b in s[1]] + [block]),
        )
    ordered_sections = sorted(sections, key=lambda section: min(section[0]))
    return MachineLayout(
        tuple(Section(tuple(sorted(packages)), tuple(inside)) for packages, inside in ordered_sections),
        tuple(node for node in machine.nodes if node.id in memory and node.id not in placed),
        tuple(n for n in machine.nodes if not n.memory_bytes and not n.cpus and n.id not in cores),
        tuple(device for device in details.devices if device.address not in placed),
    )


def to_dict(machine: Machine, details: Details) -> dict[str, Any]:
    """The whole machine in types that JSON has: sizes in bytes, CPUs and nodes by the kernel's numbers."""
    return {
        "summary": machine.summary(),
        "model_name": details.model_name,
        "allowed_cpus": list(machine.allowed_cpus),
        "allowed_memory_nodes": list(machine.allowed_memory_nodes),
        "offline_cpus": list(details.offline_cpus),
        "cpus": [
            {
                "id": cpu.id,
                "package": cpu.package,
                "die": cpu.die,
                "core": cpu.core,
                "core_id": cpu.core_id,
                "node": cpu.node,
                "siblings": list(cpu.siblings),
                "kind": cpu.kind or None,
            }
            for cpu in machine.cpus
        ],
        "nodes": [
            {
                "id": node.id,
                "cpus": list(node.cpus),
                "memory_bytes": node.memory_bytes,
                "memory_kind": node.memory_kind or None,
                "memory_evidence": node.memory_evidence or None,
                "memory_cache_bytes": details.memory_caches.get(node.id, 0),
                "nearest_nodes": list(machine.nearest_nodes(node.id)),
                "distances": {str(other): distance for other, distance in node.distances.items()},
            }
            for node in machine.nodes
        ],
        "caches": [
            {"name": cache.name, "level": cache.level, "type": cache.type, "size_bytes": cache.size_bytes}
            | {"cpus": list(cache.cpus)}
            for cache in details.caches
        ],
        "devices": [
            {
                "address": device.address,
                "vendor": device.vendor,
                "device": device.device,
                "label": device.label,
                "kind": device.kind,
                "console": device.is_console,
                "node": device.node,
                "driver": device.driver or None,
            }
            for device in details.devices
        ],
    }


def core_groups(block: NodeBlock, caches: Iterable[Cache]) -> list[list[tuple[Cpu, ...]]]:
    """The cores of a block, those together that share a cache (the widest that not all share) and are of a kind."""
    widest: dict[int, int] = {}
    for number, cache in enumerate(sorted(caches, key=lambda cache: len(cache.cpus))):
        members = block.cpus.intersection(cache.cpus)
        if len(members) < len(block.cpus):
            widest.update(dict.fromkeys(members, number))
    groups: dict[tuple[str, int], list[tuple[Cpu, ...]]] = {}
    private = {number for number in widest.values() if _cores_of(block, widest, number) < 2}
    for core in block.cores:
        number = widest.get(core[0].id, -1)
        groups.setdefault((core[0].kind, -1 if number in private else number), []).append(core)
    return list(groups.values())


def _cores_of(block: NodeBlock, widest: dict[int, int], number: int) -> int:
    return sum(widest.get(core[0].id) == number for core in block.cores)


def describe_cores(cores: Sequence[Sequence[Cpu]]) -> str:
    """Such as "14 cores × 2 threads", or "8 performance cores × 2 threads, 16 efficiency cores"."""
    counts: dict[tuple[str, int], int] = {}
    for core in cores:
        key = (core[0].kind, len(core))
        counts[key] = counts.get(key, 0) + 1
    return ", ".join(
        count_text(count, f"{kind} core" if kind else "core") + (f" × {threads} threads" if threads > 1 else "")
        for (kind, threads), count in counts.items()
    )


def describe_threads(cores: Sequence[Sequence[Cpu]]) -> str:
    """The logical CPUs of the cores: their first threads, then the others, as short as it can be said."""
    threads = max(map(len, cores))
    everything = short_list(sorted(cpu.id for core in cores for cpu in core))
    if threads == 1:
        return everything
    if all(core[-1].id - core[0].id == len(core) - 1 for core in cores):
        return f"{everything}, threads of a core side by side"
    rows = [short_list([core[thread].id for core in cores if thread < len(core)]) for thread in range(threads)]
    return "; ".join([rows[0], *(f"thread {number}: {row}" for number, row in enumerate(rows[1:], 2))])


def describe_caches(caches: Iterable[Cache], cores: Sequence[Sequence[Cpu]]) -> list[str]:
    """Such as "a core: L1d 32 KiB, L2 2 MiB" and "2 × L3 32 MiB for 8 cores each"."""
    core_of = {cpu.id: core[0] for core in cores for cpu in core}
    counts: dict[tuple[str, int, int, str], int] = {}
    for cache in caches:
        sharers = {core_of[cpu].core: core_of[cpu].kind for cpu in cache.cpus if cpu in core_of}
        kinds = set(sharers.values())
        key = (cache.name, cache.size_bytes, len(sharers), kinds.pop() if len(kinds) == 1 else "")
        counts[key] = counts.get(key, 0) + 1

    private: dict[str, list[str]] = {}
    shared = []
    for (name, size, members, kind), count in counts.items():
        what = f"{name} {size_text(size)}".rstrip()
        alike = sum(core[0].kind == kind for core in cores)
        core = f"{kind} core".lstrip()
        if members == 1 and count % alike == 0:
            private.setdefault(core, []).append(what if count == alike else f"{count // alike} × {what}")
        elif count == 1:
            shared.append(f"{what} for {'all' if members == len(cores) else count_text(members, core)}")
        else:
            shared.append(f"{count} × {what} for {count_text(members, core)} each")
    each = [f"{'an' if core[0] == 'e' else 'a'} {core}: {', '.join(names)}" for core, names in private.items()]
    return [*each, *shared]


def describe_share(share: RankCores) -> str:
    """What a rank gets, for people."""
    if not share.cpus:
        return "any core"
    return f"CPU{'' if len(share.cpus) == 1 else 's'} {short_list(share.cpus)}, {share.memory}"


def memory_name(node: NumaNode) -> str:
    """What people call the memory of a node without cores that could be used."""
    if node.offline_cpus:
        return f"memory, all of its CPUs ({short_list(node.offline_cpus)}) are off-line"
    return MEMORY_KINDS.get(node.memory_kind, "memory of unknown kind") + ", no cores"


def describe_device(device: PciDevice) -> str:
    """A device, for people."""
    what = "console" if device.is_console else {"display": "graphics"}.get(device.kind, device.kind)
    where = "" if device.node is not None or device.is_console else ", its node is not known"
    return f"{what} {device.address}: {device.label}{f', driver {device.driver}' if device.driver else ''}{where}"


def short_list(numbers: Iterable[int]) -> str:
    """As `format_cpu_list`, and with steps: ``(0, 2, 4, 6)`` is "0-6 step 2"."""
    left = list(numbers)
    parts = []
    while left:
        step = left[1] - left[0] if len(left) > 1 else 0
        size = 1
        while step > 0 and size < len(left) and left[size] - left[size - 1] == step:
            size += 1
        if size < (2 if step == 1 else 4):
            size = 1
        end = "" if size == 1 else f"-{left[size - 1]}" + (f" step {step}" if step > 1 else "")
        parts.append(f"{left[0]}{end}")
        del left[:size]
    return ", ".join(parts) if any(" " in part for part in parts) else ",".join(parts)


def size_text(size: int) -> str:
    """A size as people write it; "" for none."""
    if not size:
        return ""
    unit, name = next(((u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB")) if size >= u), (2**10, "KiB"))
    return f"{size / unit:.4g} {name}" if unit < 2**30 else f"{size / unit:.1f} {name}"


def count_text(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
