# SPDX-License-Identifier: Apache-2.0
"""OpenAI's `/v1/completions`: continues texts or tokens, several at once, with what lm-evaluation-harness needs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from anyaccel.serve.api.endpoint import Endpoint
from anyaccel.serve.api.generation import (
    TokenUsage,
    answer_head,
    check_stream_options,
    choice_events,
    generation_endpoint,
)
from anyaccel.serve.api.models import Models
from anyaccel.serve.interface import TokenLogprob
from anyaccel.serve.protocol import limits
from anyaccel.serve.protocol.common import Logprobs, MaxTokens, SamplingFields, Text, TokenIds
from anyaccel.serve.protocol.errors import wrong
from anyaccel.serve.requests.answers import TextDelta, generate_texts
from anyaccel.serve.requests.frontend import Frontend
from anyaccel.serve.requests.infill import infill_prompt
from anyaccel.serve.requests.structured import request_grammar

_DEFAULT_TOKENS = 16


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=limits.MOST_ANSWERS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=limits.MOST_ANSWERS)]
    )
    max_tokens: MaxTokens | None = None
    logprobs: Logprobs | None = None
    echo: bool | None = None
    suffix: Text | None = None
    best_of: Annotated[int, Field(ge=1, le=limits.MOST_ANSWERS)] | None = None
    # vLLM's: whether the tokenizer's own beginning of a text is put before a prompt.
    add_special_tokens: bool | None = None


def endpoints(models: Models) -> list[Endpoint]:
    """The endpoints of this API."""
    return [generation_endpoint(models, "/v1/completions", "Continues texts or tokens", CompletionRequest, prepare)]


async def prepare(frontend: Frontend, request: CompletionRequest, key: str) -> CompletionGeneration:
    """Check a request, and make its prompts.

    Raises:
        ApiError: it cannot be answered.
    """
    if request.suffix and request.echo:
        raise wrong("echo", "is not supported together with suffix")
    if request.best_of not in (None, request.answer_count):
        raise wrong("best_of", "only the same as n is supported")
    check_stream_options(request)
    given = request.prompt
    several = isinstance(given, list) and not isinstance(given[0], int)
    inputs: Sequence[Any] = given if several else [given]
    answers = len(inputs) * request.answer_count
    if answers > limits.MOST_ANSWERS:
        raise wrong("n", f"prompts times n are {answers}, and may be {limits.MOST_ANSWERS}")
    wanted = _DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
    prompts, rooms = [], []
    ends: frozenset[int] = frozenset()
    for place, each in enumerate(inputs):
        param = f"prompt[{place}]" if several else "prompt"
        if request.suffix:
            if not isinstance(each, str):
                raise wrong(param, "must be a text where there is a suffix")
            with_start = request.add_special_tokens is not False
            tokens, ends = await infill_prompt(frontend.tokenizer, frontend.infill, each, request.suffix, with_start)
        elif isinstance(each, str):
            tokens = await frontend.tokenizer.encode(each, request.add_special_tokens is not False)
        else:
            tokens = frontend.check_tokens(each, param)
        rooms.append(frontend.answer_room(tokens, wanted, "max_tokens", param, least=0 if request.echo else 1))
        prompts.append(tokens)
    return CompletionGeneration(frontend, request, prompts, min(rooms), key, ends)


@dataclass
class CompletionGeneration:
    """Answers one request that has been checked; see `PreparedRequest`."""

    frontend: Frontend
    request: CompletionRequest
    prompts: list[list[int]]
    max_tokens: int
    key: str
    ends: frozenset[int]

    def __post_init__(self) -> None:
        answers = self.request.answer_count
        self._prompt_of = [prompt for prompt in self.prompts for _ in range(answers)]
        self._offsets = [0 if self.request.echo else len(self._decode(prompt)) for prompt in self._prompt_of]
        self._started = [False] * len(self._prompt_of)
        self.usage = TokenUsage([len(prompt) for prompt in self.prompts], answers)
        self._head = answer_head(self.frontend, self.request, "cmpl-", "text_completion")

    def _decode(self, tokens: list[int]) -> str:
        tokenizer = self.frontend.tokenizer
        special = self.request.skip_special_tokens is False
        text: str = tokenizer.decode_with_special(tokens) if special else tokenizer.decode(tokens)
        return text

    def _deltas(self) -> AsyncGenerator[TextDelta, None]:
        request = self.request
        return generate_texts(
            self.frontend,
            request,
            self.prompts,
            self.max_tokens,
            key=self.key,
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs if request.echo else None,
            grammar=request_grammar(request),
            more_ends=self.ends,
        )

    def _choice(self, delta: TextDelta) -> dict[str, Any]:
        """The API's choice for the next part; the first one of an answer includes the prompt if `echo` is set."""
        index, text = delta.index, delta.text
        logprobs: list[TokenLogprob | int] = list(delta.logprobs)
        prompt = self._prompt_of[index]
        if not self._started[index]:
            self._started[index] = True
            if self.request.echo:
                text = self._decode(prompt) + text
                logprobs = [prompt[0], *(delta.prompt_logprobs or ()), *logprobs]
        self.usage.add(delta)
        lists = None if self.request.logprobs is None else self._logprob_lists(index, logprobs)
        return {"index": index, "text": text, "logprobs": lists, "finish_reason": delta.finish}

    def _logprob_lists(self, index: int, logprobs: Sequence[TokenLogprob | int]) -> dict[str, list[Any]]:
        """The log-probabilities as this API's lists; text offsets count from the beginning of the prompt.

        Args:
            logprobs: the first token of a prompt is given as an int, as it has no log-probability.
        """
        tokenizer = self.frontend.tokenizer
        lists: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for each in logprobs:
            text = tokenizer.token_text(each if isinstance(each, int) else each.token)[0]
            lists["text_offset"].append(self._offsets[index])
            lists["tokens"].append(text)
            self._offsets[index] += len(text)
            if isinstance(each, int):
                lists["token_logprobs"].append(None)
                lists["top_logprobs"].append(None)
                continue
            lists["token_logprobs"].append(max(each.logprob, -9999.0))
            top: dict[str, float] = {}
            for token, logprob in (*each.top, (each.token, each.logprob)):
                # Two tokens may have the same text: keep the likelier one.
                top.setdefault(tokenizer.token_text(token)[0], max(logprob, -9999.0))
            lists["top_logprobs"].append(top)
        return lists

    async def response(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = [{} for _ in self._prompt_of]
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                part, choice = self._choice(delta), choices[delta.index]
                if not choice:
                    choice.update(part)
                    continue
                choice["text"] += part["text"]
                choice["finish_reason"] = part["finish_reason"]
                for name, values in (part["logprobs"] or {}).items():
                    choice["logprobs"][name] += values
        return {**self._head, "choices": choices, "usage": self.usage.as_json()}

    def stream(self) -> AsyncGenerator[bytes, None]:
        return choice_events(self._choices(), self._head, self.request, self.usage)

    async def _choices(self) -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                choice = self._choice(delta)
                if choice["text"] or delta.logprobs or delta.count or delta.finish:
                    yield choice
