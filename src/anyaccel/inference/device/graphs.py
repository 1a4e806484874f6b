# SPDX-License-Identifier: Apache-2.0
"""Steps of single tokens as graphs of the accelerator: captured once a bucket of batch and context, then replayed.

A device that declares no graphs runs the same code as it is called. What a replay reads lies in tensors of the graph's
own that are written before it; the cache's tensors are where they are until they grow, and then all graphs go.
All graphs compute in the same memory where the vendor's can share it, as only one is replayed at a time: together they
take what the largest step takes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyaccel.accelerator import Capability, get_accelerator
from anyaccel.inference.device.batch import Batch, Group, Segment, angles_of
from anyaccel.inference.device.capture import Captured, Interrupting
from anyaccel.inference.device.decoder import Decoder
from anyaccel.inference.device.pages import PAGE, WASTE_ROW, KvPages
from anyaccel.inference.device.parts import GATHERED
from anyaccel.inference.spec.decoder import Moe

MOST_GRAPHS = 32  # the one that was used longest ago goes
_MOST_SEQUENCES = 64
_LEAST_PAGES = 4


@dataclass(eq=False)
class _Step:
    inputs: torch.Tensor
    batch: Batch
    captured: Captured | None = None


class Graphs:
    """The graphs of one model.

    Attributes:
        taken, captured: how many steps were replayed, and how many graphs were made.
        bytes: what the kept ones have added to the memory that the device holds; 0 where it does not tell.
    """

    def __init__(
        self, decoder: Decoder, cache: KvPages, device: torch.device, ranks: Interrupting | None = None
    ) -> None:
        self._decoder, self._cache, self._device, self._ranks = decoder, cache, device, ranks
        self._kept: OrderedDict[tuple[int, int], _Step] = OrderedDict()
        self._pool: Any = None
        self.bytes = 0
        self._version = cache.version
        self.taken = self.captured = 0
        # Many tokens of a mixture of experts need counts on the host, which no graph can wait for.
        experts = any(isinstance(layer.mlp, Moe) for layer in decoder.spec.layers)
        self._most = GATHERED if experts else _MOST_SEQUENCES
        self.usable = get_accelerator().has(Capability.GRAPHS)

    def run(self, segments: Sequence[Segment], tokens: torch.Tensor | None = None) -> torch.Tensor | None:
        """The residuals of single tokens; None for a batch that no graph takes.

        Args:
            tokens: on the device, in the place of those of the segments.
        """
        if not self.usable or len(segments) > self._most or any(len(each.tokens) > 1 for each in segments):
            return None
        pages = [self._cache.pages(each.sequence) for each in segments]
        bucket = (_power(len(segments), 1), _power(max(map(len, pages)), _LEAST_PAGES))
        if self._version != self._cache.version:
            self.clear()
            self._version = self._cache.version
        found = self._kept.get(bucket)
        if found is None:
            found = self._prepared(*bucket)
            self._fill(found, segments, pages, *bucket)
            found.captured = self._capture(found.batch)
            self._kept[bucket] = found
            while len(self._kept) > MOST_GRAPHS:
                self._forget(self._kept.popitem(last=False)[1])
        captured = found.captured
        assert captured is not None
        self._fill(found, segments, pages, *bucket)
        if tokens is not None:
            found.batch.tokens[: len(tokens)].copy_(tokens)
        self._kept.move_to_end(bucket)
        captured.replay()
        self.taken += 1
        return captured.result[: len(segments)]

    def clear(self) -> None:
        while self._kept:
            self._forget(self._kept.popitem()[1])
        self._pool = None
        self.bytes = 0

    def _forget(self, step: _Step) -> None:
        assert step.captured is not None
        step.captured.reset()
        if step.captured.pool is None:  # what graphs share stays until all of them go
            self.bytes -= step.captured.bytes

    def _prepared(self, count: int, pages: int) -> _Step:
        """Inputs for so many sequences of so many pages, and the batch that reads them."""
        inputs = torch.zeros(4 * count + count * (pages + 1), dtype=torch.int64, device=self._device)
        tokens, positions, rows, states = inputs[: 4 * count].view(4, count)
        group = Group(0, count, 1, pages * PAGE, positions.view(count, 1), states, inputs[4 * count :], 0, "")
        angles = [rope.at(positions, 1) for rope in self._decoder.ropes]
        return _Step(inputs, Batch(tokens, positions, rows, angles, [group]))

    def _fill(self, to: _Step, segments: Sequence[Segment], pages: Sequence[list[int]], count: int, most: int) -> None:
        """Write what this step reads; places without a sequence have page 0 and state 0, of nobody."""
        idle = count - len(segments)
        numbers = [each.tokens[0] for each in segments] + [0] * idle
        numbers += [each.start for each in segments] + [0] * idle
        numbers += [
            held[each.start // PAGE] * PAGE + each.start % PAGE for each, held in zip(segments, pages, strict=True)
        ]
        numbers += [WASTE_ROW] * idle
        numbers += [self._cache.state(each.sequence) for each in segments] + [0] * idle
        for held in pages:
            numbers += held + [0] * (most + 1 - len(held))
        numbers += [0] * ((most + 1) * idle)
        to.inputs.copy_(torch.tensor(numbers, dtype=torch.int64), non_blocking=True)
        longest = max(each.start for each in segments) + 1
        for kept, rope in zip(to.batch.angles, self._decoder.ropes, strict=True):
            angles_of(rope, segments, to.batch.positions, longest, self._device, out=kept)

    def _capture(self, batch: Batch) -> Captured:
        (group,) = batch.groups
        group.states.zero_()  # the pass that counts is the replay, and states go on with each
        self._decoder.run(batch, self._cache)  # kernels must not be loaded within a capture
        # Masks are made anew, within the graph; slopes were copied from the host, which a graph cannot do.
        group.made = {key: value for key, value in group.made.items() if isinstance(key, tuple) and key[0] == "slopes"}
        get_accelerator().synchronize()
        made = Captured(lambda: self._decoder.run(batch, self._cache), self._ranks, self._pool)
        self._pool = made.pool
        self.captured += 1
        self.bytes += made.bytes
        return made


def _power(count: int, least: int) -> int:
    """The next power of two."""
    return max(least, 1 << (count - 1).bit_length())
