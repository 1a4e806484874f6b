# SPDX-License-Identifier: Apache-2.0
"""From the engine's tokens to pieces of text, for every kind of request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

from anyaccel.errors import AnyAccelError
from anyaccel.inference.text.stopping import Detokenizer, StopFilter
from anyaccel.serve.interface import Chunk, Engine, EngineStoppedError, GenerationRequest, TokenLogprob
from anyaccel.serve.requests.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Piece:
    """The new part of one answer.

    Attributes:
        index: which answer of the request.
        text: new text, up to a stop string.
        logprobs: one for each new token, if they were asked for.
        count: tokens of the answer so far.
        prompt_logprobs, cached, drafts: see `Chunk`.
        finish: "stop" or "length" in the last piece.
    """

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...]
    count: int
    cached: int
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish: str | None = None
    drafts: tuple[int, int] = (0, 0)


class AnswerText:
    """One answer's text while its tokens come.

    Args:
        decode: makes text of tokens.
        ends: tokens whose text is left out where they end the answer.
        stops: strings that end the answer.
        keep_stop: whether the text includes the token or string that has ended the answer.
        before: tokens that the answer continues.
        quiet: the number of tokens within which a stop string has no effect.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        ends: Collection[int],
        stops: Sequence[str] = (),
        keep_stop: bool = False,
        before: Sequence[int] = (),
        quiet: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(decode, before)
        self._filter = StopFilter(stops) if stops else None
        self._ends = ends
        self._keep_stop = keep_stop
        self._quiet = quiet
        self.count = 0
        self.cached = 0

    def add(self, chunk: Chunk, index: int = 0) -> Piece:
        """The text and counts that this chunk adds."""
        return replace(self._convert(chunk, index), drafts=chunk.drafts)

    def _convert(self, chunk: Chunk, index: int) -> Piece:
        tokens = chunk.tokens
        self.cached = max(self.cached, chunk.cached_tokens)
        ended = chunk.finish == "stop" and tokens and tokens[-1] in self._ends and not self._keep_stop
        shown = tokens[:-1] if ended else tokens
        finish = None if chunk.finish is None else str(chunk.finish)
        if self._filter is None:
            self.count += len(tokens)
            text = self._detokenizer.extend(shown) if shown else ""
            if finish is not None:
                text += self._detokenizer.finish()
            return Piece(index, text, chunk.logprobs, self.count, self.cached, chunk.prompt_logprobs, finish)
        text = ""
        for place, token in enumerate(shown):
            text += self._apply_stops(self._detokenizer.add(token))
            if self._filter.stopped:
                logprobs = chunk.logprobs[: place + 1]
                return Piece(index, text, logprobs, self.count, self.cached, chunk.prompt_logprobs, "stop")
        self.count += len(tokens) - len(shown)
        if finish is not None:
            text += self._apply_stops(self._detokenizer.finish(), False)
            if self._filter.stopped:
                finish = "stop"
            else:
                text += self._filter.finish()
        return Piece(index, text, chunk.logprobs, self.count, self.cached, chunk.prompt_logprobs, finish)

    def _apply_stops(self, text: str, counts: bool = True) -> str:
        assert self._filter is not None
        self.count += counts
        if self.count < self._quiet or not text:
            return text
        shown = self._filter.add(text)
        return shown + self._filter.found if self._filter.stopped and self._keep_stop else shown


async def pieces(
    engine: Engine, request: GenerationRequest, text: AnswerText, index: int, metrics: Metrics
) -> AsyncGenerator[Piece, None]:
    """One answer; closing the generator ends it in the engine.

    Raises:
        AnyAccelError: see `Engine.generate`.
    """
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
                piece = text.add(chunk, index)
                if piece.finish is not None:
                    finish = piece.finish
                yield piece
                if piece.finish is not None:
                    return
        raise EngineStoppedError("the engine has ended in the middle of an answer; send the request again")
    except AnyAccelError:
        finish = "error"
        raise
    finally:
        metrics.finished(finish, time.monotonic() - start, len(request.prompt), text.count)


def merged(streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """The pieces of several answers as they come; closing this generator closes all of them."""
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    steps: dict[asyncio.Task[Any], AsyncGenerator[Piece, None]] = {}
    try:
        for stream in streams:
            steps[asyncio.create_task(_next(stream))] = stream
        while steps:
            done, _ = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
            for step in done:
                stream = steps.pop(step)
                piece = step.result()
                if piece is not None:
                    steps[asyncio.create_task(_next(stream))] = stream
                    yield piece
    finally:
        for step in steps:
            step.cancel()
        await asyncio.gather(*steps, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[Piece, None]) -> Piece | None:
    return await anext(stream, None)
