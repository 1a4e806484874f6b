# SPDX-License-Identifier: Apache-2.0
"""A request while the engine computes it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from anyaccel.serve.contract import TokenLogprob

if TYPE_CHECKING:
    from anyaccel.serve.grammar import Constraint
    from anyaccel.serve.scheduler import Entry
    from anyaccel.serve.slots import Score
    from anyaccel.serve.streams import Stream


class Open:
    """An open request, as the thread knows it."""

    def __init__(self, entry: Entry, options: dict[str, Any], stream: Stream, constraint: Constraint | None) -> None:
        self.entry = entry
        self.options = options
        self.stream = stream
        self.constraint = constraint
        self.came = time.monotonic()
        self.queued_s = 0.0  # until its first step
        self.drafts = (0, 0)  # tokens that were drafted, and those that were right

    @property
    def tells_more(self) -> bool:
        """Whether it wants to know more than tokens."""
        return any(self.options.get(name, -1) >= 0 for name in ("logprobs", "prompt_logprobs"))


def logprobs_of(scores: list[Score]) -> tuple[TokenLogprob, ...]:
    """What the decoder tells of tokens, as the front gets it."""
    return tuple(TokenLogprob(token, logprob, tuple(map(tuple, top))) for token, logprob, top in scores)  # type: ignore[arg-type]
