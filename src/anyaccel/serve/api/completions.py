# SPDX-License-Identifier: Apache-2.0
"""`/v1/completions`: continues texts or tokens, several at once, with what lm-evaluation-harness needs.

The answers are numbered as OpenAI does: n answers to the first prompt, then n answers to the second.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from anyaccel.serve.api.chat import stops_of, usage_of
from anyaccel.serve.interface import TokenLogprob
from anyaccel.serve.protocol.completions import CompletionRequest
from anyaccel.serve.protocol.errors import wrong
from anyaccel.serve.protocol.json_text import DONE, event
from anyaccel.serve.protocol.limits import MOST_ANSWERS
from anyaccel.serve.requests.answers import AnswerText, Piece, merged, pieces
from anyaccel.serve.requests.frontend import Frontend, new_id
from anyaccel.serve.requests.structured import grammar_of

_DEFAULT_TOKENS = 16


class _Logprobs:
    """The log-probabilities of one answer as this API's lists; text offsets count from the beginning of the prompt."""

    def __init__(self, frontend: Frontend, offset: int) -> None:
        self._texts = frontend.texts
        self._offset = offset

    def lists(self, found: Sequence[TokenLogprob | int]) -> dict[str, list[Any]]:
        """The lists for these tokens; the first token of a prompt is given as an int, as it has no log-probability."""
        made: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for each in found:
            token = each if isinstance(each, int) else each.token
            text = self._texts.token(token)[0]
            made["text_offset"].append(self._offset)
            made["tokens"].append(text)
            self._offset += len(text)
            if isinstance(each, int):
                made["token_logprobs"].append(None)
                made["top_logprobs"].append(None)
                continue
            made["token_logprobs"].append(max(each.logprob, -9999.0))
            top: dict[str, float] = {}
            for other, logprob in (*each.top, (each.token, each.logprob)):
                # Two tokens may have the same text: keep the likelier one.
                top.setdefault(self._texts.token(other)[0], max(logprob, -9999.0))
            made["top_logprobs"].append(top)
        return made


def _joined(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    return {name: [each for part in parts for each in part[name]] for name in parts[0]} if parts else {}


class Completions:
    """Answers one request that has been checked."""

    def __init__(self, frontend: Frontend, request: CompletionRequest, prompts: list[list[int]], key: str) -> None:
        self._frontend = frontend
        self._request = request
        self._prompts = prompts
        self._key = key
        self._each = request.n or 1
        self._answers = len(prompts) * self._each
        self._counts = [0] * self._answers
        self._drafts = [(0, 0)] * self._answers
        self._cached = [0] * len(prompts)
        self._special = request.skip_special_tokens is False
        offsets = [0 if request.echo else len(self._text(prompt)) for prompt in prompts]
        self._logprobs = [_Logprobs(frontend, offsets[index // self._each]) for index in range(self._answers)]
        self._begun = [False] * self._answers
        self._head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model or frontend.model,
        }

    def _text(self, tokens: list[int]) -> str:
        texts = self._frontend.texts
        return texts.with_special(tokens) if self._special else texts.decode(tokens)

    def _pieces(self) -> AsyncGenerator[Piece, None]:
        request, frontend = self._request, self._frontend
        grammar = grammar_of(request)
        most = _DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
        streams = []
        for index in range(self._answers):
            prompt = self._prompts[index // self._each]
            asked = frontend.generation(
                request,
                prompt,
                most,
                index=index,
                key=self._key,
                logprobs=request.logprobs,
                grammar=grammar,
                prompt_logprobs=request.logprobs if request.echo else None,
            )
            decode = frontend.texts.with_special if self._special else frontend.texts.decode
            keep = bool(request.include_stop_str_in_output)
            text = AnswerText(decode, asked.ends, stops_of(request), keep, prompt, quiet=asked.min_tokens)
            streams.append(pieces(frontend.engine, asked, text, index, frontend.metrics))
        return merged(streams)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        """The API's choice for a piece; the first one of an answer includes the prompt if `echo` is set."""
        index, text = piece.index, piece.text
        found: list[TokenLogprob | int] = list(piece.logprobs)
        prompt = self._prompts[index // self._each]
        if not self._begun[index]:
            self._begun[index] = True
            if self._request.echo:
                text = self._text(prompt) + text
                found = [prompt[0], *(piece.prompt_logprobs or ()), *found]
        self._counts[index] = piece.count
        self._drafts[index] = max(self._drafts[index], piece.drafts)
        self._cached[index // self._each] = max(self._cached[index // self._each], piece.cached)
        wanted = self._request.logprobs is not None
        lists = self._logprobs[index].lists(found) if wanted else None
        return {"index": index, "text": text, "logprobs": lists, "finish_reason": piece.finish}

    def _usage(self) -> dict[str, Any]:
        return usage_of(sum(map(len, self._prompts)), self._counts, sum(self._cached), self._drafts)

    async def whole(self) -> dict[str, Any]:
        """The answers in one piece.

        Raises:
            AnyAccelError, ApiError: see `Engine.generate`.
        """
        parts: list[list[dict[str, Any]]] = [[] for _ in range(self._answers)]
        async with aclosing(self._pieces()) as found:
            async for piece in found:
                parts[piece.index].append(self._choice(piece))
        choices = []
        for index, mine in enumerate(parts):
            logprobs = None if self._request.logprobs is None else _joined([part["logprobs"] for part in mine])
            choices.append(
                {
                    "index": index,
                    "text": "".join(part["text"] for part in mine),
                    "logprobs": logprobs,
                    "finish_reason": mine[-1]["finish_reason"],
                }
            )
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answers as events, as they come.

        Raises:
            AnyAccelError, ApiError: see `Engine.generate`; before the first event, or instead of the rest.
        """
        options = self._request.stream_options
        usage = bool(options and options.include_usage)
        always = usage and bool(options and options.continuous_usage_stats)
        async with aclosing(self._pieces()) as found:
            async for piece in found:
                choice = self._choice(piece)
                if choice["text"] or piece.logprobs or piece.count or piece.finish:
                    more = {"usage": self._usage() if always else None} if usage else {}
                    yield event({**self._head, "choices": [choice], **more})
        if usage:
            yield event({**self._head, "choices": [], "usage": self._usage()})
        yield DONE


async def completions(frontend: Frontend, request: CompletionRequest, key: str) -> Completions:
    """Check a request, and make its prompts.

    Raises:
        ApiError: it cannot be answered.
    """
    frontend.check_model(request.model)
    if request.suffix:
        raise wrong("suffix", "is not supported: write what comes after as the model's own template has it")
    if request.best_of not in (None, request.n or 1):
        raise wrong("best_of", "only the same as n is supported")
    if request.stream_options is not None and not request.stream:
        raise wrong("stream_options", "needs stream: true")
    if request.max_tokens == 0 and not request.echo:
        raise wrong("max_tokens", "0 needs echo: true")
    given = request.prompt
    several = isinstance(given, list) and not isinstance(given[0], int)
    inputs: Sequence[Any] = given if several else [given]
    if len(inputs) * (request.n or 1) > MOST_ANSWERS:
        raise wrong("n", f"prompts times n are {len(inputs) * (request.n or 1)}, and may be {MOST_ANSWERS}")
    wanted = _DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
    prompts = []
    for place, each in enumerate(inputs):
        param = f"prompt[{place}]" if several else "prompt"
        if isinstance(each, str):
            ids = await frontend.texts.encode(each, request.add_special_tokens is not False)
        else:
            ids = frontend.check_tokens(each, param)
        if not ids:
            raise wrong(param, "the prompt is empty: it needs at least one token")
        frontend.check_room(ids, wanted, "max_tokens", param)
        prompts.append(ids)
    return Completions(frontend, request, prompts, key)
