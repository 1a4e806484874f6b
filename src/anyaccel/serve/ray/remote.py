# SPDX-License-Identifier: Apache-2.0
"""The engine of an API process: the replicas of the cluster as one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from contextvars import Context
from dataclasses import replace
from typing import Any, Literal

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from anyaccel.errors import AnyAccelError
from anyaccel.serve.engine.replicas import gather
from anyaccel.serve.interface import (
    Chunk,
    DeadlineError,
    EngineFullError,
    EngineStoppedError,
    GenerationRequest,
    ModelFacts,
    Stats,
)
from anyaccel.serve.ray.calls import ReplicaCall

logger = logging.getLogger("ray.serve")

_POLL_S = 1.0  # between two polls of the replicas
_POLL_TIMEOUT_S = 10.0
_TRIES = 4  # for a request whose answer has not begun
_RETRY_S = 0.2  # before the next try
_RETRY_AFTER_S = 2.0
_LATE_S = 5.0  # that a replica may take to report that a request's deadline has passed


class RemoteEngine:
    """See `Engine`.

    A request whose replica ends before the first part of its answer goes to another one. If its answer has begun, it
    ends with EngineStoppedError.

    Args:
        facts: of the model, as a replica reports them.
        timeout_s: of a request that does not set it.
    """

    def __init__(self, model: DeploymentHandle[Any], facts: ModelFacts, timeout_s: float) -> None:
        self._model = model
        self._stream = model.options(stream=True, method_name="generate")
        self._timeout_s = timeout_s
        self._stats = Stats()
        self._ready = False
        self._polling = asyncio.create_task(self._poll())
        self.facts = facts

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        end = time.monotonic() + (self._timeout_s if request.timeout_s is None else request.timeout_s)
        avoid: set[Any] = set()
        for left in reversed(range(_TRIES)):
            call = ReplicaCall(
                replace(request, timeout_s=max(0.001, end - time.monotonic())), list(request.prompt), set(avoid)
            )
            begun = False
            try:
                async with aclosing(self._answer(call, end)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except EngineStoppedError:
                if begun or not left or time.monotonic() > end:
                    raise
            avoid.add(call.replica)
            await asyncio.sleep(_RETRY_S)

    async def _answer(self, call: ReplicaCall, end: float) -> AsyncGenerator[Chunk, None]:
        """The chunks that one replica sends.

        Raises:
            EngineStoppedError: it has ended.
        """
        chunks = _call_replica(self._stream, call)
        ended = False
        try:
            while True:
                async with asyncio.timeout(max(0.0, end - time.monotonic()) + _LATE_S):
                    chunk = await anext(chunks, None)
                ended = chunk is None or isinstance(chunk, AnyAccelError) or chunk.finish is not None
                if chunk is None:
                    raise EngineStoppedError("the replica has ended")
                if isinstance(chunk, AnyAccelError):
                    raise chunk
                call.tokens += chunk.tokens
                yield chunk
                if ended:
                    return
        except TimeoutError:
            raise DeadlineError from None
        except (RayError, RayServeException) as error:
            ended = True
            raise _engine_error(error) from None
        finally:
            if not ended:
                chunks.cancel()

    async def embed(
        self, prompts: Sequence[Sequence[int]], pooling: Literal["mean", "last"], key: str = ""
    ) -> list[list[float]]:
        async def one(prompt: Sequence[int]) -> list[float]:
            call = ReplicaCall((list(prompt), pooling, key))
            try:
                async with asyncio.timeout(self._timeout_s + _LATE_S):
                    embedding: list[float] | AnyAccelError = await _call_replica(self._model.embed, call)
            except TimeoutError:
                raise DeadlineError from None
            except (RayError, RayServeException) as error:
                raise _engine_error(error) from None
            if isinstance(embedding, AnyAccelError):
                raise embedding
            return embedding

        return await gather(map(one, prompts))

    def stats(self) -> Stats:
        """The sum over all replicas at the last poll, without the counts of replicas that have ended."""
        return self._stats

    def ready(self) -> bool:
        return self._ready

    async def _poll(self) -> None:
        """Keep the readiness and the counters of the replicas up to date."""
        while True:
            try:
                polled = self._model.broadcast("status")
                results = await polled.results_async(timeout_s=_POLL_TIMEOUT_S, return_exceptions=True)
            except (RayError, RayServeException, TimeoutError) as error:
                logger.debug("the replicas cannot be polled: %s", error)
                results = []
            states = [each for each in results if isinstance(each, tuple)]
            self._ready = any(ready for ready, _ in states)
            self._stats = sum((stats for _, stats in states), Stats())
            await asyncio.sleep(_POLL_S)

    async def drain(self, seconds: float) -> None:
        """Nothing to do: Ray waits for open requests before it ends this process."""

    async def close(self) -> None:
        self._polling.cancel()
        with suppress(asyncio.CancelledError):
            await self._polling


def _call_replica(method: Any, call: ReplicaCall) -> Any:
    """Call a replica outside the context variables that Ray sets for an HTTP request.

    Inside them all calls would have one request id, and a router that does not take requests in their order would find
    only one call by it: the others would wait for ever.
    """
    return Context().run(method.remote, call)


def _engine_error(error: Exception) -> AnyAccelError:
    """The engine's error for one of Ray's."""
    if isinstance(error, BackPressureError):
        return EngineFullError("all replicas are busy, and so many requests wait already", _RETRY_AFTER_S)
    logger.warning("a request has lost its replica: %s", str(error).partition("\n")[0])
    return EngineStoppedError("the replica that answered has ended, or is started again")
