# SPDX-License-Identifier: Apache-2.0
"""Draws a machine as one SVG file: packages, nodes, cores with their threads and caches, ranks in colour."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from xml.etree import ElementTree as ET

from anyaccel.report.topo import (
    MachineLayout,
    NodeBlock,
    RankCores,
    Section,
    arrange,
    core_groups,
    describe_caches,
    describe_cores,
    describe_device,
    describe_share,
    memory_name,
    short_list,
    size_text,
)
from anyaccel.report.topo_boxes import (
    INK,
    LINE,
    MUTED,
    Box,
    badge,
    clean,
    emit,
    flow,
    framed,
    grid,
    ink_on,
    line,
    num,
    rank_colour,
    shortened,
    stack,
    swatch,
    text_width,
    tint,
)
from anyaccel.topology import Cpu, Machine, NumaNode
from anyaccel.topology.details import Cache, Details
from anyaccel.topology.model import MEMORY_KINDS

_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
_PAPER, _PACKAGE, _NODE = "#ffffff", "#f5f7fa", "#ffffff"
_FREE, _FORBIDDEN = "#dfe5eb", "#fafafa"
_CACHES = {1: "#b8c4ce", 2: "#8fa3b3", 3: "#627d98", 4: "#486581"}
_MEMORIES = {"": "#7bb38a", "hbm": "#9b6bc3", "cxl": "#d9924a", "pmem": "#b98b5e", "gpu": "#5b9bb5", "slow": "#d9924a"}
_THREAD, _GAP = 24.0, 4.0


def render_svg(machine: Machine, details: Details, shares: Sequence[RankCores] = ()) -> str:
    """The machine as an SVG document.

    Args:
        shares: what each rank gets; its cores have its colour.
    """
    return _Picture(machine, details, shares).render()


class _Picture:
    def __init__(self, machine: Machine, details: Details, shares: Sequence[RankCores]) -> None:
        self.machine = machine
        self.details = details
        self.shares = shares
        self.layout: MachineLayout = arrange(machine, details)
        self.allowed = set(machine.allowed_cpus)
        self.rank_of = {cpu: share.rank for share in shares for cpu in share.cpus}
        self.largest = max((node.memory_bytes for node in machine.nodes), default=0) or 1
        self.lent = {cpu.core: self.rank_of[cpu.id] for cpu in machine.cpus if cpu.id in self.rank_of}

    def render(self) -> str:
        body = grid([self._section(section) for section in self.layout.sections], 16, 2.4, stretch=True)
        title = self.details.model_name or "Machine"
        legend = self._legend(max(body.width, 720))
        summary = stack([line(text, 13, MUTED) for text in self._summary(max(body.width, 720))], 2)
        width = max(body.width, legend.width, summary.width, text_width(title, 20)) + 48
        top = 49 + summary.height + 14
        height = top + body.height + 20 + legend.height + 24
        root = ET.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "width": num(width),
                "height": num(height),
                "viewBox": f"0 0 {num(width)} {num(height)}",
                "font-family": _FONT,
                "role": "img",
            },
        )
        ET.SubElement(root, "title").text = clean(f"{title}: {self.machine.summary()}")
        page = Box(width, height)
        page.rect(0, 0, width, height, _PAPER)
        page.text(24, 40, title, 20, font_weight="600")
        page.children = [(24, 49, summary), (24, top, body), (24, top + body.height + 20, legend)]
        emit(root, page, 0, 0)
        ET.indent(root, " ")
        return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"

    def _summary(self, width: float) -> list[str]:
        text = self.machine.summary()
        # Lines are broken at spaces, and a list of CPUs has none but may be longer than a line.
        return textwrap.wrap(text.replace(",", ", ").replace(",  ", ", "), round(width / 7)) or [text]

    # packages, nodes

    def _section(self, section: Section) -> Box:
        shared = self._between(section.cpus, [block.cpus for block in section.blocks])
        blocks = grid([self._block(block) for block in section.blocks], 10, 1.5, stretch=True)
        return framed(section.name, self._under(blocks, shared), _PACKAGE, 15, radius=10)

    def _block(self, block: NodeBlock) -> Box:
        groups = core_groups(block, self.details.caches)
        rows = [self._memory(node, named=len(block.nodes) > 1) for node in block.nodes]
        rows += [self._memory(node, alone=True) for node in block.memory]
        cached = sum(self.details.memory_caches.get(node.id, 0) for node in block.nodes)
        notes = [describe_cores(block.cores), *([f"memory-side cache {size_text(cached)}"] if cached else [])]
        notes += describe_caches([c for c in self.details.caches if self._is_private(c, block)], block.cores)
        rows += [line(note, 11, MUTED) for note in notes]
        below = [badge(describe_device(device)) for device in block.devices]
        room = max(row.width for row in [*rows, *below])

        clusters = [self._cluster(group, block, room / len(groups)) for group in groups]
        area = sum(cluster.width * cluster.height for cluster in clusters)
        alike = len({(cluster.width, cluster.height) for cluster in clusters}) == 1
        cores = grid(clusters, 8, 2.4, room=room) if alike else flow(clusters, 8, max(room, 1.7 * math.sqrt(area)))
        own = self._between(block.cpus, [frozenset(c.id for core in g for c in core) for g in groups])
        rows += [self._under(cores, own), *below]
        return framed(block.name, stack(rows, 6), _NODE, 13, radius=8)

    def _memory(self, node: NumaNode, alone: bool = False, named: bool = False) -> Box:
        text = size_text(node.memory_bytes) or "no memory"
        if alone:
            text = f"{text} {memory_name(node)}"
        if alone or named:
            text = f"node {node.id}: {text}"
        bar = 30 + 90 * node.memory_bytes / self.largest
        box = Box(bar + 8 + text_width(text, 11), 14)
        if node.memory_bytes:
            fill = _MEMORIES.get(node.memory_kind, _MEMORIES[""]) if not alone or node.memory_kind else LINE
            box.rect(0, 1, bar, 12, fill, rx="3", title=node.memory_evidence)
        box.text(bar + 8 if node.memory_bytes else 0, 11, text, 11)
        return box

    # cores, caches

    def _cluster(self, group: Sequence[Sequence[Cpu]], block: NodeBlock, room: float) -> Box:
        """Cores that share a cache, with that cache below them."""
        cpus = frozenset(cpu.id for core in group for cpu in core)
        box = grid([self._core(core) for core in group], 5, 2.6, room=room)
        return self._under(box, self._between(cpus, [frozenset(c.id for c in core) for core in group]))

    def _between(self, cpus: frozenset[int], parts: Sequence[frozenset[int]]) -> list[Cache]:
        """Caches that CPUs of several parts share, and no CPU outside of `cpus`."""
        return [
            cache
            for cache in self.details.caches
            if cpus.issuperset(cache.cpus) and not any(part.issuperset(cache.cpus) for part in parts)
        ]

    def _is_private(self, cache: Cache, block: NodeBlock) -> bool:
        return any({cpu.id for cpu in core}.issuperset(cache.cpus) for core in block.cores)

    def _core(self, core: Sequence[Cpu]) -> Box:
        """A frame around its threads, with a thin bar for each level of cache that it has for itself."""
        threads = len(core)
        columns = 1 if threads == 1 else 2 if threads <= 4 else 4
        rows = math.ceil(threads / columns)
        ids = {cpu.id for cpu in core}
        levels = sorted({cache.level for cache in self.details.caches if ids.issuperset(cache.cpus)})
        box = Box(columns * _THREAD + 4, rows * _THREAD + 4 + 4 * len(levels))
        radius = "9" if core[0].kind == "efficiency" else "4"
        box.rect(0, 0, box.width, box.height, "#eef1f5", rx=radius, stroke=LINE, stroke_width="0.8")
        for number, cpu in enumerate(core):
            x, y = 2 + number % columns * _THREAD, 2 + number // columns * _THREAD
            fill, ink, more = self._colour(cpu)
            title = f"CPU {cpu.id}, core {cpu.core}, node {cpu.node}, package {cpu.package}{more}"
            dashes = {} if cpu.id in self.allowed else {"stroke": LINE, "stroke_dasharray": "2 2"}
            box.rect(
                x + 1, y + 1, _THREAD - 2, _THREAD - 2, fill, rx=str(int(radius) - 2), title=clean(title), **dashes
            )
            box.text(x + _THREAD / 2, y + _THREAD / 2 + 3.2, str(cpu.id), 9, ink, text_anchor="middle")
        for number, level in enumerate(levels):
            y = rows * _THREAD + 3 + 4 * number
            box.rect(3, y, box.width - 6, 3, _CACHES[min(level, 4)], rx="1")
        return box

    def _colour(self, cpu: Cpu) -> tuple[str, str, str]:
        """Fill and ink of a logical CPU, and what its tooltip adds."""
        kind = f", {cpu.kind} core" if cpu.kind else ""
        if cpu.id in self.rank_of:
            rank = self.rank_of[cpu.id]
            fill = rank_colour(rank)
            return fill, ink_on(fill), f"{kind}, rank {rank}"
        if cpu.id not in self.allowed:
            return _FORBIDDEN, LINE, f"{kind}, not allowed"
        if cpu.core in self.lent:
            rank = self.lent[cpu.core]
            return tint(rank_colour(rank)), INK, f"{kind}, left idle beside rank {rank}"
        return _FREE, INK, kind

    def _under(self, box: Box, caches: Sequence[Cache]) -> Box:
        """The box with a bar below for each of the caches, those of a level side by side."""
        levels: dict[str, list[Cache]] = {}
        for cache in caches:
            levels.setdefault(cache.name, []).append(cache)
        if not levels:
            return box
        labels = {cache: f"{cache.name} {size_text(cache.size_bytes)}".strip() for cache in caches}
        needed = max(sum(text_width(labels[cache], 10) + 14 for cache in row) for row in levels.values())
        outer = Box(max(box.width, needed), box.height + 20 * len(levels), [(0, 0, box)])
        for number, row in enumerate(levels.values()):
            step = (outer.width + _GAP) / len(row)
            y = box.height + 4 + 20 * number
            for place, cache in enumerate(row):
                fill = _CACHES[min(cache.level, 4)]
                outer.rect(place * step, y, step - _GAP, 16, fill, rx="3")
                middle = place * step + (step - _GAP) / 2
                outer.text(middle, y + 12, labels[cache], 10, ink_on(fill), text_anchor="middle")
        return outer

    # legend

    def _legend(self, width: float) -> Box:
        rows: list[Box] = []
        if self.rank_of:
            rows.append(
                grid(
                    [
                        swatch(rank_colour(share.rank), shortened(f"rank {share.rank}: {describe_share(share)}"))
                        for share in self.shares
                    ],
                    14,
                    width / 60,
                    limit=width,
                )
            )
        keys = []
        if any(self._colour(cpu)[0] == _FREE for cpu in self.machine.cpus):
            keys.append(swatch(_FREE, "given to nobody" if self.rank_of else "a logical CPU that may be used"))
        if any(cpu.id not in self.rank_of and cpu.core in self.lent for cpu in self.machine.cpus):
            keys.append(swatch(tint(rank_colour(0)), "other thread of a core in use"))
        if any(cpu.id not in self.allowed for cpu in self.machine.cpus):
            keys.append(swatch(_FORBIDDEN, "not allowed to this process", dashed=True))
        if any(cpu.kind == "efficiency" for cpu in self.machine.cpus):
            keys.append(swatch("#eef1f5", "round: efficiency core", radius="7"))
        levels = sorted({min(cache.level, 4) for cache in self.details.caches})
        keys += [swatch(_CACHES[level], f"L{level} cache") for level in levels]
        kinds = {node.memory_kind for node in self.machine.nodes if node.memory_kind}
        keys += [swatch(_MEMORIES[""], "memory")]
        keys += [swatch(_MEMORIES[kind], MEMORY_KINDS[kind]) for kind in sorted(kinds)]
        rows.append(flow(keys, 18, width))
        rows += [self._memory(node, alone=True) for node in self.layout.far_memory]
        rows += [badge(describe_device(device)) for device in self.layout.far_devices]
        if self.details.offline_cpus:
            rows.append(line(shortened(f"off-line: CPU {short_list(self.details.offline_cpus)}"), 11, MUTED))
        if self.layout.empty:
            names = short_list(node.id for node in self.layout.empty)
            rows.append(line(f"without cores and memory: node {names}", 11, MUTED))
        return stack(rows, 10)
