# SPDX-License-Identifier: Apache-2.0
"""Draws a machine as text: one character a core, which is the rank that gets it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from anyaccel.report.topo import (
    NodeBlock,
    RankCores,
    Section,
    arrange,
    core_groups,
    count_text,
    describe_caches,
    describe_cores,
    describe_device,
    describe_share,
    describe_threads,
    memory_name,
    short_list,
    size_text,
)
from anyaccel.topology import Cpu, Machine, NumaNode
from anyaccel.topology.details import Cache, Details

WIDTH = 100  # columns of a drawing that goes to a file or pipe
_CELLS_PER_LINE = 64
_MAX_DISTANCES = 16
# One character for the cores of a rank; more ranks than these share the last one.
_RANK_CELLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ#"
_IN_SIZES = re.compile(r" (?=(?:[\d.]+ )?[KMG]iB)")
_FREE, _LEFT, _FORBIDDEN, _SEVERAL = "■", "·", "x", "+"

_PLAIN = str.maketrans({"■": "o", "·": ".", "├": "|", "└": "`", "│": "|", "─": "-", "×": "x", "…": "..."})


def plain(text: str) -> str:
    """The same drawing for a terminal that has ASCII only."""
    return text.translate(_PLAIN).encode("ascii", "replace").decode()


def render(
    machine: Machine,
    details: Details,
    shares: Sequence[RankCores] = (),
    remarks: Sequence[str] = (),
    width: int = WIDTH,
) -> str:
    """The machine as text, without a newline at the end.

    Args:
        shares: what each rank gets, to be drawn into the cores.
        remarks: lines about that, below it.
        width: columns that a line may take.
    """
    return _Text(machine, details, shares, remarks, width).render()


class _Text:
    def __init__(
        self, machine: Machine, details: Details, shares: Sequence[RankCores], remarks: Sequence[str], width: int
    ) -> None:
        self.machine = machine
        self.details = details
        self.shares = shares
        self.remarks = remarks
        self.width = width
        self.layout = arrange(machine, details)
        self.allowed = set(machine.allowed_cpus)
        self.rank_of = {cpu: share.rank for share in shares for cpu in share.cpus}
        self.used_cells: set[str] = set()

    def render(self) -> str:
        lines = [_wrap(self.machine.summary(), "  ", self.width)]
        if self.details.model_name:
            lines.insert(0, self.details.model_name)
        for section in self.layout.sections:
            lines += ["", *self._section(section)]
        rest = [self._memory_line(node) for node in self.layout.far_memory]
        rest += [describe_device(device) for device in self.layout.far_devices]
        if self.layout.empty:
            rest.append(f"without cores and memory: node {short_list(node.id for node in self.layout.empty)}")
        if self.details.offline_cpus:
            rest.append(f"off-line: CPU {short_list(self.details.offline_cpus)}")
        if rest:
            lines += ["", *(_wrap(line, "  ", self.width) for line in rest)]
        lines += self._distances()
        if self.shares:
            lines += ["", *self._shares()]
        return "\n".join([*lines, "", *self._legend()])

    def _section(self, section: Section) -> list[str]:
        cores = [core for block in section.blocks for core in block.cores]
        inside = [block.cpus for block in section.blocks]
        shared = [c for c in self._caches(section.cpus) if not any(cpus.issuperset(c.cpus) for cpus in inside)]
        head = f"{section.name}: {', '.join([count_text(len(cores), 'core'), *describe_caches(shared, cores)])}"
        lines = _wrap(head, "  ", self.width).splitlines()
        for number, block in enumerate(section.blocks):
            last = number == len(section.blocks) - 1
            first, *others = self._block(block)
            lines.append(f"{'└' if last else '├'}─ {first}")
            lines += [f"{' ' if last else '│'}  {line}" for line in others]
        return lines

    def _block(self, block: NodeBlock) -> list[str]:
        sizes = [size_text(node.memory_bytes) or "no memory" for node in block.nodes]
        same = len(sizes) > 1 and len(set(sizes)) == 1
        memory = f"{len(sizes)} × {sizes[0]}" if same else " + ".join(sizes)
        cached = sum(self.details.memory_caches.get(node.id, 0) for node in block.nodes)
        head = f"{block.name}: {memory}, {describe_cores(block.cores)}"
        head += f", {size_text(cached)} of memory-side cache" if cached else ""
        head += ", all with the same cores" if len(block.nodes) > 1 else ""
        lines = [*_wrap(head, "  ", self.width - 3).splitlines(), *(f"   {line}" for line in self._cells(block))]
        facts = [f"CPUs {describe_threads(block.cores)}"]
        caches = describe_caches([c for c in self._caches(block.cpus) if block.cpus.issuperset(c.cpus)], block.cores)
        facts += ["; ".join(caches)] if caches else []
        facts += [self._memory_line(node) for node in block.memory]
        facts += [describe_device(device) for device in block.devices]
        return _flat([lines, *(_wrap(fact, "  ", self.width - 6).splitlines() for fact in facts)], "   ")

    def _caches(self, cpus: frozenset[int]) -> list[Cache]:
        return [cache for cache in self.details.caches if cpus.intersection(cache.cpus)]

    def _cells(self, block: NodeBlock) -> list[str]:
        """One character a core, in groups that share a cache or are of a kind, else of eight."""
        groups = [group for part in core_groups(block, self.details.caches) for group in _chunks(part, 8)]
        lines, line = [], ""
        for group in groups:
            cells = "".join(self._cell(core) for core in group)
            if line and len(line) + len(cells) > min(_CELLS_PER_LINE + 7, self.width - 6):
                lines.append(line)
                line = ""
            line += f"{' ' if line else ''}{cells}"
        return [*lines, line]

    def _cell(self, core: Sequence[Cpu]) -> str:
        ranks = {self.rank_of[cpu.id] for cpu in core if cpu.id in self.rank_of}
        if len(ranks) == 1:
            return _RANK_CELLS[min(*ranks, len(_RANK_CELLS) - 1)]
        free = _LEFT if self.rank_of else _FREE
        cell = _SEVERAL if ranks else free if any(cpu.id in self.allowed for cpu in core) else _FORBIDDEN
        self.used_cells.add(cell)
        return cell

    def _memory_line(self, node: NumaNode) -> str:
        near = self.machine.nearest_nodes(node.id)
        where = f", nearest to node {short_list(near)}" if near else ""
        why = f" ({node.memory_evidence})" if node.memory_evidence else ""
        return f"node {node.id}: {size_text(node.memory_bytes)} {memory_name(node)}{where}{why}"

    def _distances(self) -> list[str]:
        nodes = [node for node in self.machine.nodes if node.distances]
        if not 1 < len(nodes) <= _MAX_DISTANCES:
            return []
        columns = [node.id for node in nodes]
        rows = [["distance", *map(str, columns)]]
        rows += [[f"node {node.id}", *(str(node.distances.get(other, "?")) for other in columns)] for node in nodes]
        width = max(len(cell) for row in rows for cell in row[1:]) + 2
        return ["", *(f"{row[0]:8}" + "".join(f"{cell:>{width}}" for cell in row[1:]) for row in rows)]

    def _shares(self) -> list[str]:
        width = max(len(str(share.rank)) for share in self.shares)
        lines = (f"rank {share.rank:{width}}: {describe_share(share)}" for share in self.shares)
        drawn = [_wrap(line, " " * (width + 7), self.width) for line in lines]
        return drawn + [_wrap(line, "  ", self.width) for line in self.remarks]

    def _legend(self) -> list[str]:
        meanings = {
            _FREE: "a core that this process may use",
            _LEFT: "given to nobody",
            _FORBIDDEN: "a core that this process may not use",
            _SEVERAL: "a core of several ranks",
        }
        parts = ["one character a core"]
        if self.rank_of:
            parts.append("digits and letters are the rank that gets it")
        parts += [f"{cell} {meaning}" for cell, meaning in meanings.items() if cell in self.used_cells]
        return [_wrap(f"({'; '.join(parts)})", " ", self.width)]


def _chunks(items: list[tuple[Cpu, ...]], size: int) -> list[list[tuple[Cpu, ...]]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _wrap(text: str, indent: str, width: int) -> str:
    # A list of numbers without spaces may be longer than a line: let it break after a comma.
    if len(text) <= width:
        return text
    text = _IN_SIZES.sub("\u00a0", text.replace(",", ", ").replace(",  ", ", "))
    return textwrap.fill(text, width, subsequent_indent=indent, break_on_hyphens=False).replace("\u00a0", " ")


def _flat(parts: list[list[str]], indent: str) -> list[str]:
    first, *others = parts
    return [*first, *(f"{indent}{line}" for part in others for line in part)]
