# SPDX-License-Identifier: Apache-2.0
"""A step: the scheduler's plan of it, what a decoder gets, and what comes back."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from anyaccel.serve.interface import Finish

if TYPE_CHECKING:
    from anyaccel import _llm

End = Finish | Literal["cancelled", "deadline", "error"]
Score = tuple[int, float, list[tuple[int, float]]]  # token, log-probability, the likeliest tokens


class CacheChange(NamedTuple):
    """A change to the decoder's requests before a step.

    Attributes:
        kind: "start": request `id` is created, and its first `tokens` tokens are in the cache of request `source`;
            "share": the same for a request that is there and has nothing in the cache; "shrink": it keeps its first
            `tokens` tokens in the cache, and no more; "keep": its recurrent state is kept behind so many; "drop": it is
            freed.
    """

    kind: Literal["start", "share", "shrink", "keep", "drop"]
    id: int
    tokens: int = 0
    source: int = -1


@dataclass
class StepPlan:
    """What the scheduler decides.

    Attributes:
        changes: made before the step, in this order.
        run: request -> the number of tokens to compute: one of an answer, or a chunk of a prompt.
        ended: requests that have ended without a step, and why.
        prompt_tokens: the sum of all chunks of prompts.
        decodes: the number of requests that get one token of their answer.
    """

    changes: list[CacheChange] = field(default_factory=list)
    run: dict[int, int] = field(default_factory=dict)
    ended: list[tuple[int, End]] = field(default_factory=list)
    prompt_tokens: int = 0
    decodes: int = 0


@dataclass
class MultiStep:
    """Permission to take several decode steps in one call; only for a decoder in this process.

    Attributes:
        most: the number of steps.
        feed: gets the tokens of each step, with `tag`, while the next step runs.
    """

    most: int
    feed: _llm.TokenFeed
    tag: int


@dataclass
class StepInput:
    """What a decoder computes.

    Attributes:
        changes, run: those of the plan.
        new: prompt and options of `_llm.Request` for each request that starts.
        masks: request -> the tokens that are allowed, as `_llm.Request.set_mask` takes them.
    """

    changes: list[CacheChange] = field(default_factory=list)
    run: dict[int, int] = field(default_factory=dict)
    new: dict[int, tuple[list[int], dict[str, Any]]] = field(default_factory=dict)
    masks: dict[int, bytes] = field(default_factory=dict)

    def to_message(self) -> dict[str, Any]:
        """The same as values of JSON, which has no numbers as keys and no bytes."""
        masks = [(number, base64.b64encode(mask).decode()) for number, mask in self.masks.items()]
        return {"changes": self.changes, "run": [*self.run.items()], "new": [*self.new.items()], "masks": masks}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> StepInput:
        masks = {number: base64.b64decode(mask) for number, mask in message["masks"]}
        changes = [CacheChange(*change) for change in message["changes"]]
        return cls(changes, dict(message["run"]), dict(message["new"]), masks)


@dataclass
class StepOutput:
    """The results of a step, or of several.

    Attributes:
        tokens: the new token of each request of `run`; negative: it has none.
        before: the same for each earlier step of a call of several.
        fed: the number of steps whose tokens are in the feed.
        errors: why a request has failed alone.
        scores, prompt_scores, embeddings: what requests asked for beside tokens.
        drafts: how many tokens were drafted and accepted for a request so far, where that has changed.
    """

    tokens: list[int] = field(default_factory=list)
    before: list[list[int]] = field(default_factory=list)
    fed: int = 0
    errors: dict[int, str] = field(default_factory=dict)
    scores: dict[int, list[Score]] = field(default_factory=dict)
    prompt_scores: dict[int, list[Score]] = field(default_factory=dict)
    embeddings: dict[int, list[float]] = field(default_factory=dict)
    drafts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def to_message(self) -> dict[str, Any]:
        """The same as values of JSON, which has no numbers as keys."""
        return {name: [*value.items()] if isinstance(value, dict) else value for name, value in vars(self).items()}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> StepOutput:
        names = ("errors", "scores", "prompt_scores", "embeddings", "drafts")
        return cls(**{**message, **{name: dict(message[name]) for name in names}})
