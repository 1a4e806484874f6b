# SPDX-License-Identifier: Apache-2.0
"""The engine of `anyaccel serve --tp 2`: the same answers as of one process, and a rank that is killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import family_cases
import serving
from anyaccel.errors import UsageError
from anyaccel.inference.options import ModelOptions
from anyaccel.inference.ranks.control import RankError, StepDeadline
from anyaccel.serve.engine.opening import open_engine
from anyaccel.serve.engine.settings import EngineSettings
from anyaccel.serve.interface import EngineStoppedError, GenerationRequest, SamplingParams
from rank_processes import ranks_below

pytestmark = pytest.mark.anyio
pytest.importorskip("transformers")


class Screen:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, done: int, total: int) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "llama"
    family_cases.build("llama", positions=1024).save_pretrained(path)
    return path


async def _ask(made: Any, prompts: list[list[int]]) -> list[serving.Answer]:
    asked = [serving.answer(made, prompt, 20, ignore_end=True) for prompt in prompts]
    scored = SamplingParams(temperature=0.0, logprobs=1, logit_bias={9: 1.5})
    return await asyncio.gather(*asked, serving.answer(made, prompts[0], 8, scored, prompt_logprobs=0))


def _open(folder: Path, tp: int, pp: int = 1, runtime: str = "auto") -> Any:
    options = ModelOptions("fp32", tp=tp, pp=pp, threads=1, runtime=runtime)
    return open_engine(folder, options, Screen(), EngineSettings(cache_bytes=1 << 26))


@pytest.mark.parametrize(
    ("tp", "pp", "runtime"),
    [
        (2, 1, "auto"),
        pytest.param(2, 1, "device", marks=pytest.mark.slow),
        pytest.param(1, 2, "auto", marks=pytest.mark.slow),
    ],
)
async def test_two_ranks_answer_as_one_process_does_and_are_started_again(
    folder: Path, tp: int, pp: int, runtime: str
) -> None:
    generator = random.Random(9)
    system = serving.prompt_of(generator, 150)
    prompts = [system + serving.prompt_of(generator, 10 * number) for number in range(1, 7)]

    one = _open(folder, 1)
    try:
        expected = await _ask(one, prompts)
        vector = (await one.embed([prompts[0]], "mean"))[0]
    finally:
        await one.close()
    ours, theirs = socket.socketpair()
    two = _open(folder, tp, pp, runtime)
    try:
        with theirs:
            ours.close()  # a connection of the server is closed also while ranks run that came after it
            theirs.settimeout(60)
            assert theirs.recv(1) == b""
        assert two.facts.vocabulary == serving.VOCAB and two.facts.context == one.facts.context
        assert "2 ranks" in two.facts.plan[0]
        for _ in range(2):  # the second time with all prompts in the cache
            found = await _ask(two, prompts)
            assert [each.tokens for each in found] == [each.tokens for each in expected]
            assert [each.logprob for each in found[-1].logprobs] == pytest.approx(
                [each.logprob for each in expected[-1].logprobs], abs=1e-4
            )
            assert len(found[-1].prompt_logprobs or ()) == len(prompts[0]) - 1
        assert (await two.embed([prompts[0]], "mean"))[0] == pytest.approx(vector, abs=1e-5)
        asked = two.generate(GenerationRequest(prompts[0], 800, serving.GREEDY, ignore_end=True))
        await anext(asked)
        victims = ranks_below(os.getpid(), "anyaccel.serve.engine.rank")
        assert len(victims) == 2
        os.kill(victims[1], signal.SIGKILL)
        with pytest.raises(EngineStoppedError, match="started again"):
            async for _ in asked:
                pass
        while not two.ready():
            await asyncio.sleep(0.05)
        found = await _ask(two, prompts[:1])
        assert found[0].tokens == expected[0].tokens
    finally:
        await two.close()
    assert not ranks_below(os.getpid(), "anyaccel.serve.engine.rank")


@pytest.mark.slow
async def test_ranks_that_are_stopped_are_killed_and_started_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = _open(folder, 2)
    try:
        expected = (await serving.answer(two, [5, 6, 7], 8, ignore_end=True)).tokens
        for stopped in (slice(1, 2), slice(0, 1), slice(0, 2)):
            victims = ranks_below(os.getpid(), "anyaccel.serve.engine.rank")
            assert len(victims) == 2
            for victim in victims[stopped]:
                os.kill(victim, signal.SIGSTOP)
            with monkeypatch.context() as patch:  # only while nothing could be in time
                patch.setattr(StepDeadline, "seconds", lambda _self, _tokens: 0.2)
                with pytest.raises(EngineStoppedError, match="a rank hangs"):
                    await serving.answer(two, [5, 6, 7], 8, ignore_end=True)
            while not two.ready():
                await asyncio.sleep(0.05)
            assert (await serving.answer(two, [5, 6, 7], 8, ignore_end=True)).tokens == expected
            assert not set(victims) & set(ranks_below(os.getpid(), "anyaccel.serve.engine.rank"))
    finally:
        await two.close()
    assert not ranks_below(os.getpid(), "anyaccel.serve.engine.rank")


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_greedy_answers_of_two_ranks_are_the_same_alone_and_in_a_batch_of_32(
    folder: Path, prefix_cache: bool
) -> None:
    generator = random.Random(11)
    system = serving.prompt_of(generator, 130)
    prompts = [(system if number % 2 else []) + serving.prompt_of(generator, 3 + 2 * number) for number in range(40)]

    settings = EngineSettings(cache_bytes=1 << 26, max_batch=32, prefix_cache=prefix_cache)
    made = open_engine(folder, ModelOptions(tp=2, threads=1), Screen(), settings)
    try:
        alone = [(await serving.answer(made, prompt, 24, ignore_end=True)).tokens for prompt in prompts]

        async def one(number: int) -> None:
            for _ in range(number % 5):
                await asyncio.sleep(0)
            asking = made.generate(GenerationRequest(prompts[number], 24, serving.GREEDY, ignore_end=True))
            found: list[int] = []
            async for chunk in asking:
                found += chunk.tokens
                if number % 7 == 3:  # it breaks off
                    break
            await asking.aclose()  # type: ignore[attr-defined]
            assert found == alone[number][: len(found)]
            assert number % 7 == 3 or len(found) == 24

        await asyncio.gather(*map(one, range(len(prompts))))
        assert (made.stats().prefix_hits > 0) == prefix_cache
    finally:
        await made.close()


@pytest.mark.slow
async def test_two_replicas_answer_as_one_process_does(folder: Path) -> None:
    generator = random.Random(13)
    prompts = [serving.prompt_of(generator, 70 + number) for number in range(6)]

    one = _open(folder, 1)
    try:
        expected = [(await serving.answer(one, prompt, 12, ignore_end=True)).tokens for prompt in prompts]
    finally:
        await one.close()
    options = ModelOptions("fp32", threads=1)
    two = open_engine(folder, options, Screen(), EngineSettings(cache_bytes=1 << 26, replicas=2))
    try:
        assert "2 replicas, each of one process of 1 threads" in two.facts.plan[0]
        asked = [serving.answer(two, prompt, 12, ignore_end=True) for prompt in prompts]
        assert [each.tokens for each in await asyncio.gather(*asked)] == expected
        again = [await serving.answer(two, prompt, 12, ignore_end=True) for prompt in prompts]
        assert [(each.tokens, each.cached) for each in again] == [(tokens, 64) for tokens in expected]
        os.kill(ranks_below(os.getpid(), "anyaccel.serve.engine.rank")[0], signal.SIGKILL)
        assert two.ready()
    finally:
        await two.close()
    assert not ranks_below(os.getpid(), "anyaccel.serve.engine.rank")


def test_what_is_not_native_is_not_divided(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UsageError, match="max_context=5000: the model's context has 1024 tokens"):
        open_engine(folder, ModelOptions("fp32", threads=1), Screen(), EngineSettings(max_context=5000))
    family_cases.build("diffllama").save_pretrained(tmp_path / "other")
    other, options = tmp_path / "other", ModelOptions("fp32", threads=1)
    with pytest.raises(UsageError, match=r"^--runtime plain: anyaccel serve divides and copies models of the native"):
        open_engine(other, replace(options, runtime="plain", tp=2), Screen())
    with pytest.raises(
        RankError, match=r"^anyaccel serve divides and copies models of .* \(these have no .*\)"
    ) as ranks:
        open_engine(other, replace(options, tp=2), Screen())
    assert ranks.value.exit_code == 2
