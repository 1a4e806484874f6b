# SPDX-License-Identifier: Apache-2.0
"""Steps that begin before they are asked for, so that a device never waits for the host.

Behind a step of single tokens mostly comes another one of the same sequences, each with the token that was just
chosen. It needs nothing of the host: the tokens are on the device. So it begins before the host reads them. Of
sequences that are in another step then, what was begun is forgotten: it has written a row behind their end, which
nobody reads, and which the next token writes anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anyaccel.inference.device.batch import Segment
from anyaccel.inference.device.pages import PAGE
from anyaccel.inference.device.sampling import Pick


def next_step(
    batch: Sequence[Segment], picks: Sequence[Pick], most_tokens: int
) -> tuple[list[Segment], list[Pick]] | None:
    """The step behind one of single tokens, all of which are picked; None where it needs a page, or there is no room.

    Args:
        most_tokens: of a sequence; 0: there is no limit.
    """
    if [pick[0] for pick in picks] != list(range(len(batch))) or any(len(each.tokens) > 1 for each in batch):
        return None
    ends = [each.start + 1 for each in batch]
    if any(end % PAGE == 0 for end in ends) or 0 < most_tokens <= max(ends, default=0):
        return None
    segments = [Segment(each.sequence, each.start + 1, [0], each.context + 1) for each in batch]
    return segments, [(*pick[:5], pick[6], 0.0) for pick in picks]


class Begun:
    """A step that has begun.

    Args:
        tokens: that it goes on behind.
        chosen: on the device.
    """

    def __init__(
        self, segments: Sequence[Segment], picks: Sequence[Pick], tokens: Sequence[int], chosen: torch.Tensor
    ) -> None:
        self.chosen = chosen
        self._rows = {
            segment.sequence: (row, segment.start, token, pick[1:6])
            for row, (segment, pick, token) in enumerate(zip(segments, picks, tokens, strict=True))
        }

    def forget(self, sequence: int) -> None:
        self._rows.pop(sequence, None)

    def ready(self, batch: Sequence[Segment], picks: Sequence[Pick]) -> dict[int, int]:
        """Row of a run -> row of what was chosen here, of those that are the same."""
        of_row = {pick[0]: pick for pick in picks}
        found: dict[int, int] = {}
        first = 0
        for segment in batch:
            row, *what = self._rows.get(segment.sequence, (0, -1))
            pick = of_row.get(first)
            if pick is not None and what == [segment.start, *segment.tokens, pick[1:6]]:
                found[first] = row
            first += len(segment.tokens)
        return found
