# SPDX-License-Identifier: Apache-2.0
"""The engine's state of a request between its submission and its end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from anyaccel.serve.interface import TokenLogprob

if TYPE_CHECKING:
    from anyaccel.serve.engine.grammar import Constraint
    from anyaccel.serve.engine.scheduler import Entry
    from anyaccel.serve.engine.slots import Score
    from anyaccel.serve.engine.streams import Stream


class OpenRequest:
    """A request that has not ended; used in the engine's thread."""

    def __init__(self, entry: Entry, options: dict[str, Any], stream: Stream, constraint: Constraint | None) -> None:
        self.entry = entry
        self.options = options
        self.stream = stream
        self.constraint = constraint
        self.submitted_at = time.monotonic()
        self.queued_s = 0.0  # from then until its first step
        self.drafts = (0, 0)  # numbers of drafted and of accepted tokens

    @property
    def wants_logprobs(self) -> bool:
        return any(self.options.get(name, -1) >= 0 for name in ("logprobs", "prompt_logprobs"))


def logprobs_of(scores: list[Score]) -> tuple[TokenLogprob, ...]:
    """The decoder's scores of tokens in the contract's type."""
    return tuple(TokenLogprob(token, logprob, tuple(map(tuple, top))) for token, logprob, top in scores)  # type: ignore[arg-type]
