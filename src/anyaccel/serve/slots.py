# SPDX-License-Identifier: Apache-2.0
"""What a plan of the scheduler means to the native decoder; the same on every rank. Torch-free.

All of it can be written as JSON, as ranks are told it: see `Work` and `Outcome`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from anyaccel.errors import ModelError
from anyaccel.serve.plans import Drop, Plan, Share, Shrink, Start

if TYPE_CHECKING:
    from anyaccel import _llm

Score = tuple[int, float, list[tuple[int, float]]]


@dataclass
class Work:
    """A step.

    Attributes:
        changes: name of a change of the scheduler, and its numbers.
        new: number of a request -> prompt and options of `_llm.Request`.
        run: numbers of requests, and how many tokens of each pass.
        masks: number -> which tokens may come, base64 of what `_llm.Request.set_mask` takes.
    """

    changes: list[tuple[str, list[int]]] = field(default_factory=list)
    new: dict[str, tuple[list[int], dict[str, Any]]] = field(default_factory=dict)
    run: list[tuple[int, int]] = field(default_factory=list)
    masks: dict[str, str] = field(default_factory=dict)


@dataclass
class Ahead:
    """Leave to take several steps of the same answers; only for a decoder in this process.

    Attributes:
        most: how many.
        feed: gets the tokens of each step, with `tag`, while the next one is under way.
    """

    most: int
    feed: _llm.TokenFeed
    tag: int


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        tokens: of each request of `run`; negative: none.
        before: the same of the steps before, where there were several.
        fed: of how many steps the feed has the tokens.
        errors: number -> what was wrong with this request alone.
        scores, prompt_scores, embeddings: number -> what the request wants to know.
        drafts: number -> tokens that were drafted for it so far, and how many of them were right, where that is new.
    """

    tokens: list[int] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    scores: dict[str, list[Score]] = field(default_factory=dict)
    prompt_scores: dict[str, list[Score]] = field(default_factory=dict)
    embeddings: dict[str, list[float]] = field(default_factory=dict)
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)
    before: list[list[int]] = field(default_factory=list)
    fed: int = 0

    def add(self, other: Outcome) -> None:
        """That of more requests."""
        self.tokens += other.tokens
        for name in ("errors", "scores", "prompt_scores", "embeddings", "drafts"):
            getattr(self, name).update(getattr(other, name))


def work_of(plan: Plan, new: Mapping[int, tuple[list[int], dict[str, Any]]], masks: Mapping[int, bytes]) -> Work:
    """A plan in words that go over a socket; `new`: prompt and options of those that start."""
    changes = [(type(each).__name__, list(asdict(each).values())) for each in plan.changes]
    starting = {str(each.id): new[each.id] for each in plan.changes if isinstance(each, Start)}
    coded = {str(number): base64.b64encode(mask).decode() for number, mask in masks.items()}
    return Work(changes, starting, list(plan.run.items()), coded)


class Slots:
    """The requests that a native decoder knows, by their numbers."""

    def __init__(self, model: _llm.Model) -> None:
        self._model = model
        self._requests: dict[int, _llm.Request] = {}
        self._options: dict[int, dict[str, Any]] = {}
        self._drafts: dict[int, tuple[int, int]] = {}

    def apply(self, work: Work, ahead: Ahead | None = None) -> Outcome:
        """Take the step, or the steps.

        Raises:
            AnyAccelError: the decoder is of no use any more.
        """
        for kind, numbers in work.changes:
            self._change(kind, numbers, work)
        for name, mask in work.masks.items():
            self._requests[int(name)].set_mask(base64.b64decode(mask))
        outcome = Outcome()
        if work.run:
            self._step(work.run, outcome, ahead)
        return outcome

    def clear(self) -> None:
        """Forget all requests."""
        for request in self._requests.values():
            request.finish()
        self._requests.clear()
        self._options.clear()
        self._drafts.clear()

    def _change(self, kind: str, numbers: list[int], work: Work) -> None:
        from anyaccel.inference.native.requests import new_request

        number, *rest = numbers
        if kind == Start.__name__:
            prompt, options = work.new[str(number)]
            self._requests[number] = new_request(self._model, prompt, _native(options))
            self._options[number] = options
            if rest[1]:
                self._requests[number].share(self._requests[rest[0]], rest[1])
        elif kind == Share.__name__:
            self._requests[number].share(self._requests[rest[0]], rest[1])
        elif kind == Shrink.__name__:
            self._requests[number].shrink(rest[0])
        elif kind == Drop.__name__ and number in self._requests:
            self._requests.pop(number).finish()
            del self._options[number]
            self._drafts.pop(number, None)

    def _step(self, run: list[tuple[int, int]], outcome: Outcome, ahead: Ahead | None = None) -> None:
        requests = [self._requests[number] for number, _ in run]
        limits = [count for _, count in run]
        try:
            if ahead is None:
                outcome.tokens = self._model.step(requests, limits, exact=True)
            else:
                steps, outcome.fed = self._model.steps(requests, ahead.most, ahead.feed, ahead.tag)
                *outcome.before, outcome.tokens = steps
        except ModelError as error:
            if len(run) == 1:
                outcome.tokens, outcome.errors[str(run[0][0])] = [-2], str(error)
                return
            # Of one of them: the others are as they were before, and go on without it.
            for each in run:
                alone = Outcome()
                self._step([each], alone)
                outcome.add(alone)
            return
        for (number, _), request, token in zip(run, requests, outcome.tokens, strict=True):
            self._tell(number, request, token, outcome)

    def _tell(self, number: int, request: _llm.Request, token: int, outcome: Outcome) -> None:
        options = self._options[number]
        goal = options.get("goal", "answer")
        if token >= 0 and options.get("logprobs", -1) >= 0:
            outcome.scores[str(number)] = request.take_scores()
        if options.get("prompt_logprobs", -1) >= 0 and (token >= 0 or request.finished):
            outcome.prompt_scores[str(number)] = request.prompt_scores()
            options["prompt_logprobs"] = -1  # told
        if goal in ("mean", "last") and request.finished:
            outcome.embeddings[str(number)] = request.embedding()
        if options.get("draft_tokens", 0) > 0 and (drafts := request.drafts) != self._drafts.get(number, (0, 0)):
            outcome.drafts[str(number)] = self._drafts[number] = drafts


def _native(options: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no numbers as names."""
    return {**options, "bias": {int(token): bias for token, bias in options.get("bias", {}).items()}}
