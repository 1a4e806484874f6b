# SPDX-License-Identifier: Apache-2.0
"""From new tokens of sequences to their residuals: which of them pass at once, and what happens when that fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from anyaccel.inference.device.batch import Segment, make_batch, to_device
from anyaccel.inference.device.capture import Interrupting
from anyaccel.inference.device.decoder import Decoder
from anyaccel.inference.device.graphs import Graphs
from anyaccel.inference.device.pages import KvPages

# Tokens of prompts that pass at once: their activations should stay small beside the weights.
MOST_TOKENS = 1024


@dataclass
class Work:
    """New tokens of a sequence."""

    sequence: int
    tokens: Sequence[int]
    context: int


class Passes:
    """Runs work through a decoder."""

    def __init__(
        self, decoder: Decoder, cache: KvPages, device: torch.device, ranks: Interrupting | None = None
    ) -> None:
        self.decoder, self.cache, self.device = decoder, cache, device
        self.graphs = Graphs(decoder, cache, device, ranks)

    def residuals(self, work: Sequence[Work], wanted: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Compute all tokens; how many of the wanted ones each run has, and their residuals.

        When it fails, or is not taken to its end, the sequences are as they were.
        """
        starts = {each.sequence: self.cache.length(each.sequence) for each in work}
        self.cache.reserve(sum(self.cache.wanted(each.sequence, len(each.tokens)) for each in work))
        complete = False
        try:
            first = taken = 0
            for segments in self._runs(work):
                count = sum(len(each.tokens) for each in segments)
                rows = [index - first for index in wanted[taken:] if index < first + count]
                captured = self.graphs.run(segments)
                if captured is None:
                    batch = make_batch(segments, self.cache, self.decoder.ropes, self.device, self.decoder.sinks)
                    h = self.decoder.run(batch)
                else:
                    h = captured
                first += count
                taken += len(rows)
                if rows:
                    all_of_them = len(rows) == count
                    at = None if all_of_them else to_device(torch.tensor(rows, dtype=torch.int64), self.device)
                    yield len(rows), h if at is None else h.index_select(0, at)
            complete = True
        finally:
            if not complete:
                for sequence, start in starts.items():
                    if self.cache.length(sequence) > start:
                        self.cache.truncate(sequence, start)

    def _runs(self, work: Sequence[Work]) -> Iterator[list[Segment]]:
        """Work in runs of at most MOST_TOKENS tokens."""
        segments: list[Segment] = []
        room = MOST_TOKENS
        for each in work:
            taken = 0
            while taken < len(each.tokens):
                part = each.tokens[taken : taken + room]
                segments.append(
                    Segment(each.sequence, self.cache.length(each.sequence), part, each.context or len(part))
                )
                self.cache.extend(each.sequence, len(part))
                taken += len(part)
                room -= len(part)
                if room == 0:
                    yield segments
                    segments, room = [], MOST_TOKENS
        if segments:
            yield segments
