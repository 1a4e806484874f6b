# SPDX-License-Identifier: Apache-2.0
"""How results get from the engine's thread to the coroutines that wait for them, all in one event loop.

After a call of the decoder they are sent in one batch. Between two steps all cores would wait until Python has planned
the next one. While the same requests only decode there is nothing to plan: one call of the decoder takes several steps,
and writes the tokens of each to a feed that the event loop reads. A message to the engine stops the call after the step
under way.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from anyaccel.serve.engine.step import MultiStep
from anyaccel.serve.interface import Chunk, DeadlineError

LONGEST_CALL_S = 0.2  # counters and deadlines are only looked at between calls, so they may be late by this

Result = Chunk | list[float] | Exception  # a part of an answer, an embedding, or the error that ends the request


class ResultStream:
    """The results of one request. All methods are called in the loop.

    Args:
        deadline: in time.monotonic(). The engine checks it between two steps; the stream checks it while a step hangs.
    """

    def __init__(self, deadline: float = float("inf")) -> None:
        self._deadline = deadline
        self._results: deque[Result] = deque()
        self._wakeup = asyncio.Event()

    def put(self, result: Result) -> None:
        self._results.append(result)
        self._wakeup.set()

    async def next(self) -> Chunk | list[float]:
        """Wait for the next result; chunks that have come together are returned as one.

        Raises:
            AnyAccelError: the request ended with it; the chunks before it were returned already.
            DeadlineError: nothing has come by the deadline.
        """
        if not self._results:
            loop = asyncio.get_running_loop()
            alarm = loop.call_later(self._deadline - time.monotonic(), self._wakeup.set)
            try:
                await self._wakeup.wait()
            finally:
                alarm.cancel()
            if not self._results:
                raise DeadlineError
        result = self._results.popleft()
        while isinstance(result, Chunk) and self._results and isinstance(more := self._results[0], Chunk):
            self._results.popleft()
            result = Chunk(
                result.tokens + more.tokens,
                result.logprobs + more.logprobs,
                result.prompt_logprobs if more.prompt_logprobs is None else more.prompt_logprobs,
                more.cached_tokens,
                more.finish,
                more.queued_s,
                max(result.drafts, more.drafts),
            )
        if not self._results:
            self._wakeup.clear()
        if isinstance(result, Exception):
            raise result
        return result


class Subscriber(NamedTuple):
    """The stream that gets a request's tokens from the feed, and the other fields of each of its chunks."""

    stream: ResultStream
    cached_tokens: int
    queued_s: float


class _Call(NamedTuple):
    """A call of several steps: its tokens wait until the loop has the batches that were sent before it."""

    batches: int
    subscribers: Sequence[Subscriber]


class Delivery:
    """Sends batches and the feed's tokens to the streams, in the order in which they were computed."""

    def __init__(self) -> None:
        from anyaccel import _llm

        self._feed = _llm.TokenFeed()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._batch: list[tuple[ResultStream, Result]] = []
        self._sent = 0  # batches; written by the engine's thread only
        self._delivered = 0  # batches; written by the loop only
        self._tags = itertools.count(1)
        self._calls: dict[int, _Call] = {}  # by their tags
        self._undelivered: deque[tuple[int, list[int]]] = deque()  # tags and tokens that were read from the feed
        self._last_finished = 0  # the tag of the newest call that has returned

    # --- called in the loop

    def attach(self) -> None:
        """Deliver to the running loop from now on."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._feed.fileno(), self.read_feed)

    def read_feed(self) -> None:
        """Put the feed's tokens into their streams, up to those that must wait for a batch."""
        last_finished = self._last_finished
        self._undelivered.extend(self._feed.take())
        while self._undelivered:
            call = self._calls[self._undelivered[0][0]]
            if call.batches > self._delivered:
                return
            _, tokens = self._undelivered.popleft()
            for each, token in zip(call.subscribers, tokens, strict=True):
                each.stream.put(Chunk((token,), cached_tokens=each.cached_tokens, queued_s=each.queued_s))
        for tag in list(self._calls):  # a copy: the engine's thread may add a call meanwhile
            if tag <= last_finished:
                del self._calls[tag]

    def _deliver(self, batch: Sequence[tuple[ResultStream, Result]]) -> None:
        self.read_feed()
        for stream, result in batch:
            stream.put(result)
        self._delivered += 1
        self.read_feed()

    # --- called in the engine's thread

    def add(self, stream: ResultStream, result: Result) -> None:
        """Put a result into the next batch."""
        self._batch.append((stream, result))

    def send(self) -> None:
        """Send the batch; for a closed loop it is dropped, as nobody waits there."""
        batch, self._batch = self._batch, []
        if batch and self._loop is not None:
            self._sent += 1
            self._call_in_loop(lambda: self._deliver(batch))

    def start_call(self, most: int, subscribers: Sequence[Subscriber]) -> MultiStep:
        """Allow a call of up to `most` steps."""
        tag = next(self._tags)
        self._calls[tag] = _Call(self._sent, subscribers)
        return MultiStep(most, self._feed, tag)

    def finish_call(self, call: MultiStep) -> None:
        """Note that the call has returned, so that all its tokens are in the feed."""
        self._last_finished = call.tag

    # --- called anywhere

    def stop(self, value: bool = True) -> None:
        """End the call after the step under way; False: the next call may go on."""
        self._feed.stop(value)

    def close(self) -> None:
        """Detach the loop from the feed, whose descriptor stays open until then."""
        feed, loop = self._feed, self._loop
        if loop is not None:
            self._call_in_loop(lambda: loop.remove_reader(feed.fileno()))

    def _call_in_loop(self, callback: Callable[[], object]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
