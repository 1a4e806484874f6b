# SPDX-License-Identifier: Apache-2.0
"""Multi-step calls of the decoder, and how their tokens reach asyncio while the call still runs.

Between two steps all cores would wait until Python has planned the next one. While the same requests only decode there
is nothing to plan: one call of the decoder takes several steps, and writes the tokens of each to a feed that the event
loop reads. A message to the engine stops the call after the step under way. Everything else goes through the outbox.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from anyaccel.serve.engine.slots import MultiStep
from anyaccel.serve.engine.streams import Result, Stream
from anyaccel.serve.interface import Chunk

LONGEST_CALL_S = 0.2  # counters and deadlines are only looked at between calls, so they may be late by this


@dataclass(slots=True)
class Subscriber:
    """The stream that gets a request's tokens, and what each of its chunks says beside them."""

    stream: Stream
    cached_tokens: int
    queued_s: float


class _LoopChannel:
    """Counts what the outbox sends to one loop, so that the feed's tokens keep their order relative to it.

    The tokens of a call come after what was sent before the call, and before what is sent after it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.sent = 0  # written by the engine's thread only
        self.delivered = 0  # written by the loop only


class _Call:
    """A multi-step call: its tokens wait until the loop has delivered the `after` batches that were sent before it."""

    def __init__(self, channel: _LoopChannel, subscribers: Sequence[Subscriber]) -> None:
        self.channel = channel
        self.after = channel.sent
        self.subscribers = subscribers


class TokenDispatcher:
    """Moves tokens from the decoder's feed to the streams of one loop."""

    def __init__(self) -> None:
        from anyaccel import _llm

        self._feed = _llm.TokenFeed()
        self._channel: _LoopChannel | None = None
        self._tags = itertools.count(1)
        self._calls: dict[int, _Call] = {}  # by their tags
        self._undelivered: deque[tuple[int, list[int]]] = deque()  # tags and tokens that were read from the feed
        self._last_finished = 0  # the tag of the newest call that has returned

    # --- called in the loop

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make the loop read the feed, unless another open loop does already."""
        if self._channel is None or (self._channel.loop is not loop and self._channel.loop.is_closed()):
            self._channel = _LoopChannel(loop)
            loop.add_reader(self._feed.fileno(), self.read_feed)

    def read_feed(self) -> None:
        """Put the feed's tokens into their streams, up to those that must wait for a batch of the outbox."""
        last_finished = self._last_finished
        self._undelivered.extend(self._feed.take())
        while self._undelivered:
            call = self._calls[self._undelivered[0][0]]
            if call.channel is self._channel and call.after > call.channel.delivered:
                return
            _, tokens = self._undelivered.popleft()
            for each, token in zip(call.subscribers, tokens, strict=True) if call.channel is self._channel else ():
                each.stream.put(Chunk((token,), cached_tokens=each.cached_tokens, queued_s=each.queued_s))
        for tag in list(self._calls):  # a copy: the engine's thread may add a call meanwhile
            if tag <= last_finished:
                del self._calls[tag]

    def deliver(self, channel: _LoopChannel | None, batch: Sequence[tuple[Stream, Result]]) -> None:
        """Put a batch of the outbox into its streams, in its order relative to the feed's tokens.

        Args:
            channel: what `count_batch` returned for this batch.
        """
        if channel is not None:
            self.read_feed()
        for stream, result in batch:
            stream.put(result)
        if channel is not None:
            channel.delivered += 1
            self.read_feed()

    # --- called in the engine's thread

    def count_batch(self, loop: asyncio.AbstractEventLoop) -> _LoopChannel | None:
        """Count a batch that the outbox is about to send to the loop; None if the loop does not read the feed."""
        channel = self._channel
        if channel is None or channel.loop is not loop:
            return None
        channel.sent += 1
        return channel

    def start_call(self, most: int, subscribers: Sequence[Subscriber]) -> MultiStep | None:
        """Allow a call of up to `most` steps; None if a subscriber's loop does not read the feed."""
        channel = self._channel
        if channel is None or any(each.stream.loop is not channel.loop for each in subscribers):
            return None
        tag = next(self._tags)
        self._calls[tag] = _Call(channel, list(subscribers))
        return MultiStep(most, self._feed, tag)

    def finish_call(self, call: MultiStep) -> None:
        """Note that the call has returned, so that all its tokens are in the feed."""
        self._last_finished = call.tag

    # --- called anywhere

    def stop(self, value: bool = True) -> None:
        """End the call after the step under way; False: the next call may go on."""
        self._feed.stop(value)

    def close(self) -> None:
        """Detach the loop from the feed. The feed's descriptor stays open until the loop has removed it."""
        channel, feed = self._channel, self._feed
        if channel is None or channel.loop.is_closed():
            return
        loop = channel.loop
        try:
            loop.call_soon_threadsafe(lambda: loop.remove_reader(feed.fileno()))
        except RuntimeError:
            if not loop.is_closed():
                raise


class Outbox:
    """Collects the results of a step, and sends them in one batch to each loop."""

    def __init__(self, dispatcher: TokenDispatcher) -> None:
        self._dispatcher = dispatcher
        self._batches: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Result]]] = {}

    def add(self, stream: Stream, result: Result) -> None:
        self._batches.setdefault(stream.loop, []).append((stream, result))

    def send(self) -> None:
        """Wake the loops; a batch for a closed loop is dropped, as nobody waits there."""
        batches, self._batches = self._batches, {}
        for loop, batch in batches.items():
            channel = self._dispatcher.count_batch(loop)
            try:
                loop.call_soon_threadsafe(self._dispatcher.deliver, channel, batch)
            except RuntimeError:
                if not loop.is_closed():
                    raise
