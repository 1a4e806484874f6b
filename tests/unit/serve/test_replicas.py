# SPDX-License-Identifier: Apache-2.0
"""Which of several engines gets a request, and what they are together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from anyaccel.errors import UsageError
from anyaccel.inference.spec.decoder import PAGE
from anyaccel.serve.engine.replicas import Replicas, Routes
from anyaccel.serve.interface import Chunk, EngineStoppedError, GenerationRequest, ModelFacts, Stats

pytestmark = pytest.mark.anyio

LONG = list(range(200))


class Engine:
    """Answers when it is let, and counts what it was asked."""

    cache_pages = 8
    state_pages = 0

    def __init__(self) -> None:
        self.facts = ModelFacts(1000, 300, frozenset(), 4, "fp32", ("plan: one process",))
        self.prompts: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_ready = True
        self.fails = ""  # "before" anything has come of an answer, or "after" its first token
        self.timeouts: list[float | None] = []  # what time each request may take
        self.open = 0

    def fail(self, when: str) -> None:
        if self.fails == when:
            self.is_ready = False
            raise EngineStoppedError("a rank has died")

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        self.prompts.append(list(request.prompt))
        self.timeouts.append(request.timeout_s)
        self.open += 1
        try:
            self.fail("before")
            yield Chunk((1,))
            self.fail("after")
            await self.gate.wait()
            yield Chunk(tuple([2] * 100), finish="length")
        finally:
            self.open -= 1

    async def embed(self, prompts: Any, pooling: str, key: str = "") -> list[list[float]]:
        self.prompts.append(list(prompts[0]))
        await asyncio.sleep(0)
        self.fail("before")
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


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made = [Engine() for _ in range(3)]
    yield made
    assert not any(engine.open for engine in made)


async def test_requests_go_to_who_has_seen_most_of_them_else_to_the_least_loaded(engines: list[Engine]) -> None:
    replicas = Replicas(engines)  # type: ignore[arg-type]
    for engine in engines:
        engine.gate.clear()
    short = [asyncio.ensure_future(ask(replicas, [number])) for number in range(3)]
    while sum(engine.open for engine in engines) < 3:
        await asyncio.sleep(0)
    assert [len(engine.prompts) for engine in engines] == [1, 1, 1]
    engines[1].gate.set()
    await short[1]
    long = asyncio.ensure_future(ask(replicas, LONG))  # the second one has nothing to do
    for engine in engines:
        engine.gate.set()
    answer = await long
    await asyncio.gather(*short)
    await ask(replicas, LONG + answer + [5] * 64)  # the next turn
    await ask(replicas, [*LONG[:130], 9])
    assert [len(engine.prompts) for engine in engines] == [1, 4, 1]


async def test_a_replica_that_is_too_busy_or_starts_again_is_passed_over(engines: list[Engine]) -> None:
    replicas = Replicas(engines)  # type: ignore[arg-type]
    engines[0].gate.clear()
    sent = [asyncio.ensure_future(ask(replicas, LONG)) for _ in range(8)]
    while sum(len(engine.prompts) for engine in engines) < 8:
        await asyncio.sleep(0)
    first = len(engines[0].prompts)
    assert first == 5 and len(engines[1].prompts) + len(engines[2].prompts) == 3
    engines[0].gate.set()
    await asyncio.gather(*sent)
    engines[0].is_ready = False
    assert replicas.ready()
    await ask(replicas, LONG)
    engines[0].is_ready = True
    await ask(replicas, LONG)  # it has forgotten all
    assert len(engines[0].prompts) == first
    await replicas.drain(0)
    assert not replicas.ready()
    await ask(replicas, [1])  # one of them says why not
    await replicas.close()
    assert [engine.cache_pages for engine in engines] == [0, 0, 0]


async def test_a_request_whose_replica_fails_before_its_answer_begins_goes_to_another_one(
    engines: list[Engine],
) -> None:
    replicas = Replicas(engines)  # type: ignore[arg-type]
    engines[0].fails = engines[1].fails = "before"
    expected = [1] + [2] * 100
    chunks = [chunk.tokens async for chunk in replicas.generate(GenerationRequest([5], 101, timeout_s=60.0))]
    assert [token for tokens in chunks for token in tokens] == expected
    assert [len(engine.prompts) for engine in engines] == [1, 1, 1]
    first, second, third = (engine.timeouts[0] for engine in engines)
    assert first == 60.0 and second is not None and third is not None and 60.0 >= second >= third > 0
    engines[0].is_ready = True
    assert await replicas.embed([[5]], "last") == [[5.0]]
    assert [len(engine.prompts) for engine in engines] == [2, 1, 2]
    # Where no other one is ready, and where the answer has begun, its client is told.
    engines[0].is_ready, engines[2].is_ready = True, False
    with pytest.raises(EngineStoppedError, match="a rank has died"):
        await ask(replicas, [5])
    with pytest.raises(EngineStoppedError):
        engines[0].is_ready = True
        await replicas.embed([[5]], "last")
    engines[0].fails = "after"
    engines[0].is_ready = engines[2].is_ready = True
    answer = replicas.generate(GenerationRequest([5], 101))
    assert (await anext(answer)).tokens == (1,)
    with pytest.raises(EngineStoppedError):
        await anext(answer)
    assert len(engines[2].prompts) == 2


async def test_without_a_prefix_cache_only_the_load_counts_and_statistics_are_sums(engines: list[Engine]) -> None:
    replicas = Replicas(engines, shares=False)  # type: ignore[arg-type]
    for _ in range(2):
        answer = replicas.generate(GenerationRequest(LONG, 9))
        await anext(answer)
        assert replicas.stats() == Stats(running=1, cache_total=21)
        await ask(replicas, LONG)
        await answer.aclose()  # type: ignore[attr-defined]
    assert [len(engine.prompts) for engine in engines] == [2, 2, 0]
    assert await replicas.embed([[3], [4], [5]], "last") == [[3.0], [4.0], [5.0]]
    assert [len(engine.prompts) for engine in engines] == [3, 3, 1]
    with pytest.raises(UsageError):
        await replicas.embed([[3], [-1]], "last")
    assert replicas.facts.plan == ("plan: 3 replicas, each of one process",)


def test_replicas_that_are_not_alike_are_told_each() -> None:
    engines = [Engine() for _ in range(3)]
    engines[2].facts = ModelFacts(1000, 300, frozenset(), 4, "fp32", ("plan: one process of 3 threads",))
    plan = Replicas(engines).facts.plan  # type: ignore[arg-type]
    assert plan == ("plan: 3 replicas", "  of one process", "  of one process of 3 threads")


def test_who_has_the_longest_beginning_comes_first_then_who_has_least_to_do() -> None:
    routes: Routes[str] = Routes()
    text = list(range(10 * PAGE))
    routes.note("a", text[: 2 * PAGE], 100)
    routes.note("b", text[: 5 * PAGE + 7], 100)
    routes.note("c", text[:PAGE] + [-1] * 20 * PAGE, 100)
    idle = dict.fromkeys("abcd", 0)
    assert routes.order(text, idle) == ["b", "a", "c", "d"]
    assert routes.order(text[: 2 * PAGE + 1], {**idle, "a": 1}) == ["b", "a", "c", "d"]  # both have two pages
    assert routes.order(text[PAGE:], {**idle, "a": 2, "b": 1}) == ["c", "d", "b", "a"]  # the beginning counts alone
    assert routes.order(text[: PAGE - 1], {**idle, "a": 1}) == ["b", "c", "d", "a"]  # no whole page
    # What has the most is passed over once it has more than four open requests more than the idlest one has.
    assert routes.order(text, {**idle, "b": 4})[0] == "b"
    assert routes.order(text, {**idle, "b": 5}) == ["a", "c", "d", "b"]
    assert routes.order(text, {"a": 7, "b": 8, "c": 5, "d": 4})[0] == "b"
    routes.forget("b")
    assert routes.order(text, idle)[0] == "a"


def test_what_a_full_cache_has_dropped_is_not_counted_on() -> None:
    routes: Routes[str] = Routes()
    old, new = [1] * 4 * PAGE, [2] * 3 * PAGE
    routes.note("a", old, 5)
    routes.note("b", old[: 3 * PAGE], 5)
    assert routes.order(old, {"a": 1, "b": 0})[0] == "a"
    routes.note("a", new, 5)  # room for two pages of the old one, its first ones
    assert routes.order(old, {"a": 0, "b": 1})[0] == "b"
    assert routes.order(old[: 2 * PAGE], {"a": 0, "b": 1})[0] == "a"
    assert routes.order(new, {"a": 1, "b": 0})[0] == "a"
