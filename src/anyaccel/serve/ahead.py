# SPDX-License-Identifier: Apache-2.0
"""Several steps in one call of the decoder, whose tokens reach those who wait for them meanwhile.

Between two steps all cores would wait until Python has planned the next one. As long as nothing but the same answers
goes on, there is nothing to plan: the decoder takes step after step, and what they bring is taken from its feed by the
asyncio loop that waits for it. Whatever comes in ends that after the step under way. All else goes by the outbox; what
is on both roads keeps its order.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from anyaccel.serve.slots import Ahead
from anyaccel.serve.streams import Piece, Stream

LONGEST_S = 0.2  # of such a call: what the engine counts, and deadlines, may be late by this


class Receiver:
    """Who gets a request's tokens, and what is said with each of them."""

    __slots__ = ("cached_tokens", "queued_s", "stream")

    def __init__(self, stream: Stream, cached_tokens: int, queued_s: float) -> None:
        self.stream = stream
        self.cached_tokens = cached_tokens
        self.queued_s = queued_s


class _Way:
    """To one loop, on two roads: what the outbox sends, and what the feed has. A call's tokens are later than what was
    sent before it, and earlier than what is sent after it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.sent = 0  # by the outbox; the engine's thread counts
        self.arrived = 0  # of these; the loop counts


class _Call:
    """Steps of the decoder that it takes at once.

    Attributes:
        after: what the outbox had sent when they began.
    """

    def __init__(self, way: _Way, receivers: Sequence[Receiver]) -> None:
        self.way = way
        self.after = way.sent
        self.receivers = receivers


class Feeding:
    """From the decoder's feed to the streams of one loop."""

    def __init__(self) -> None:
        from anyaccel import _llm

        self._feed = _llm.TokenFeed()
        self._way: _Way | None = None
        self._tags = itertools.count(1)
        self._calls: dict[int, _Call] = {}  # by their tags
        self._taken: deque[tuple[int, list[int]]] = deque()  # and not given to anyone yet
        self._over = 0  # the last tag whose call is over

    # --- called in the loop

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let a loop take what comes, if no other one does."""
        if self._way is None or (self._way.loop is not loop and self._way.loop.is_closed()):
            self._way = _Way(loop)
            loop.add_reader(self._feed.fileno(), self.take)

    def take(self) -> None:
        """Give what has come to those who wait for it, as far as its turn is."""
        over = self._over
        self._taken.extend(self._feed.take())
        while self._taken:
            call = self._calls[self._taken[0][0]]
            if call.way is self._way and call.after > call.way.arrived:
                return
            _, tokens = self._taken.popleft()
            for receiver, token in zip(call.receivers, tokens, strict=True) if call.way is self._way else ():
                receiver.stream.put(Piece((token,), cached_tokens=receiver.cached_tokens, queued_s=receiver.queued_s))
        for tag in list(self._calls):  # at once: the engine's thread may add one meanwhile
            if tag <= over:
                del self._calls[tag]

    def arrive(self, way: _Way | None, put: Callable[[], object]) -> None:
        """What the outbox has sent has come: `put` gives it to those who wait, in its turn.

        Args:
            way: what `send` said when it was sent.
        """
        if way is None:
            put()
            return
        self.take()
        put()
        way.arrived += 1
        self.take()

    # --- called in the engine's thread

    def send(self, loop: asyncio.AbstractEventLoop) -> _Way | None:
        """The outbox is about to send something to a loop; returns what `arrive` is to get with it."""
        way = self._way
        if way is None or way.loop is not loop:
            return None
        way.sent += 1
        return way

    def begin(self, most: int, receivers: Sequence[Receiver]) -> Ahead | None:
        """Leave for several steps; None where somebody waits in another loop."""
        way = self._way
        if way is None or any(each.stream.loop is not way.loop for each in receivers):
            return None
        tag = next(self._tags)
        self._calls[tag] = _Call(way, list(receivers))
        return Ahead(most, self._feed, tag)

    def over(self, ahead: Ahead) -> None:
        """Its call is over: all that it brought is in the feed."""
        self._over = ahead.tag

    # --- called anywhere

    def stop(self, value: bool = True) -> None:
        """End the call after the step under way; False: the next call may go on."""
        self._feed.stop(value)

    def close(self) -> None:
        """Nobody waits any more. The feed's descriptor lives until its loop has let it go."""
        way, feed = self._way, self._feed
        if way is None or way.loop.is_closed():
            return
        loop = way.loop
        try:
            loop.call_soon_threadsafe(lambda: loop.remove_reader(feed.fileno()))
        except RuntimeError:
            if not loop.is_closed():
                raise


class Outbox:
    """Pieces of a step, sent to each loop at once.

    Args:
        feeding: the other road to them, where what is on both keeps its order.
    """

    def __init__(self, feeding: Feeding) -> None:
        self._feeding = feeding
        self._pieces: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Piece]]] = {}

    def add(self, stream: Stream, piece: Piece) -> None:
        self._pieces.setdefault(stream.loop, []).append((stream, piece))

    def send(self) -> None:
        """Wake the loops; one that is closed has nobody who waits."""
        pieces, self._pieces = self._pieces, {}
        for loop, those in pieces.items():
            way = self._feeding.send(loop)
            try:
                loop.call_soon_threadsafe(self._deliver, way, those)
            except RuntimeError:
                if not loop.is_closed():
                    raise

    def _deliver(self, way: _Way | None, pieces: list[tuple[Stream, Piece]]) -> None:
        def put() -> None:
            for stream, piece in pieces:
                stream.put(piece)

        self._feeding.arrive(way, put)
