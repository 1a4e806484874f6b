# SPDX-License-Identifier: Apache-2.0
"""Runs steps on the native decoder, in the same way on every rank. Torch-free."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anyaccel.errors import ModelError
from anyaccel.serve.engine.step import CacheChange, MultiStep, StepInput, StepOutput

if TYPE_CHECKING:
    from anyaccel import _llm


class Slots:
    """The requests of a native decoder, by the scheduler's numbers."""

    def __init__(self, model: _llm.Model) -> None:
        self._model = model
        self._requests: dict[int, _llm.Request] = {}
        self._options: dict[int, dict[str, Any]] = {}
        self._drafts: dict[int, tuple[int, int]] = {}

    def apply(self, step: StepInput, multi_step: MultiStep | None = None) -> StepOutput:
        """Take the step, or the steps.

        Raises:
            AnyAccelError: the decoder has failed for good.
        """
        for change in step.changes:
            self._change(change, step)
        for number, mask in step.masks.items():
            self._requests[number].set_mask(mask)
        output = StepOutput()
        if step.run:
            self._run(step.run, output, multi_step)
        return output

    def clear(self) -> None:
        """Forget all requests."""
        for request in self._requests.values():
            request.finish()
        self._requests.clear()
        self._options.clear()
        self._drafts.clear()

    def pages(self, number: int, tokens: int, first: int, count: int) -> list[int] | None:
        """The addresses of whole pages of a request; None where it has not so many tokens in the cache any more."""
        request = self._requests.get(number)
        if request is None or request.finished == "stopped" or request.cached < tokens:
            return None
        return request.pages(first, count)

    def restore(self, number: int, tokens: list[int], addresses: Sequence[int], page_bytes: int) -> None:
        """Make a request whose tokens are all in the cache, with pages that are copied from these addresses."""
        self._start(number, tokens, {"goal": "scores"})
        for page, address in zip(self._requests[number].restore(len(tokens)), addresses, strict=True):
            ctypes.memmove(page, address, page_bytes)

    def _change(self, change: CacheChange, step: StepInput) -> None:
        number = change.id
        if change.kind == "start":
            self._start(number, *step.new[number])
        if change.kind == "shrink":
            self._requests[number].shrink(change.tokens)
        elif change.kind == "keep":
            self._requests[number].keep(change.tokens)
        elif change.kind == "drop":
            self._requests.pop(number).finish()
            del self._options[number]
            self._drafts.pop(number, None)
        elif change.tokens:
            self._requests[number].share(self._requests[change.source], change.tokens)

    def _start(self, number: int, prompt: list[int], options: dict[str, Any]) -> None:
        from anyaccel import _llm

        self._options[number] = options
        self._requests[number] = _llm.Request(self._model, prompt, {**options, "bias": dict(options.get("bias", ()))})

    def _run(self, run: Mapping[int, int], output: StepOutput, multi_step: MultiStep | None = None) -> None:
        requests = [self._requests[number] for number in run]
        try:
            if multi_step is None:
                output.tokens += self._model.step(requests, list(run.values()), exact=True)
            else:
                steps, output.fed = self._model.steps(requests, multi_step.most, multi_step.feed, multi_step.tag)
                *output.before, output.tokens = steps
        except ModelError as error:
            if len(run) == 1:
                output.tokens.append(-2)
                output.errors[next(iter(run))] = str(error)
                return
            # One request has failed, and the step has changed none: run each alone to find it, and keep the others.
            for number, count in run.items():
                self._run({number: count}, output)
            return
        for number, token in zip(run, output.tokens[-len(run) :], strict=True):
            self._collect(number, token, output)

    def _collect(self, number: int, token: int, output: StepOutput) -> None:
        request, options = self._requests[number], self._options[number]
        if token >= 0 and options.get("logprobs", -1) >= 0:
            output.scores[number] = request.take_scores()
        if options.get("prompt_logprobs", -1) >= 0 and (token >= 0 or request.finished):
            output.prompt_scores[number] = request.prompt_scores()
            options["prompt_logprobs"] = -1  # they are reported once
        if options["goal"] in ("mean", "last") and request.finished:
            output.embeddings[number] = request.embedding()
        if options.get("draft_tokens", 0) > 0 and (drafts := request.drafts) != self._drafts.get(number, (0, 0)):
            output.drafts[number] = self._drafts[number] = drafts
