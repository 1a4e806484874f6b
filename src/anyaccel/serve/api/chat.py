# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions`: a conversation's next message, at once or as a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from anyaccel.serve.interface import TokenLogprob
from anyaccel.serve.protocol.chat import ChatRequest
from anyaccel.serve.protocol.common import SamplingFields
from anyaccel.serve.protocol.errors import wrong
from anyaccel.serve.protocol.json_text import DONE, event
from anyaccel.serve.requests.conversation import Delta, Prompt, answer_room, deltas, prompt_of
from anyaccel.serve.requests.frontend import Frontend, new_id
from anyaccel.serve.requests.rendering import ending_of
from anyaccel.serve.requests.structured import grammar_of
from anyaccel.serve.requests.texts import Texts


def stops_of(request: SamplingFields) -> list[str]:
    """The strings that end an answer."""
    stop = request.stop
    return [stop] if isinstance(stop, str) else list(stop or ())


def usage_of(prompt: int, counts: Sequence[int], cached: int, drafts: Sequence[tuple[int, int]] = ()) -> dict[str, Any]:
    """The `usage` of a response.

    Args:
        drafts: the numbers of drafted and of accepted tokens of each answer.
    """
    drafted, accepted = (sum(each[place] for each in drafts) for place in (0, 1))
    told = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sum(counts),
        "total_tokens": prompt + sum(counts),
        "prompt_tokens_details": {"cached_tokens": cached},
        **({"completion_tokens_details": told} if drafted else {}),
    }


def _logprobs(texts: Texts, found: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": [_logprob(texts, each) for each in found]}


def _token_logprob(texts: Texts, token: int, logprob: float) -> dict[str, Any]:
    text, values = texts.token(token)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(values)}


def _logprob(texts: Texts, found: TokenLogprob) -> dict[str, Any]:
    tops = [_token_logprob(texts, token, logprob) for token, logprob in found.top]
    return {**_token_logprob(texts, found.token, found.logprob), "top_logprobs": tops}


class Chat:
    """Answers one request that has been checked."""

    def __init__(self, frontend: Frontend, request: ChatRequest, prompt: Prompt, max_tokens: int, key: str) -> None:
        self._frontend = frontend
        self._request = request
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._key = key
        self._answers = request.n or 1
        self._counts = [0] * self._answers
        self._drafts = [(0, 0)] * self._answers
        self._cached = 0
        self._head = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": request.model or frontend.model}

    def _deltas(self) -> AsyncGenerator[Delta, None]:
        request = self._request
        return deltas(
            self._frontend,
            request,
            self._prompt,
            max_tokens=self._max_tokens,
            answers=self._answers,
            stops=stops_of(request),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            several=request.parallel_tool_calls is not False,
            key=self._key,
        )

    def _count(self, delta: Delta) -> None:
        self._counts[delta.piece.index] = delta.piece.count
        self._drafts[delta.piece.index] = max(self._drafts[delta.piece.index], delta.piece.drafts)
        self._cached = max(self._cached, delta.piece.cached)

    def _usage(self) -> dict[str, Any]:
        return usage_of(len(self._prompt.tokens), self._counts, self._cached, self._drafts)

    def _logprobs_of(self, delta: Delta) -> list[TokenLogprob]:
        """The log-probabilities of the text's tokens, without a token that only ends the answer."""
        ends = self._frontend.engine.facts.ends
        return [each for each in delta.piece.logprobs if each.token not in ends]

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece.

        Raises:
            AnyAccelError, ApiError: see `Engine.generate`.
        """
        content, thoughts = [""] * self._answers, [""] * self._answers
        calls: list[list[dict[str, Any]]] = [[] for _ in content]
        logprobs: list[list[TokenLogprob]] = [[] for _ in content]
        finish: list[str | None] = [None] * self._answers
        async with aclosing(self._deltas()) as found:
            async for delta in found:
                self._count(delta)
                index = delta.piece.index
                content[index] += delta.content
                thoughts[index] += delta.thoughts
                for call in delta.calls:
                    add_call(calls[index], call)
                logprobs[index] += self._logprobs_of(delta)
                finish[index] = delta.finish or finish[index]
        choices = []
        for index in range(self._answers):
            message: dict[str, Any] = {"role": "assistant", "content": content[index]}
            if thoughts[index]:
                message["reasoning_content"] = thoughts[index]
            if calls[index]:
                message["content"] = content[index] or None
                message["tool_calls"] = calls[index]
            told = _logprobs(self._frontend.texts, logprobs[index]) if self._request.logprobs else None
            choices.append({"index": index, "message": message, "logprobs": told, "finish_reason": finish[index]})
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage()}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as events, as it comes.

        Raises:
            AnyAccelError, ApiError: see `Engine.generate`; before the first event, or instead of the rest.
        """
        options = self._request.stream_options
        usage = bool(options and options.include_usage)
        always = usage and bool(options and options.continuous_usage_stats)
        head = {**self._head, "object": "chat.completion.chunk"}

        def chunk(choice: dict[str, Any]) -> bytes:
            more = {"usage": self._usage() if always else None} if usage else {}
            return event({**head, "choices": [choice], **more})

        begun = [False] * self._answers
        async with aclosing(self._deltas()) as found:
            async for delta in found:
                self._count(delta)
                index = delta.piece.index
                change: dict[str, Any] = {}
                if not begun[index]:
                    begun[index] = True
                    yield chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
                if delta.thoughts:
                    change["reasoning_content"] = delta.thoughts
                if delta.content:
                    change["content"] = delta.content
                if delta.calls:
                    change["tool_calls"] = delta.calls
                logprobs = self._logprobs_of(delta) if self._request.logprobs else []
                if change or logprobs or delta.finish:
                    choice = {"index": index, "delta": change, "finish_reason": delta.finish}
                    if logprobs:
                        choice["logprobs"] = _logprobs(self._frontend.texts, logprobs)
                    yield chunk(choice)
        if usage:
            yield event({**head, "choices": [], "usage": self._usage()})
        yield DONE


def add_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    """Add a call, or append to the arguments of one."""
    if "id" in part:
        calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
    else:
        calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


async def chat(frontend: Frontend, request: ChatRequest, key: str) -> Chat:
    """Check a request, and make its prompt.

    Raises:
        ApiError: it cannot be answered.
    """
    frontend.check_model(request.model)
    for name, newer in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(request, name) is not None:
            raise wrong(name, f"is not supported: OpenAI has replaced it by {newer}")
    if request.top_logprobs and not request.logprobs:
        raise wrong("top_logprobs", "needs logprobs: true")
    if request.stream_options is not None and not request.stream:
        raise wrong("stream_options", "needs stream: true")
    prompt = await prompt_of(
        frontend,
        request.messages,
        request.tools,
        request.tool_choice,
        request.parallel_tool_calls,
        grammar_of(request),
        request.chat_template_kwargs,
        ending_of(request),
    )
    param = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
    wanted = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    return Chat(frontend, request, prompt, answer_room(frontend, prompt.tokens, wanted, param, "messages"), key)
