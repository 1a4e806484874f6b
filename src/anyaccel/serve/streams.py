# SPDX-License-Identifier: Apache-2.0
"""What a step brings for a request, and who waits for it in an asyncio loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

from anyaccel.serve.contract import Chunk, DeadlineError, Finish, TokenLogprob


@dataclass
class Piece:
    """What a step brought for one request; `error` ends it."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int = 0
    embedding: list[float] | None = None
    finish: Finish | None = None
    error: Exception | None = None
    queued_s: float = 0.0
    drafts: tuple[int, int] = (0, 0)


class Stream:
    """What has come for one request, and who waits for it. Everything is called in the loop but `loop`.

    Args:
        deadline: in time.monotonic(); the engine keeps it between two steps, and the stream while a step hangs.
    """

    def __init__(self, deadline: float = float("inf")) -> None:
        self.loop = asyncio.get_running_loop()
        self._deadline = deadline
        self._pieces: deque[Piece] = deque()
        self._come = asyncio.Event()

    def put(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._come.set()

    async def next(self) -> Piece:
        """All that has come, as one.

        Raises:
            AnyAccelError: the request ended by it; what came before was given out.
            DeadlineError: nothing has come by the deadline.
        """
        if not self._pieces:
            alarm = self.loop.call_later(self._deadline - time.monotonic(), self._come.set)
            try:
                await self._come.wait()
            finally:
                alarm.cancel()
            if not self._pieces:
                raise DeadlineError
        whole = self._pieces.popleft()
        while self._pieces and whole.error is None and self._pieces[0].error is None:
            more = self._pieces.popleft()
            whole = Piece(
                whole.tokens + more.tokens,
                whole.logprobs + more.logprobs,
                whole.prompt_logprobs if more.prompt_logprobs is None else more.prompt_logprobs,
                more.cached_tokens,
                more.embedding,
                more.finish,
                queued_s=more.queued_s,
                drafts=max(whole.drafts, more.drafts),
            )
        if not self._pieces:
            self._come.clear()
        if whole.error is not None:
            raise whole.error
        return whole


def chunk_of(piece: Piece) -> Chunk:
    """What the front gets of it."""
    return Chunk(
        piece.tokens,
        piece.logprobs,
        piece.prompt_logprobs,
        piece.cached_tokens,
        piece.finish,
        piece.queued_s,
        piece.drafts,
    )
