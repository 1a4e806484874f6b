# SPDX-License-Identifier: Apache-2.0
"""Drafts in the server: the same tokens with and without, in company of all kinds, and how many are counted."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

pytest.importorskip("transformers")

import native_models
from anyaccel.cli._model_options import Drafts
from anyaccel.cli.serve import build_parser
from anyaccel.inference.native.draft import attach
from anyaccel.serve.api.generation import TokenUsage
from anyaccel.serve.engine.delivery import ResultStream
from anyaccel.serve.interface import Chunk, GenerationRequest, SamplingParams, Stats
from anyaccel.serve.requests.answers import TextDelta
from anyaccel.serve.requests.metrics import HttpMetrics, Metrics
from serving import VOCAB, Answer, answer, engine, native, prompt_of

pytestmark = pytest.mark.anyio

KINDS = {"text": {"draft_tokens": 15}, "model": {"draft_tokens": 15, "draft_model": True}}


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    native_models.always_drafting(monkeypatch)


def with_draft(**options: Any) -> Any:
    made = native(**options)
    attach(made, native(**options))
    return made


def asked() -> list[tuple[list[int], int, dict[str, Any]]]:
    """Answers that repeat themselves and those that do not, sampled, scored, that end early, and of prompts alone."""
    generator = random.Random(3)
    requests: list[tuple[list[int], int, dict[str, Any]]] = []
    for number in range(14):
        prompt = [5, 6, 7, 8] * 20 if number % 3 == 0 else prompt_of(generator, 20 + 9 * number)
        options: dict[str, Any] = {"ignore_end": True}
        if number % 4 == 1:
            options["sampling"] = SamplingParams(temperature=0.7, seed=number, top_k=20)
        if number % 5 == 2:
            options["sampling"] = SamplingParams(temperature=0.0, logprobs=2)
        if number % 7 == 4:
            options = {"ends": frozenset(range(0, VOCAB, 9))}
        requests.append((prompt, 60, options))
    return requests


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("together", [1, 4, 14])
async def test_answers_are_the_same_with_and_without_drafts(kind: str, together: int) -> None:
    model = with_draft()
    requests = asked()

    async def all_of(made: Any) -> list[Answer]:
        gate = asyncio.Semaphore(together)

        async def one(prompt: list[int], most: int, options: dict[str, Any]) -> Answer:
            async with gate:
                return await answer(made, prompt, most, **options)

        return list(await asyncio.gather(*(one(*each) for each in requests)))

    async with engine(model) as made:
        expected = await all_of(made)
        assert made.stats().drafted == made.stats().accepted == 0
    async with engine(model, **KINDS[kind]) as made:
        found = await all_of(made)
        stats = made.stats()
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens, one.logprobs, one.finish) == (other.tokens, other.logprobs, other.finish)
    assert stats.accepted <= stats.drafted
    if together == 1:
        assert stats.drafted > 0


async def freed(model: Any) -> None:
    """Wait for the engine to let the draft model's cache go, which it does by itself after the last answer."""
    deadline = time.monotonic() + 20
    while model.draft.model.cache_used_bytes:
        assert time.monotonic() < deadline, f"{model.draft.model.cache_used_bytes} bytes are still used"
        await asyncio.sleep(0.01)


async def test_the_last_answer_leaves_nothing_in_the_draft_models_cache() -> None:
    """The engine tells the decoder of its end though no other request comes that would bring another step."""
    model = with_draft()

    async with engine(model, **KINDS["model"]) as made:
        await answer(made, [5, 6, 7, 8] * 20, 40, ignore_end=True)
        assert made.stats().drafted > 0
        await freed(model)


async def test_a_small_cache_and_requests_that_break_off() -> None:
    """Requests are put back and forgotten while they have drafts; nothing of the draft model's cache stays."""
    size = 12 * 64 * native_models.native("llama", positions=1024).cache_bytes_per_token()
    model = with_draft(cache_limit=size)
    generator = random.Random(4)
    prompts = [prompt_of(generator, generator.randrange(20, 150)) for _ in range(6)]

    async with engine(native()) as made:
        expected = [(await answer(made, prompt, 90, ignore_end=True)).tokens for prompt in prompts]
    async with engine(model, **KINDS["model"]) as made:

        async def leaves() -> None:
            asking = made.generate(GenerationRequest(prompts[0], 90, SamplingParams(temperature=0.0), ignore_end=True))
            async for _ in asking:
                break
            await asking.aclose()  # type: ignore[attr-defined]

        found, *_ = await asyncio.gather(
            asyncio.gather(*(answer(made, prompt, 90, ignore_end=True) for prompt in prompts)), leaves(), leaves()
        )
        assert [each.tokens for each in found] == expected
        await freed(model)


async def test_an_answer_tells_how_many_were_right() -> None:
    async with engine(with_draft(), **KINDS["model"]) as made:
        chunks: list[Chunk] = []
        request = GenerationRequest([5, 9, 30], 50, SamplingParams(temperature=0.0), ignore_end=True)
        async for chunk in made.generate(request):
            chunks.append(chunk)
        stats = made.stats()
        drafted, accepted = chunks[-1].drafts
        assert (drafted, accepted) == (stats.drafted, stats.accepted)
        assert 0 < accepted <= drafted

    stream = ResultStream()
    stream.put(Chunk((1,), drafts=(7, 5)))
    stream.put(Chunk((2,)))  # of the feed, which knows of none
    assert (await stream.next()).drafts == (7, 5)
    usage = TokenUsage([3], 2)
    usage.add(TextDelta(0, "", (), 50, 0))
    assert "completion_tokens_details" not in usage.as_json()
    usage.add(TextDelta(0, "", (), 50, 0, drafts=(9, 8)))
    usage.add(TextDelta(1, "", (), 20, 0, drafts=(4, 1)))
    details = usage.as_json()["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 9, "rejected_prediction_tokens": 4}
    text = Metrics.text([("m", Metrics(), Stats(drafted=13, accepted=9))], HttpMetrics())
    assert 'anyaccel_spec_decode_num_draft_tokens_total{model_name="m"} 13' in text
    assert 'anyaccel_spec_decode_num_accepted_tokens_total{model_name="m"} 9' in text


def test_the_option_of_the_command() -> None:
    assert build_parser().parse_args(["--draft", "ngram:4"]).draft == Drafts(4)
    assert build_parser().parse_args([]).draft == Drafts()
