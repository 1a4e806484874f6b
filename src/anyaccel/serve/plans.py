# SPDX-License-Identifier: Apache-2.0
"""What the scheduler says: a step, and what changes in the decoder's cache before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anyaccel.serve.contract import Finish

End = Finish | Literal["cancelled", "deadline", "error"]


@dataclass(frozen=True)
class Start:
    """The decoder gets to know a request; the first `tokens` tokens are those of request `source`."""

    id: int
    source: int = -1
    tokens: int = 0


@dataclass(frozen=True)
class Shrink:
    """Request `id` keeps the first `tokens` tokens in the cache."""

    id: int
    tokens: int


@dataclass(frozen=True)
class Share:
    """Request `id`, which has nothing in the cache, gets the first tokens of request `source`."""

    id: int
    source: int
    tokens: int


@dataclass(frozen=True)
class Drop:
    """The decoder forgets a request."""

    id: int


Change = Start | Shrink | Share | Drop


@dataclass
class Plan:
    """A step.

    Attributes:
        changes: first, in this order.
        run: request -> tokens that pass; an answer's one, or a part of a prompt.
        ended: requests, and why, that have ended without a step.
    """

    changes: list[Change] = field(default_factory=list)
    run: dict[int, int] = field(default_factory=dict)
    ended: list[tuple[int, End]] = field(default_factory=list)
    prompt_tokens: int = 0
    answers: int = 0
