# SPDX-License-Identifier: Apache-2.0
"""Several models in one server: loaded on request, within the memory, and unloaded for others or when unused."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import serving
from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.model_path import models_in
from anyaccel.serve.api.models import Models, ServedModel
from anyaccel.serve.engine.engine import ServingEngine
from anyaccel.serve.engine.grammar import GrammarCompiler
from anyaccel.serve.engine.settings import EngineSettings
from anyaccel.serve.engine.turns import Turn
from anyaccel.serve.interface import EngineStoppedError, ModelFacts
from anyaccel.serve.requests.frontend import Frontend
from anyaccel.serve.requests.tokenizer import ServerTokenizer
from serve_fakes import END, Answer, ByteTokenizer, Client, FakeEngine, until

FACTS = ModelFacts(context=2048, vocabulary=259, ends=frozenset((END,)), hidden=4, dtype="fp32")


class House:
    """A server of models `a`, `b` and `c`, whose loads are counted.

    Attributes:
        loads: the names in the order of their loads, with the bytes of their caches.
        engines: the engine of each model that was loaded last.
        hold: loads wait for it.
    """

    def __init__(self, sizes: Sequence[int] = (10, 10, 10), given: int = 3, **options: Any) -> None:
        self.loads: list[tuple[str, int]] = []
        self.engines: dict[str, FakeEngine] = {}
        self.hold = threading.Event()
        self.hold.set()
        self.broken: set[str] = set()
        made = [self.served(name, size) for name, size in zip("abc", sizes, strict=True)]
        self.models = Models(made[:given], **{"memory": 40, "found": lambda: made[given:], **options})
        self.client = Client(FakeEngine(), served=self.models)

    def served(self, name: str, size: int) -> ServedModel:
        def load(cache: int, check: Callable[[], None]) -> Frontend:
            self.loads.append((name, cache))
            while not self.hold.wait(0.001):
                check()
            if name in self.broken:
                raise ModelError(f"{name} is broken")
            facts = replace(FACTS, weight_bytes=size, cache_bytes=cache)
            self.engines[name] = FakeEngine(f"I am {name}.", facts)
            return Frontend(self.engines[name], ServerTokenizer(ByteTokenizer()), [name], root=f"{name}.gguf")

        return ServedModel([name], root=f"{name}.gguf", parent="a" if name == "b" else "", size=size, load=load)

    async def ask(self, name: str | None, **more: Any) -> Answer:
        value = {"messages": [{"role": "user", "content": "Who?"}], **({"model": name} if name else {}), **more}
        return await self.client.post("/v1/chat/completions", value)

    async def said(self, name: str | None) -> str:
        answer = await self.ask(name)
        assert answer.status == 200, answer.json
        text: str = answer.json["choices"][0]["message"]["content"]
        return text

    @property
    def loaded(self) -> list[str]:
        return [model.names[0] for model in self.models.loaded()]


def in_house(test: Callable[[House], Awaitable[None]], **options: Any) -> House:
    """Run a test; the server is closed at its end, and leaves no task."""
    house = House(**options)

    async def run() -> None:
        try:
            await asyncio.wait_for(test(house), 60)
        finally:
            await house.models.close()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, "tasks are left"

    asyncio.run(run())
    return house


def test_a_model_is_loaded_when_a_request_names_it() -> None:
    async def test(house: House) -> None:
        assert house.loaded == []
        assert await house.said("b") == "I am b."
        assert await house.said("b") == "I am b."
        assert await house.said(None) == "I am a."  # the first of those that were given
        assert await house.said("a:latest") == "I am a."
        assert house.loads == [("b", 10), ("a", 5)]
        listed = (await house.client.get("/v1/models")).json["data"]
        statuses = {each["id"]: (each["status"]["value"], each["max_model_len"]) for each in listed}
        assert statuses == {"a": ("loaded", 2048), "b": ("loaded", 2048), "c": ("unloaded", None)}
        assert [each["parent"] for each in listed] == [None, "a", None]
        tags = (await house.client.get("/api/tags")).json["models"]
        assert [(each["name"], each["size"]) for each in tags] == [("a", 10), ("b", 10), ("c", 10)]
        running = (await house.client.get("/api/ps")).json["models"]
        assert [(each["name"], each["size"]) for each in running] == [("a", 15), ("b", 20)]
        wrong = await house.ask("d")
        assert wrong.status == 404 and "there is a, b, c" in wrong.json["error"]["message"]

    in_house(test)


def test_requests_for_the_same_model_wait_for_one_load() -> None:
    async def test(house: House) -> None:
        house.hold.clear()
        asked = [asyncio.create_task(house.said(name)) for name in "aaba"]
        await until(lambda: house.loads)
        ready = await house.client.get("/ready")
        house.hold.set()
        assert await asyncio.gather(*asked) == ["I am a.", "I am a.", "I am b.", "I am a."]
        assert [name for name, _ in house.loads] == ["a", "b"] and ready.status == 200

    in_house(test)


def test_the_model_that_was_unused_for_longest_makes_room() -> None:
    async def test(house: House) -> None:
        for name in "abac":
            await house.said(name)
        assert house.loaded == ["a", "c"] and not house.engines["b"].live
        assert await house.said("b") == "I am b."
        assert house.loaded == ["b", "c"]

    in_house(test, memory=30, cache_bytes=4)


def test_a_model_in_use_is_unloaded_once_its_requests_have_ended() -> None:
    async def test(house: House) -> None:
        await house.said("a")
        engine = house.engines["a"]
        engine.gate = asyncio.Semaphore(0)
        first = asyncio.create_task(house.said("a"))
        await until(lambda: len(engine.requests) == 2)
        other = asyncio.create_task(house.said("b"))
        await until(lambda: house.models.named("a").leaves is not None)
        again = asyncio.create_task(house.said("a"))  # waits for the next load, so that b gets its turn
        await asyncio.sleep(0.01)
        assert not other.done() and engine.live
        for _ in range(100):
            engine.gate.release()
        assert await asyncio.gather(first, other, again) == ["I am a.", "I am b.", "I am a."]
        assert [name for name, _ in house.loads] == ["a", "b", "a"]

    in_house(test, memory=16, cache_bytes=4)


def test_of_a_mixture_that_does_not_fit_experts_stay_on_the_disk() -> None:
    async def test(house: House) -> None:
        large = house.models.named("b")
        large.has_experts = lambda: False
        assert (await house.ask("b")).status == 503
        large.has_experts = lambda: True
        assert await house.said("b") == "I am b."
        assert house.loaded == ["b"]  # alone: it takes all that there is

    in_house(test, sizes=(10, 50, 10), memory=40, cache_bytes=4)


def test_what_does_not_fit_or_is_broken_is_said_and_tried_again() -> None:
    async def test(house: House) -> None:
        large = await house.ask("b")
        assert large.status == 503 and "'b' does not fit" in large.json["error"]["message"]
        house.broken.add("a")
        broken = await house.ask("a", stream=True)
        assert broken.status == 500 and broken.json["error"]["message"] == "a is broken"
        house.broken.clear()
        assert await house.said("a") == "I am a."

    in_house(test, sizes=(10, 100, 10))


def test_a_client_that_goes_does_not_end_a_load() -> None:
    async def test(house: House) -> None:
        house.hold.clear()
        leave = asyncio.Event()
        value = {"messages": [{"role": "user", "content": "Who?"}], "model": "a"}
        gone = asyncio.create_task(house.client.post("/v1/chat/completions", value, leave=leave))
        await until(lambda: house.loads)
        leave.set()
        assert (await gone).status == 499
        assert house.models.named("a").users == 0
        house.hold.set()
        assert await house.said("a") == "I am a." and len(house.loads) == 1

    in_house(test)


def test_a_request_waits_for_its_model_no_longer_than_it_may() -> None:
    async def test(house: House) -> None:
        house.hold.clear()
        assert (await house.ask("a")).status == 504
        house.hold.set()

    in_house(test, wait_s=0.02)


def test_the_end_of_the_server_ends_a_load() -> None:
    async def test(house: House) -> None:
        house.hold.clear()
        asked = asyncio.create_task(house.ask("a"))
        await until(lambda: house.loads)
        await house.models.drain(0.0)
        assert (await asked).status == 503
        assert (await house.ask("b")).status == 503
        assert (await house.client.get("/ready")).status == 503

    assert in_house(test).engines == {}


def test_a_model_that_nobody_uses_is_unloaded() -> None:
    async def test(house: House) -> None:
        assert await house.said("a") == "I am a."
        model = house.models.named("a")
        deadline = time.monotonic() + 20
        while model.frontend is not None and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        assert house.loaded == [] and not house.engines["a"].live
        assert await house.said("a") == "I am a."
        text = (await house.client.get("/metrics")).body.decode()
        assert 'anyaccel_request_success_total{model_name="a",finished_reason="stop"} 2' in text  # both loads counted
        assert text.count("# TYPE anyaccel_generation_tokens_total counter") == 1
        assert 'anyaccel_generation_tokens_total{model_name="b"} 0' in text

    in_house(test, idle_s=0.03)


@pytest.mark.parametrize(
    ("given", "left"),
    [(0, 0.0), ("0s", 0.0), ("5m", 300.0), ("1h30m", 5400.0), (90, 90.0), ("90", 90.0), (-1, None), ("-1m", None)],
)
def test_ollamas_keep_alive_says_how_long_a_model_stays(given: Any, left: float | None) -> None:
    async def test(house: House) -> None:
        value = {"model": "a", "prompt": "", "keep_alive": given}
        answer = await house.client.post("/api/generate", {**value, "stream": False})
        assert answer.json["done_reason"] == ("unload" if left == 0.0 else "load")
        if left == 0.0:
            model = house.models.named("a")
            while model.frontend is not None:  # wait_for of the whole test bounds it
                await asyncio.sleep(0.001)
            return
        (running,) = (await house.client.get("/api/ps")).json["models"]
        seconds = house.models.named("a").seconds_left()
        assert seconds == (None if left is None else pytest.approx(left, abs=5))
        assert running["expires_at"].startswith("9999") == (left is None)

    in_house(test, idle_s=500.0)


@pytest.mark.parametrize("given", ["soon", "5x", "m", "1e3", "--1s", "5m "])
def test_what_is_no_duration_is_refused(given: str) -> None:
    async def test(house: House) -> None:
        answer = await house.client.post("/api/generate", {"model": "a", "prompt": "", "keep_alive": given})
        assert answer.status == 400 and "keep_alive" in answer.json["error"]

    in_house(test)


def test_models_that_are_found_have_no_first() -> None:
    async def test(house: House) -> None:
        none = await house.ask(None)
        assert none.status == 400 and "model: is required here; there is a, b, c" in none.json["error"]["message"]
        assert await house.said("b") == "I am b."
        assert await house.said(None) == "I am b."  # the only one that is loaded

    in_house(test, given=0)


def test_the_models_of_a_folder(tmp_path: Path) -> None:
    for name in (
        "one/config.json",
        "org/two/config.json",
        "three.Q4_0.gguf",
        "four/mmproj-four.gguf",
        "four/four.gguf",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for part in (1, 2):
        (tmp_path / f"five-0000{part}-of-00002.gguf").touch()
    (tmp_path / "notes").mkdir()
    assert models_in(tmp_path) == {
        "one": tmp_path / "one",
        "org/two": tmp_path / "org" / "two",
        "three.Q4_0": tmp_path / "three.Q4_0.gguf",
        "four": tmp_path / "four" / "four.gguf",
        "five-00001-of-00002": tmp_path / "five-00001-of-00002.gguf",
    }
    assert models_in(tmp_path / "missing") == {}


def test_engines_on_the_same_cores_compute_in_turn_and_answer_as_alone() -> None:
    settings = EngineSettings(max_batch=4)
    computing = 0

    def made(turn: Turn) -> ServingEngine:
        decoder = serving.decoder_of(serving.native(), settings)
        apply = decoder.apply

        def counted(*arguments: Any) -> Any:
            nonlocal computing
            computing += 1
            assert computing == 1, "two engines compute at once"
            time.sleep(0.0005)
            computing -= 1
            return apply(*arguments)

        decoder.apply = counted  # type: ignore[method-assign]
        return ServingEngine(lambda _: decoder, settings, GrammarCompiler("", None), turn)

    async def ask() -> tuple[list[serving.Answer], list[serving.Answer]]:
        turn = Turn()
        engines = [made(turn), made(turn)]
        prompts = [serving.prompt_of(random.Random(seed), 20) for seed in range(3)]
        try:
            alone = [await serving.answer(engines[0], prompt, 30) for prompt in prompts]
            both = await asyncio.gather(*(serving.answer(each, p, 30) for each in engines for p in prompts))
        finally:
            for engine in engines:
                await engine.close()
        return alone, both

    alone, both = asyncio.run(ask())
    assert [each.tokens for each in both] == [each.tokens for each in alone] * 2


def test_a_turn_goes_to_those_who_asked_first_and_hurries_the_one_before() -> None:
    turn, order, hurried = Turn(), [], threading.Event()
    threads = []

    def work(name: str, asked: threading.Event) -> None:
        asked.set()
        with turn.taken(lambda: order.append(f"hurry {name}")):
            order.append(name)

    with turn.taken(hurried.set):
        for name in "abc":
            asked = threading.Event()
            threads.append(threading.Thread(target=work, args=(name, asked)))
            threads[-1].start()
            assert asked.wait(10)
            deadline = time.monotonic() + 10
            while len(turn._queue) < len(threads) + 1 and time.monotonic() < deadline:
                time.sleep(0.001)
        assert hurried.is_set() and order == []
    for thread in threads:
        thread.join(10)
    assert [each for each in order if "hurry" not in each] == ["a", "b", "c"]
    assert order.index("hurry a") < order.index("b") and "hurry c" not in order


def test_a_load_that_ends_too_late_is_closed() -> None:
    async def test(house: House) -> None:
        asked = asyncio.create_task(house.ask("a"))
        house.models._check = lambda: None  # type: ignore[method-assign]  # a load that does not ask in time
        house.hold.clear()
        await until(lambda: house.loads)
        house.models._stopping = True
        del house.models._check
        house.hold.set()
        assert (await asked).status == 503
        with pytest.raises(EngineStoppedError):
            house.models._check()

    assert not in_house(test).engines["a"].live
