# SPDX-License-Identifier: Apache-2.0
"""Runs a plan of the scheduler on the native decoder, in the same way on every rank. Torch-free.

`Work` goes to the ranks, and `Outcome` comes back, as JSON.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from anyaccel.errors import ModelError
from anyaccel.serve.engine.plans import CHANGES, Change, Drop, Plan, Share, Shrink, Start

if TYPE_CHECKING:
    from anyaccel import _llm

Score = tuple[int, float, list[tuple[int, float]]]


@dataclass
class Work:
    """One step.

    Attributes:
        changes: the name of each change, by `plans.CHANGES`, and its fields.
        new: number of a request -> prompt and options of `_llm.Request`.
        run: numbers of requests, and how many tokens of each the step computes.
        masks: number -> the tokens that are allowed, base64 of what `_llm.Request.set_mask` takes.
    """

    changes: list[tuple[str, list[int]]] = field(default_factory=list)
    new: dict[str, tuple[list[int], dict[str, Any]]] = field(default_factory=dict)
    run: list[tuple[int, int]] = field(default_factory=list)
    masks: dict[str, str] = field(default_factory=dict)


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
class Outcome:
    """The results of a step, or of several.

    Attributes:
        tokens: the new token of each request of `run`; negative: it has none.
        before: the same for each earlier step of a call of several.
        fed: the number of steps whose tokens are in the feed.
        errors: number -> why this request alone has failed.
        scores, prompt_scores, embeddings: number -> what the request asked for beside tokens.
        drafts: number -> how many tokens were drafted and accepted for it so far, where that has changed.
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
        """Append the results of other requests of the same step."""
        self.tokens += other.tokens
        for name in ("errors", "scores", "prompt_scores", "embeddings", "drafts"):
            getattr(self, name).update(getattr(other, name))


def work_of(plan: Plan, new: Mapping[int, tuple[list[int], dict[str, Any]]], masks: Mapping[int, bytes]) -> Work:
    """A plan in a form that can be sent as JSON; `new` has the prompt and options of each request that starts."""
    names = {kind: name for name, kind in CHANGES.items()}
    changes = [(names[type(each)], list(asdict(each).values())) for each in plan.changes]
    starting = {str(each.id): new[each.id] for each in plan.changes if isinstance(each, Start)}
    coded = {str(number): base64.b64encode(mask).decode() for number, mask in masks.items()}
    return Work(changes, starting, list(plan.run.items()), coded)


class Slots:
    """The requests of a native decoder, by the scheduler's numbers."""

    def __init__(self, model: _llm.Model) -> None:
        self._model = model
        self._requests: dict[int, _llm.Request] = {}
        self._options: dict[int, dict[str, Any]] = {}
        self._drafts: dict[int, tuple[int, int]] = {}

    def apply(self, work: Work, multi_step: MultiStep | None = None) -> Outcome:
        """Take the step, or the steps.

        Raises:
            AnyAccelError: the decoder has failed for good.
        """
        for kind, numbers in work.changes:
            self._change(CHANGES[kind](*numbers), work)
        for name, mask in work.masks.items():
            self._requests[int(name)].set_mask(base64.b64decode(mask))
        outcome = Outcome()
        if work.run:
            self._step(work.run, outcome, multi_step)
        return outcome

    def clear(self) -> None:
        """Forget all requests."""
        for request in self._requests.values():
            request.finish()
        self._requests.clear()
        self._options.clear()
        self._drafts.clear()

    def _change(self, change: Change, work: Work) -> None:
        from anyaccel import _llm

        match change:
            case Start(number, source, tokens):
                prompt, options = work.new[str(number)]
                self._requests[number] = _llm.Request(self._model, prompt, _with_token_keys(options))
                self._options[number] = options
                if tokens:
                    self._requests[number].share(self._requests[source], tokens)
            case Share(number, source, tokens):
                self._requests[number].share(self._requests[source], tokens)
            case Shrink(number, tokens):
                self._requests[number].shrink(tokens)
            case Drop(number) if number in self._requests:
                self._requests.pop(number).finish()
                del self._options[number]
                self._drafts.pop(number, None)

    def _step(self, run: list[tuple[int, int]], outcome: Outcome, multi_step: MultiStep | None = None) -> None:
        requests = [self._requests[number] for number, _ in run]
        limits = [count for _, count in run]
        try:
            if multi_step is None:
                outcome.tokens = self._model.step(requests, limits, exact=True)
            else:
                steps, outcome.fed = self._model.steps(requests, multi_step.most, multi_step.feed, multi_step.tag)
                *outcome.before, outcome.tokens = steps
        except ModelError as error:
            if len(run) == 1:
                outcome.tokens, outcome.errors[str(run[0][0])] = [-2], str(error)
                return
            # One request has failed, and the step has changed none: run each alone to find it, and keep the others.
            for each in run:
                alone = Outcome()
                self._step([each], alone)
                outcome.add(alone)
            return
        for (number, _), request, token in zip(run, requests, outcome.tokens, strict=True):
            self._collect(number, request, token, outcome)

    def _collect(self, number: int, request: _llm.Request, token: int, outcome: Outcome) -> None:
        options = self._options[number]
        goal = options.get("goal", "answer")
        if token >= 0 and options.get("logprobs", -1) >= 0:
            outcome.scores[str(number)] = request.take_scores()
        if options.get("prompt_logprobs", -1) >= 0 and (token >= 0 or request.finished):
            outcome.prompt_scores[str(number)] = request.prompt_scores()
            options["prompt_logprobs"] = -1  # they are reported once
        if goal in ("mean", "last") and request.finished:
            outcome.embeddings[str(number)] = request.embedding()
        if options.get("draft_tokens", 0) > 0 and (drafts := request.drafts) != self._drafts.get(number, (0, 0)):
            outcome.drafts[str(number)] = self._drafts[number] = drafts


def _with_token_keys(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with tokens as the keys of `bias`: JSON has made strings of them."""
    return {**options, "bias": {int(token): bias for token, bias in options.get("bias", {}).items()}}
