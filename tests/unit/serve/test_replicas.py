# SPDX-License-Identifier: Apache-2.0
"""Which of several engines gets a request, and what they are together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest

from anyaccel.errors import UsageError
from anyaccel.serve.contract import Chunk, GenerationRequest, ModelFacts, Stats
from anyaccel.serve.replicas import Replicas

LONG = list(range(200))


class Engine:
    """Answers when it is let, and counts what it was asked."""

    cache_pages = 8

    def __init__(self) -> None:
        self.facts = ModelFacts(1000, 300, frozenset(), 4, "fp32", ("plan: one process",))
        self.asked: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_ready = True
        self.open = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        self.asked.append(list(request.prompt))
        self.open += 1
        try:
            yield Chunk((1,))
            await self.gate.wait()
            yield Chunk(tuple([2] * 100), finish="length")
        finally:
            self.open -= 1

    async def embed(self, prompts: Any, pooling: str, key: str = "") -> list[list[float]]:
        self.asked.append(list(prompts[0]))
        await asyncio.sleep(0)
        if prompts[0] == [-1]:
            raise UsageError("prompt")
        return [[float(prompts[0][0])]]

    def stats(self) -> Stats:
        return Stats(running=self.open, cache_total=7)

    def ready(self) -> bool:
        return self.is_ready

    def alive(self) -> bool:
        return self.is_ready

    async def drain(self, seconds: float) -> None:
        self.is_ready = False

    async def close(self) -> None:
        self.cache_pages = 0


async def ask(replicas: Replicas, prompt: list[int]) -> list[int]:
    chunks = [chunk.tokens async for chunk in replicas.generate(GenerationRequest(prompt, 101))]
    return [token for tokens in chunks for token in tokens]


def run(main: Callable[[list[Engine], Replicas], Coroutine[Any, Any, None]], shares: bool = True) -> None:
    async def whole() -> None:
        engines = [Engine() for _ in range(3)]
        await main(engines, Replicas(engines, shares))  # type: ignore[arg-type]
        assert not any(engine.open for engine in engines)

    asyncio.run(whole())


def test_requests_go_to_who_has_seen_most_of_them_else_to_the_least_loaded() -> None:
    async def main(engines: list[Engine], replicas: Replicas) -> None:
        for engine in engines:
            engine.gate.clear()
        short = [asyncio.ensure_future(ask(replicas, [number])) for number in range(3)]
        while sum(engine.open for engine in engines) < 3:
            await asyncio.sleep(0)
        assert [len(engine.asked) for engine in engines] == [1, 1, 1]
        engines[1].gate.set()
        await short[1]
        long = asyncio.ensure_future(ask(replicas, LONG))  # the second one has nothing to do
        for engine in engines:
            engine.gate.set()
        answer = await long
        await asyncio.gather(*short)
        await ask(replicas, LONG + answer + [5] * 64)  # the next turn
        await ask(replicas, [*LONG[:130], 9])
        assert [len(engine.asked) for engine in engines] == [1, 4, 1]

    run(main)


def test_a_replica_that_is_too_busy_or_starts_again_is_passed_over() -> None:
    async def main(engines: list[Engine], replicas: Replicas) -> None:
        engines[0].gate.clear()
        asked = [asyncio.ensure_future(ask(replicas, LONG)) for _ in range(8)]
        while sum(len(engine.asked) for engine in engines) < 8:
            await asyncio.sleep(0)
        first = len(engines[0].asked)
        assert first == 5 and len(engines[1].asked) + len(engines[2].asked) == 3
        engines[0].gate.set()
        await asyncio.gather(*asked)
        engines[0].is_ready = False
        assert replicas.ready()
        await ask(replicas, LONG)
        engines[0].is_ready = True
        await ask(replicas, LONG)  # it has forgotten all
        assert len(engines[0].asked) == first
        await replicas.drain(0)
        assert not replicas.ready()
        await ask(replicas, [1])  # one of them says why not
        await replicas.close()
        assert [engine.cache_pages for engine in engines] == [0, 0, 0]

    run(main)


def test_without_a_prefix_cache_only_the_load_counts_and_statistics_are_sums() -> None:
    async def main(engines: list[Engine], replicas: Replicas) -> None:
        for _ in range(2):
            answer = replicas.generate(GenerationRequest(LONG, 9))
            await anext(answer)
            assert replicas.stats() == Stats(running=1, cache_total=21)
            await ask(replicas, LONG)
            await answer.aclose()  # type: ignore[attr-defined]
        assert [len(engine.asked) for engine in engines] == [2, 2, 0]
        assert await replicas.embed([[3], [4], [5]], "last") == [[3.0], [4.0], [5.0]]
        assert [len(engine.asked) for engine in engines] == [3, 3, 1]
        with pytest.raises(UsageError):
            await replicas.embed([[3], [-1]], "last")
        assert replicas.facts.plan == ("plan: 3 replicas, each of one process",)

    run(main, shares=False)
