# SPDX-License-Identifier: Apache-2.0
"""What the APIs that generate text have in common: their endpoints, `usage`, and streams of choices."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from starlette.requests import Request

from anyaccel.serve.api.endpoint import Endpoint
from anyaccel.serve.api.models import Models
from anyaccel.serve.api.sending import (
    DONE,
    OPENAI,
    Dialect,
    EventStream,
    event,
    json_answer,
    read,
    unless_gone,
)
from anyaccel.serve.protocol.common import GenerationFields, SamplingFields
from anyaccel.serve.protocol.errors import wrong
from anyaccel.serve.requests.answers import MessageDelta, TextDelta
from anyaccel.serve.requests.frontend import Frontend, new_id

G = TypeVar("G", bound=GenerationFields)


class PreparedRequest(Protocol):
    """A checked request, which can be answered at once or as a stream.

    Both raise AnyAccelError and ApiError, see `Engine.generate`; a stream before its first event, or instead of the
    rest.

    Attributes:
        usage: the tokens so far.
    """

    @property
    def usage(self) -> TokenUsage: ...
    async def response(self) -> dict[str, Any]: ...
    def stream(self) -> AsyncGenerator[bytes, None]: ...


def generation_endpoint(
    models: Models,
    path: str,
    summary: str,
    shape: type[G],
    prepare: Callable[[Frontend, G, str], Awaitable[PreparedRequest]],
    dialect: Dialect = OPENAI,
) -> Endpoint:
    """The endpoint of an API that generates text.

    Args:
        prepare: checks a request, and makes its prompt.
    """

    async def generate(request: Request) -> Any:
        body = await read(request, shape, models.limits)
        frontend = await models.serving(request, body.model, body.keep_s)
        await frontend.prepare_sampling(body)
        prepared = await prepare(frontend, body, request.scope["anyaccel.key"])
        request.scope["anyaccel.usage"] = prepared.usage  # for the log
        if body.stream:
            return EventStream(prepared.stream(), models.limits, dialect)
        return json_answer(await unless_gone(request.receive, prepared.response()))

    return Endpoint(path, summary, generate, shape, streams=True, dialect=dialect)


def answer_head(frontend: Frontend, request: GenerationFields, prefix: str, kind: str) -> dict[str, Any]:
    """The fields that begin each response and each event of OpenAI's older APIs."""
    model = request.model or frontend.model
    return {"id": new_id(prefix), "object": kind, "created": int(time.time()), "model": model}


class TokenUsage:
    """Counts the tokens of a request, for `usage`.

    Args:
        prompts: the length of each prompt.
        answers: how many answers each prompt has.
    """

    def __init__(self, prompts: Sequence[int], answers: int = 1) -> None:
        self._answers = answers
        self.prompt_tokens = sum(prompts)
        self._cached = [0] * len(prompts)
        self._counts = [0] * (len(prompts) * answers)
        self._drafts = [(0, 0)] * (len(prompts) * answers)
        self._reasoning = [0] * (len(prompts) * answers)
        self._finish: list[str | None] = [None] * (len(prompts) * answers)
        self.first_at: float | None = None  # when the first token came

    def add_message(self, delta: MessageDelta) -> None:
        self._reasoning[delta.text.index] = delta.reasoning_count
        self.add(delta.text)
        self._finish[delta.text.index] = delta.finish or self._finish[delta.text.index]

    def add(self, delta: TextDelta) -> None:
        index, prompt = delta.index, delta.index // self._answers
        if self.first_at is None and delta.count:
            self.first_at = time.monotonic()
        self._finish[index] = delta.finish or self._finish[index]
        self._counts[index] = delta.count
        self._drafts[index] = max(self._drafts[index], delta.drafts)
        self._cached[prompt] = max(self._cached[prompt], delta.cached)

    @property
    def completion_tokens(self) -> int:
        return sum(self._counts)

    @property
    def finish_reasons(self) -> list[str]:
        """Of the answers that have ended."""
        return [each for each in self._finish if each is not None]

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached)

    @property
    def reasoning_tokens(self) -> int:
        return sum(self._reasoning)

    def as_json(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        drafted, accepted = (sum(each[place] for each in self._drafts) for place in (0, 1))
        details = {"reasoning_tokens": self.reasoning_tokens} if self.reasoning_tokens else {}
        if drafted:
            details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        return {**usage, "completion_tokens_details": details} if details else usage


def check_stream_options(request: SamplingFields) -> None:
    """Refuse options of a stream where there is none.

    Raises:
        ApiError: there are some.
    """
    if request.stream_options is not None and not request.stream:
        raise wrong("stream_options", "needs stream: true")


async def choice_events(
    choices: AsyncGenerator[dict[str, Any], None], head: dict[str, Any], request: SamplingFields, usage: TokenUsage
) -> AsyncGenerator[bytes, None]:
    """The stream of an API whose events have OpenAI's `choices`, with `usage` where `stream_options` ask for it."""
    options = request.stream_options
    with_usage = bool(options and options.include_usage)
    always = with_usage and bool(options and options.continuous_usage_stats)
    async with aclosing(choices):
        async for choice in choices:
            more = {"usage": usage.as_json() if always else None} if with_usage else {}
            yield event({**head, "choices": [choice], **more})
    if with_usage:
        yield event({**head, "choices": [], "usage": usage.as_json()})
    yield DONE
