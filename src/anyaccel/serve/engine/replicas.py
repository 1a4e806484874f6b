# SPDX-License-Identifier: Apache-2.0
"""Several engines with the same model as one, and which of them gets a request. Torch-free."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Coroutine, Hashable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, cast

from anyaccel.inference.spec.decoder import PAGE
from anyaccel.serve.engine.pages import CachedSequence
from anyaccel.serve.interface import Chunk, Engine, EngineStoppedError, GenerationRequest, ModelFacts, Stats

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


# Routing: also for the replicas of a Ray cluster ----------------------------------------------------------

# An engine that has more of a prompt in its cache is preferred while it has at most this many more open requests than
# the least loaded one.
_IMBALANCE = 4

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Routes(Generic[K]):
    """An estimate of what each engine has in its prefix cache, from the prompts that it was sent.

    Args:
        shares: whether the engines have a prefix cache.
    """

    def __init__(self, shares: bool = True) -> None:
        self._shares = shares
        self._seen: dict[K, OrderedDict[int, None]] = {}  # keys of pages, the oldest first

    def order(self, prompt: Sequence[int], load: Mapping[K, int]) -> list[K]:
        """The engines, the best one for this prompt first.

        The best one has the longest prefix of the prompt in its cache, unless it is much busier than another; without
        such a prefix it is the least loaded one.

        Args:
            load: the number of open requests of each engine that may be chosen.
        """
        most = min(load.values(), default=0) + _IMBALANCE
        keys = _keys(prompt)

        def rank(engine: K) -> tuple[bool, int, int]:
            seen = self._seen.get(engine, ())
            count = next((place for place, key in enumerate(keys) if key not in seen), len(keys))
            return load[engine] > most, -count, load[engine]

        return sorted(load, key=rank)

    def note(self, engine: K, tokens: Sequence[int], cache_pages: int) -> None:
        """Note that an engine computes these tokens; its cache has room for `cache_pages` pages."""
        if not self._shares:
            return
        seen = self._seen.setdefault(engine, OrderedDict())
        for key in reversed(_keys(tokens)):  # most requests share the first pages, so they are to be evicted last
            seen[key] = None
            seen.move_to_end(key)
        while len(seen) > cache_pages:
            seen.popitem(last=False)

    def forget(self, engine: K) -> None:
        """Forget an engine that has lost its cache or has ended."""
        self._seen.pop(engine, None)

    def known(self) -> list[K]:
        """The engines that have been sent prompts."""
        return list(self._seen)


def _keys(tokens: Sequence[int]) -> list[int]:
    """The keys of the pages that the tokens fill."""
    cached = CachedSequence(0, list(tokens))
    return [cached.key(page) for page in range(len(tokens) // PAGE)]


async def gather(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all calls; when one fails, the others are cancelled and awaited before its error is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# The replicas of one server -------------------------------------------------------------------------------


class ReplicaEngine(Engine, Protocol):
    """One of the engines."""

    @property
    def cache_pages(self) -> int:
        """The number of pages that its cache has room for."""

    def alive(self) -> bool:
        """Whether it is ready, except that a step may be late."""


class Replicas:
    """See `Engine`; `Routes` says which of them gets a request.

    A request whose engine fails before the first part of its answer goes to another engine, if one is ready. If its
    answer has begun, it ends with EngineStoppedError.

    Args:
        timeout_s: of a request that does not set it.
    """

    def __init__(self, engines: Sequence[ReplicaEngine], shares: bool = True, timeout_s: float = float("inf")) -> None:
        self._engines = tuple(engines)
        self._timeout_s = timeout_s
        self._open = [0] * len(engines)
        self._routes: Routes[int] = Routes(shares)
        first = engines[0].facts
        each = list(dict.fromkeys(engine.facts.plan[0].removeprefix("plan: ") for engine in engines))
        plan = (f"plan: {len(engines)} replicas, each of {each[0]}", *first.plan[1:])
        if len(each) > 1:  # the machine's NUMA nodes differ
            plan = (f"plan: {len(engines)} replicas", *(f"  of {one}" for one in each), *first.plan[1:])
        self.facts: ModelFacts = replace(
            first,
            plan=plan,
            weight_bytes=sum(engine.facts.weight_bytes for engine in engines),
            cache_bytes=sum(engine.facts.cache_bytes for engine in engines),
        )

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        end = time.monotonic() + (self._timeout_s if request.timeout_s is None else request.timeout_s)
        failed: set[int] = set()
        while True:
            number = self._choose(request.prompt, failed)
            begun = False
            try:
                async with aclosing(self._answer(number, request)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except EngineStoppedError:
                failed.add(number)
                if begun or not self._others(failed) or time.monotonic() > end:
                    raise
            if end != float("inf"):
                request = replace(request, timeout_s=max(0.001, end - time.monotonic()))

    async def _answer(self, number: int, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        self._note(number, request.prompt)
        tokens = list(request.prompt)
        self._open[number] += 1
        try:
            answer = cast("AsyncGenerator[Chunk, None]", self._engines[number].generate(request))
            async with aclosing(answer) as chunks:
                async for chunk in chunks:
                    tokens += chunk.tokens
                    yield chunk
        finally:
            self._open[number] -= 1
            if self._engines[number].alive():
                self._note(number, tokens)  # the conversation's next turn begins with it

    async def embed(
        self, prompts: Sequence[Sequence[int]], pooling: Literal["mean", "last"], key: str = ""
    ) -> list[list[float]]:
        async def one(prompt: Sequence[int]) -> list[float]:
            failed: set[int] = set()
            while True:
                number = self._choose((), failed)
                self._open[number] += 1
                try:
                    return (await self._engines[number].embed([prompt], pooling, key))[0]
                except EngineStoppedError:
                    failed.add(number)
                    if not self._others(failed):
                        raise
                finally:
                    self._open[number] -= 1

        return await gather(map(one, prompts))

    def stats(self) -> Stats:
        return sum((engine.stats() for engine in self._engines), Stats())

    def ready(self) -> bool:
        return any(engine.ready() for engine in self._engines)

    def alive(self) -> bool:
        return any(engine.alive() for engine in self._engines)

    async def drain(self, seconds: float) -> None:
        await asyncio.gather(*(engine.drain(seconds) for engine in self._engines))

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines))

    def _choose(self, prompt: Sequence[int], failed: Collection[int]) -> int:
        """The engine for this prompt; one that restarts, or whose step is late, only if all others do too."""
        for number, engine in enumerate(self._engines):
            if not engine.alive():
                self._routes.forget(number)
        ready = self._others(failed) or list(range(len(self._engines)))
        return self._routes.order(prompt, {number: self._open[number] for number in ready})[0]

    def _others(self, failed: Collection[int]) -> list[int]:
        """Engines that are ready, but for those that have failed."""
        return [number for number, engine in enumerate(self._engines) if number not in failed and engine.ready()]

    def _note(self, number: int, tokens: Sequence[int]) -> None:
        self._routes.note(number, tokens, self._engines[number].cache_pages)
