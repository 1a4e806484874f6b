# SPDX-License-Identifier: Apache-2.0
"""The queue between the engine's thread and the coroutine that waits for one request's results."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from anyaccel.serve.interface import Chunk, DeadlineError

Result = Chunk | list[float] | Exception  # a part of an answer, an embedding, or the error that ends the request


class Stream:
    """The results of one request. All methods are called in the loop; `loop` may be read in any thread.

    Args:
        deadline: in time.monotonic(). The engine checks it between two steps; the stream checks it while a step hangs.
    """

    def __init__(self, deadline: float = float("inf")) -> None:
        self.loop = asyncio.get_running_loop()
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
            alarm = self.loop.call_later(self._deadline - time.monotonic(), self._wakeup.set)
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
