# SPDX-License-Identifier: Apache-2.0
"""What a request is asked for: the options of `_llm.Request`, with its limits and its words. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from anyaccel.errors import UsageError

GOALS = ("answer", "scores", "mean", "last")


@dataclass
class Options:
    """As csrc/llm/model/sampling.h and request.h explain them. Drafts change no answer: this executor makes none."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int = 0
    bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    max_new_tokens: int = 0
    min_new_tokens: int = 0
    end_tokens: tuple[int, ...] = ()
    ignore_end: bool = False
    logprobs: int = -1
    prompt_logprobs: int = -1
    draft_tokens: int = 0
    draft_model: bool = False
    draft_always: bool = False
    draft_end: bool = False
    goal: str = "answer"

    def __post_init__(self) -> None:
        self.end_tokens = tuple(self.end_tokens)
        if self.goal not in GOALS:
            raise UsageError(f"goal {self.goal!r} is unknown; known are {', '.join(GOALS)}")
        above, share = "above 0", "above 0 and at most 1"
        if self.do_sample:
            self._check("temperature", 0 < self.temperature < math.inf, above)
        self._check("top_k", self.top_k >= 0, "0 (off) or more")
        self._check("top_p", 0 < self.top_p <= 1, share)
        self._check("min_p", 0 <= self.min_p <= 1, "0 to 1")
        self._check("typical_p", 0 < self.typical_p <= 1, share)
        self._check("repetition_penalty", 0 < self.repetition_penalty < math.inf, above)
        self._check("presence_penalty", math.isfinite(self.presence_penalty), "a number")
        self._check("frequency_penalty", math.isfinite(self.frequency_penalty), "a number")
        self._check("no_repeat_ngram", self.no_repeat_ngram >= 0, "0 (off) or more")
        self._check("bias", all(map(math.isfinite, self.bias.values())), "numbers")
        self._check("max_new_tokens", self.max_new_tokens >= 0, "0 (as many as the context takes) or more")
        self._check("min_new_tokens", self.min_new_tokens >= 0, "0 or more")
        self._check("draft_tokens", self.draft_tokens >= 0, "0 (no drafts) or more")

    def _check(self, name: str, fits: bool, range_: str) -> None:
        if not fits:
            raise UsageError(f"{name} is {getattr(self, name)}, must be {range_}")

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token is what the model's logits say, with nothing changed."""
        return not (self.bias or self.penalises or self.no_repeat_ngram or self.min_new_tokens)

    @property
    def penalises(self) -> bool:
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty)

    @property
    def filters(self) -> bool:
        """Whether sampling is from some of the tokens only."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1


_KNOWN = {each.name for each in fields(Options)}


def read_options(values: Mapping[str, Any]) -> Options:
    """The options of a request.

    Raises:
        UsageError: one is unknown, of the wrong type or out of range.
    """
    for name in values:
        if name not in _KNOWN:
            raise UsageError(f"there is no option {name!r} of a request")
    try:
        return Options(**values)
    except TypeError as error:
        raise UsageError(f"an option of the request has a wrong type ({error})") from None
