# SPDX-License-Identifier: Apache-2.0
"""From the engine's tokens to text, and from text to reasoning, content and tool calls, while an answer comes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from anyaccel.errors import AnyAccelError
from anyaccel.inference.text.stopping import Detokenizer, StopFilter
from anyaccel.serve.interface import Chunk, Engine, EngineStoppedError, GenerationRequest, Grammar, TokenLogprob
from anyaccel.serve.protocol.common import CUSTOM_INPUT, GenerationFields
from anyaccel.serve.requests.conversation import Prompt
from anyaccel.serve.requests.frontend import Frontend, new_id
from anyaccel.serve.requests.metrics import Metrics
from anyaccel.serve.requests.reasoning import ReasoningParser
from anyaccel.serve.requests.tools.format import ParsedCall
from anyaccel.serve.requests.tools.harmony import HarmonyParser
from anyaccel.serve.requests.tools.parser import ToolCallParser

# Text -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The new part of one answer.

    Attributes:
        index: which answer of the request.
        text: new text, up to a stop string.
        logprobs: one for each new token, if they were asked for.
        count: tokens of the answer so far.
        prompt_logprobs, cached, drafts: see `Chunk`.
        finish: "stop" or "length" in the last one.
        stop: the stop string that has ended the answer.
    """

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...]
    count: int
    cached: int
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish: str | None = None
    drafts: tuple[int, int] = (0, 0)
    stop: str = ""


class AnswerText:
    """One answer's text while its tokens come.

    Args:
        decode: makes text of tokens.
        ends: tokens whose text is left out where they end the answer.
        stops: strings that end the answer.
        keep_stop: whether the text includes the token or string that has ended the answer.
        before: tokens that the answer continues.
        min_tokens: the number of tokens within which a stop string has no effect.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        ends: Collection[int],
        stops: Sequence[str] = (),
        keep_stop: bool = False,
        before: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(decode, before)
        self._filter = StopFilter(stops) if stops else None
        self._ends = ends
        self._keep_stop = keep_stop
        self._min_tokens = min_tokens
        self.count = 0
        self._cached = 0

    def add(self, chunk: Chunk, index: int = 0) -> TextDelta:
        """The text and counts that this chunk adds."""
        tokens, logprobs, finish = chunk.tokens, chunk.logprobs, cast("str | None", chunk.finish)
        self._cached = max(self._cached, chunk.cached_tokens)
        ended = finish == "stop" and tokens and tokens[-1] in self._ends and not self._keep_stop
        visible = tokens[:-1] if ended else tokens
        if self._filter is None:
            self.count += len(tokens)
            text = self._detokenizer.extend(visible) if visible else ""
            if finish is not None:
                text += self._detokenizer.finish()
        else:
            before = self.count
            text = self._text_until_stop(visible, self._filter)
            if self._filter.stopped:
                finish, logprobs = "stop", logprobs[: self.count - before]
            else:
                self.count += len(tokens) - len(visible)
                if finish is not None:
                    text += self._apply_stops(self._detokenizer.finish(), self._filter)
                    finish = "stop" if self._filter.stopped else finish
                    text += self._filter.finish()
        stop = self._filter.found if self._filter is not None else ""
        prompt_logprobs, drafts = chunk.prompt_logprobs, chunk.drafts
        return TextDelta(index, text, logprobs, self.count, self._cached, prompt_logprobs, finish, drafts, stop)

    def _text_until_stop(self, tokens: Sequence[int], stops: StopFilter) -> str:
        text = ""
        for token in tokens:
            self.count += 1
            text += self._apply_stops(self._detokenizer.add(token), stops)
            if stops.stopped:
                break
        return text

    def _apply_stops(self, text: str, stops: StopFilter) -> str:
        if self.count < self._min_tokens or not text:
            return text
        text = stops.add(text)
        return text + stops.found if stops.stopped and self._keep_stop else text


def generate_texts(
    frontend: Frontend,
    request: GenerationFields,
    prompts: Sequence[list[int]],
    max_tokens: int,
    *,
    key: str,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
    special: bool = False,
    continues: bool = True,
    more_ends: frozenset[int] = frozenset(),
) -> AsyncGenerator[TextDelta, None]:
    """The answers as they come, numbered as OpenAI does: n answers to the first prompt, then n answers to the second.

    Args:
        special: whether the text shows special tokens.
        continues: whether the text continues that of the prompt, so that its first space counts.
        more_ends: see `Frontend.generation_request`.

    Raises:
        AnyAccelError, ApiError: see `Engine.generate`.
    """
    tokenizer, count = frontend.tokenizer, request.answer_count
    special = special or request.skip_special_tokens is False
    decode = tokenizer.decode_with_special if special else tokenizer.decode
    streams = []
    for index in range(len(prompts) * count):
        prompt = prompts[index // count]
        generation = frontend.generation_request(
            request,
            prompt,
            max_tokens,
            index=index,
            key=key,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            more_ends=more_ends,
        )
        text = AnswerText(
            decode,
            generation.ends,
            request.stop_strings,
            bool(request.include_stop_str_in_output),
            prompt if continues else (),
            generation.min_tokens,
        )
        streams.append(_generate_text(frontend.engine, generation, text, index, frontend.metrics))
    return streams[0] if len(streams) == 1 else _merge(streams)


async def _generate_text(
    engine: Engine, request: GenerationRequest, text: AnswerText, index: int, metrics: Metrics
) -> AsyncGenerator[TextDelta, None]:
    """One answer; closing the generator ends it in the engine."""
    start = last = time.monotonic()
    count = 0
    finish = "abort"  # the client has gone, unless a finish reason or an error replaces this
    try:
        # The interface promises an iterator only, but every engine's is a generator, which has to be closed.
        async with aclosing(cast("AsyncGenerator[Chunk, None]", engine.generate(request))) as chunks:
            async for chunk in chunks:
                now = time.monotonic()
                if chunk.tokens:
                    if not count:
                        metrics.queued.observe(chunk.queued_s)
                        metrics.first_token.observe(now - start)
                    else:
                        metrics.between_tokens.observe((now - last) / len(chunk.tokens), len(chunk.tokens))
                    count, last = count + len(chunk.tokens), now
                if chunk.finish == "abort":
                    raise EngineStoppedError("the server is shutting down")
                delta = text.add(chunk, index)
                if delta.finish is not None:
                    finish = delta.finish
                yield delta
                if delta.finish is not None:
                    return
        raise EngineStoppedError("the engine has ended in the middle of an answer; send the request again")
    except AnyAccelError:
        finish = "error"
        raise
    finally:
        metrics.finished(finish, time.monotonic() - start, len(request.prompt), text.count)


async def _merge(streams: Sequence[AsyncGenerator[TextDelta, None]]) -> AsyncGenerator[TextDelta, None]:
    """The parts of several answers as they come; closing this generator closes all of them."""
    steps: dict[asyncio.Task[Any], AsyncGenerator[TextDelta, None]] = {}
    try:
        for stream in streams:
            steps[asyncio.create_task(_next(stream))] = stream
        while steps:
            done, _ = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
            for step in done:
                stream = steps.pop(step)
                delta = step.result()
                if delta is not None:
                    steps[asyncio.create_task(_next(stream))] = stream
                    yield delta
    finally:
        for step in steps:
            step.cancel()
        await asyncio.gather(*steps, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[TextDelta, None]) -> TextDelta | None:
    return await anext(stream, None)


# Messages -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class MessageDelta:
    """The new part of one answer, divided into content, reasoning and calls.

    Attributes:
        text: the part itself, with its log-probabilities and counts.
        calls: parts of calls, in the form of a stream's deltas.
        reasoning_count: tokens up to the end of the reasoning so far.
    """

    text: TextDelta
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    reasoning_count: int = 0


class AnswerParser:
    """Parses one answer while it comes."""

    def __init__(self, prompt: Prompt, frontend: Frontend) -> None:
        form = frontend.tool_format
        required = prompt.calls == "required"
        self._messages: HarmonyParser | None = None
        self._reasoning: ReasoningParser | None = None
        self._calls: ToolCallParser | None = None
        if form.is_messages:
            thoughts = prompt.reasoning is not None
            self._messages = HarmonyParser(prompt.calls != "none", thoughts, required, prompt.continues)
        else:
            if frontend.reasoning is not None and prompt.reasoning is not None:
                self._reasoning = ReasoningParser(frontend.reasoning, prompt.reasoning)
            if prompt.calls != "none":
                self._calls = ToolCallParser(form, prompt.schemas, required)
        self._customs = prompt.customs
        self._input: str | None = None  # the arguments so far of a call of a custom tool, whose input comes as a whole
        self._several = prompt.several
        self._short_ids = form.short_ids
        self._count = 0
        self._reasoning_count = 0

    def add(self, text: TextDelta) -> MessageDelta:
        """The parsed form of the next part."""
        last = text.finish is not None
        delta = MessageDelta(text, finish=text.finish)
        calls: list[ParsedCall] = []
        if self._messages is not None:
            delta.reasoning, delta.content, calls = self._messages.add(text.text, last)
        else:
            delta.content = text.text
            if self._reasoning is not None:
                delta.reasoning, delta.content = self._reasoning.add(delta.content, last)
            if self._calls is not None:
                delta.content, calls = self._calls.add(delta.content, last)
        for call in calls:
            if not call.name and self._input is not None:
                self._input += call.arguments
            elif not call.name:
                delta.calls.append({"index": self._count - 1, "function": {"arguments": call.arguments}})
            elif self._several or not self._count:
                delta.calls += self._end_input()
                delta.calls.append(self._new_call(call))
        if last:
            delta.calls += self._end_input()
        if self._count and delta.finish == "stop":
            delta.finish = "tool_calls"
        if delta.reasoning:
            self._reasoning_count = text.count
        delta.reasoning_count = self._reasoning_count
        return delta

    def _new_call(self, call: ParsedCall) -> dict[str, Any]:
        index, self._count = self._count, self._count + 1
        identity = call.identity or (new_id("")[:9] if self._short_ids else new_id("call_"))
        if call.name in self._customs:
            self._input = call.arguments
            return {"index": index, "id": identity, "type": "custom", "custom": {"name": call.name, "input": ""}}
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": index, "id": identity, "type": "function", "function": function}

    def _end_input(self) -> list[dict[str, Any]]:
        """The input of the call of a custom tool, if one is open."""
        if self._input is None:
            return []
        text, self._input = custom_input(self._input), None
        return [{"index": self._count - 1, "custom": {"input": text}}]


def custom_input(arguments: str) -> str:
    """The text that a model gives a custom tool, also if max_tokens has cut it; other arguments as they are."""
    for end in ("", '"}'):
        try:
            value = json.loads(arguments + end, strict=False)
        except (ValueError, RecursionError):
            continue
        text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
        if isinstance(text, str):
            return text
    return arguments


async def generate_messages(
    frontend: Frontend,
    request: GenerationFields,
    prompt: Prompt,
    max_tokens: int,
    *,
    key: str,
    logprobs: int | None = None,
) -> AsyncGenerator[MessageDelta, None]:
    """The answers to a conversation as they come.

    Raises:
        AnyAccelError, ApiError: see `Engine.generate`.
    """
    texts = generate_texts(
        frontend,
        request,
        [prompt.tokens],
        max_tokens,
        key=key,
        logprobs=logprobs,
        grammar=prompt.grammar,
        special=frontend.shows_special(prompt.calls != "none"),
        continues=prompt.continues,
        more_ends=prompt.ends,
    )
    parsers = [AnswerParser(prompt, frontend) for _ in range(request.answer_count)]
    async with aclosing(texts):
        async for text in texts:
            yield parsers[text.index].add(text)
