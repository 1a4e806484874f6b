# SPDX-License-Identifier: Apache-2.0
"""The scheduler's plan: a step, and the changes to the decoder's cache before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anyaccel.serve.interface import Finish

End = Finish | Literal["cancelled", "deadline", "error"]


@dataclass(frozen=True)
class Start:
    """The decoder creates a request, whose first `tokens` tokens are in the cache of request `source`."""

    id: int
    source: int = -1
    tokens: int = 0


@dataclass(frozen=True)
class Shrink:
    """Request `id` keeps its first `tokens` tokens in the cache, and no more."""

    id: int
    tokens: int


@dataclass(frozen=True)
class Share:
    """Request `id`, which has nothing in the cache, shares the pages of the first tokens of request `source`."""

    id: int
    source: int
    tokens: int


@dataclass(frozen=True)
class Drop:
    """The decoder frees a request."""

    id: int


Change = Start | Shrink | Share | Drop
# What each is called between processes.
CHANGES: dict[str, type[Change]] = {"start": Start, "shrink": Shrink, "share": Share, "drop": Drop}


@dataclass
class Plan:
    """A step.

    Attributes:
        changes: made before the step, in this order.
        run: request -> the number of tokens to compute: one of an answer, or a chunk of a prompt.
        ended: requests that have ended without a step, and why.
        prompt_tokens: the sum of all chunks of prompts.
        decodes: the number of requests that get one token of their answer.
    """

    changes: list[Change] = field(default_factory=list)
    run: dict[int, int] = field(default_factory=dict)
    ended: list[tuple[int, End]] = field(default_factory=list)
    prompt_tokens: int = 0
    decodes: int = 0
