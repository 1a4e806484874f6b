# SPDX-License-Identifier: Apache-2.0
"""Steps of single tokens as graphs of the accelerator: captured once a bucket of batch and context, then replayed.

A device that declares no graphs runs the same code as it is called. What a replay reads lies in tensors of the graph's
own that are written before it; the cache's tensors are where they are until they grow, and then all graphs go.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyaccel.accelerator import Capability, get_accelerator
from anyaccel.inference.device.batch import Batch, Group, Segment, angles_of
from anyaccel.inference.device.decoder import Decoder
from anyaccel.inference.device.pages import PAGE, WASTE_ROW, KvPages
from anyaccel.inference.device.parts import GATHERED
from anyaccel.inference.spec.decoder import Moe

MOST_GRAPHS = 32  # each keeps the activations of its step; the one that was used longest ago goes
_MOST_SEQUENCES = 64
_LEAST_PAGES = 4


@dataclass
class _Captured:
    graph: Any
    inputs: torch.Tensor
    batch: Batch
    residuals: torch.Tensor


class Graphs:
    """The graphs of one model. `taken` and `captured` count what was replayed and made."""

    def __init__(self, decoder: Decoder, cache: KvPages, device: torch.device) -> None:
        self._decoder, self._cache, self._device = decoder, cache, device
        self._kept: OrderedDict[tuple[int, int], _Captured] = OrderedDict()
        self._version = cache.version
        self.taken = self.captured = 0
        # Many tokens of a mixture of experts need counts on the host, which no graph can wait for.
        experts = any(isinstance(layer.mlp, Moe) for layer in decoder.spec.layers)
        self._most = GATHERED if experts else _MOST_SEQUENCES
        self.usable = get_accelerator().has(Capability.GRAPHS) and decoder.ranks is None

    def run(self, segments: Sequence[Segment]) -> torch.Tensor | None:
        """The residuals of single tokens; None for a batch that no graph takes."""
        if not self.usable or len(segments) > self._most or any(len(each.tokens) > 1 for each in segments):
            return None
        pages = [self._cache.pages(each.sequence) for each in segments]
        bucket = (_power(len(segments), 1), _power(max(map(len, pages)), _LEAST_PAGES))
        if self._version != self._cache.version:
            self.clear()
            self._version = self._cache.version
        found = self._kept.get(bucket)
        if found is None:
            found = self._kept[bucket] = self._prepared(*bucket)
            self._fill(found, segments, pages, *bucket)
            self._capture(found)
            while len(self._kept) > MOST_GRAPHS:
                _reset(self._kept.popitem(last=False)[1].graph)
        else:
            self._fill(found, segments, pages, *bucket)
        self._kept.move_to_end(bucket)
        get_accelerator().replay_graph(found.graph)
        self.taken += 1
        return found.residuals[: len(segments)]

    def clear(self) -> None:
        for each in self._kept.values():
            _reset(each.graph)
        self._kept.clear()

    def _prepared(self, count: int, pages: int) -> _Captured:
        """Inputs for so many sequences of so many pages, and the batch that reads them."""
        inputs = torch.zeros(3 * count + count * (pages + 1), dtype=torch.int64, device=self._device)
        tokens, positions, rows = inputs[: 3 * count].view(3, count)
        group = Group(0, count, 1, pages * PAGE, positions.view(count, 1), inputs[3 * count :], 0, "")
        angles = [rope.at(positions, 1) for rope in self._decoder.ropes]
        return _Captured(None, inputs, Batch(tokens, positions, rows, angles, [group]), inputs)

    def _fill(
        self, to: _Captured, segments: Sequence[Segment], pages: Sequence[list[int]], count: int, most: int
    ) -> None:
        """Write what this step reads; places without a sequence read page 0 and write to its waste row."""
        idle = count - len(segments)
        numbers = [each.tokens[0] for each in segments] + [0] * idle
        numbers += [each.start for each in segments] + [0] * idle
        numbers += [
            held[each.start // PAGE] * PAGE + each.start % PAGE for each, held in zip(segments, pages, strict=True)
        ]
        numbers += [WASTE_ROW] * idle
        for held in pages:
            numbers += held + [0] * (most + 1 - len(held))
        numbers += [0] * ((most + 1) * idle)
        to.inputs.copy_(torch.tensor(numbers, dtype=torch.int64), non_blocking=True)
        longest = max(each.start for each in segments) + 1
        for kept, rope in zip(to.batch.angles, self._decoder.ropes, strict=True):
            kept.copy_(angles_of(rope, segments, to.batch.positions, longest, self._device))

    def _capture(self, to: _Captured) -> None:
        accelerator = get_accelerator()
        (group,) = to.batch.groups
        self._decoder.run(to.batch)  # kernels must not be loaded within a capture; it writes what the replay writes
        # Masks are made anew, within the graph; slopes were copied from the host, which a graph cannot do.
        group.made = {key: value for key, value in group.made.items() if isinstance(key, tuple) and key[0] == "slopes"}
        accelerator.synchronize()
        to.graph = accelerator.create_graph()
        with accelerator.capture_to_graph(to.graph):
            to.residuals = self._decoder.run(to.batch)
        self.captured += 1


def _power(count: int, least: int) -> int:
    """The next power of two."""
    return max(least, 1 << (count - 1).bit_length())


def _reset(graph: Any) -> None:
    with contextlib.suppress(AttributeError):  # not every vendor's graph can be emptied
        graph.reset()
