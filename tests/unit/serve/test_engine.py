# SPDX-License-Identifier: Apache-2.0
"""The engine on small random models: the same answers alone and in company, what ends requests, what a failure does."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import native_models
from anyaccel import _llm
from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.serve.engine.settings import EngineSettings
from anyaccel.serve.interface import (
    DeadlineError,
    EngineFullError,
    EngineStoppedError,
    GenerationRequest,
    SamplingParams,
    TooLongError,
)
from serving import GREEDY, VOCAB, answer, decoder_of, engine, native, prompt_of

pytest.importorskip("transformers")

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def llama() -> Any:
    return native()


def _alone(model: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    request = _llm.Request(model.model, prompt, {"max_new_tokens": count, "ignore_end": True} | options)
    while not request.finished:
        model.model.step([request], exact=True)
    tokens: list[int] = request.tokens
    request.finish()
    return tokens


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(("weight", "cache"), [("f32", "f32"), ("bf16", "bf16")])
async def test_greedy_answers_are_the_same_alone_and_while_others_come_and_go(
    prefix_cache: bool, weight: str, cache: str
) -> None:
    model = native(weight=weight, cache=cache)
    generator = random.Random(3)
    system = prompt_of(generator, 130)
    prompts = [
        (system if number % 2 else []) + prompt_of(generator, generator.randrange(1, 90)) for number in range(40)
    ]
    expected = [_alone(model, prompt, 12) for prompt in prompts]

    async with engine(model, prefix_cache=prefix_cache, max_batch=32) as made:

        async def one(number: int) -> None:
            for _ in range(number % 5):
                await asyncio.sleep(0)
            if number % 7 == 3:  # it breaks off
                asking = made.generate(GenerationRequest(prompts[number], 50, GREEDY, ignore_end=True))
                async for chunk in asking:
                    assert chunk.tokens[:12] == tuple(expected[number][: len(chunk.tokens)])
                    break
                await asking.aclose()  # type: ignore[attr-defined]
                return
            found = await answer(made, prompts[number], 12, ignore_end=True, key=str(number % 3))
            assert found.tokens == expected[number]
            assert found.finish == "length"

        await asyncio.gather(*map(one, range(len(prompts))))
        again = await answer(made, prompts[1], 12, ignore_end=True)
        assert again.tokens == expected[1]
        assert again.cached == (len(prompts[1]) - 1) // 64 * 64 * prefix_cache
        stats = made.stats()
        assert stats.running == stats.waiting == 0
        assert (stats.prefix_hits > 0) == prefix_cache
        assert stats.generation_tokens >= 12 * 35


async def test_a_cache_too_small_for_all_answers_all_with_the_bits_of_a_large_one() -> None:
    large = native("llama-64", weight="i8", cache="i8")
    small = native("llama-64", weight="i8", cache="i8", cache_limit=10 * 64 * large.model.cache_bytes_per_token())
    generator = random.Random(4)
    prompts = [prompt_of(generator, generator.randrange(20, 120)) for _ in range(7)]
    options = {"sampling": SamplingParams(temperature=0.0, logprobs=0), "ignore_end": True}

    async with engine(large) as made:
        expected = [await answer(made, prompt, 100, **options) for prompt in prompts]
    async with engine(small) as made:
        assert made.facts.context == 640
        found = await asyncio.gather(*(answer(made, prompt, 100, **options) for prompt in prompts))
        assert [each.tokens for each in found] == [each.tokens for each in expected]
        assert [each.logprobs for each in found] == [each.logprobs for each in expected]
        assert made.stats().preemptions > 0
        assert made.stats().cache_used <= made.stats().cache_total
        with pytest.raises(TooLongError):
            await answer(made, prompts[0], 640)


async def test_a_conversation_pays_for_its_new_tokens_only(llama: Any) -> None:
    async with engine(llama) as made:
        text = prompt_of(random.Random(5), 150)
        for _ in range(3):
            before = made.stats().prompt_tokens
            found = await answer(made, text, 40, ignore_end=True)
            assert made.stats().prompt_tokens - before == len(text) - found.cached
            if found.cached:
                assert len(text) - found.cached < 64 + 30
            text += found.tokens + prompt_of(random.Random(6), 20)


async def test_log_probabilities_and_hidden_states_are_those_of_transformers(llama: Any) -> None:
    reference, _, _ = native_models.whole("llama", 1024)
    prompt = prompt_of(random.Random(7), 200)

    def logprobs_of(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(reference(torch.tensor([tokens])).logits[0].double(), dim=-1)

    async with engine(llama) as made:
        result = await answer(
            made, prompt, 5, SamplingParams(temperature=0.0, logprobs=2), prompt_logprobs=1, ignore_end=True
        )
        only = await answer(made, prompt, 0, prompt_logprobs=0)
        vectors = [vector for pooling in ("mean", "last") for vector in await made.embed([prompt, prompt[:5]], pooling)]
    expected = logprobs_of(prompt + result.tokens)
    assert result.prompt_logprobs is not None and only.prompt_logprobs is not None
    assert [each.token for each in only.prompt_logprobs] == prompt[1:]
    assert only.tokens == [] and only.finish == "length"
    scores = [*result.prompt_logprobs, *result.logprobs]
    assert [each.token for each in scores] == (prompt + result.tokens)[1:]
    for place, each in enumerate(scores):
        assert each.logprob == pytest.approx(float(expected[place, each.token]), abs=1e-3)
        assert [value for _, value in each.top] == pytest.approx(
            expected[place].topk(len(each.top)).values.tolist(), abs=1e-3
        )
    with torch.no_grad():
        states = [reference.model(torch.tensor([tokens])).last_hidden_state[0] for tokens in (prompt, prompt[:5])]
    pooled = [each.mean(dim=0) for each in states] + [each[-1] for each in states]
    for vector, state in zip(vectors, pooled, strict=True):
        assert torch.allclose(torch.tensor(vector), torch.nn.functional.normalize(state, dim=0), atol=1e-4)


async def test_seeds_decide_what_is_drawn(llama: Any) -> None:
    async with engine(llama) as made:
        drawn = [
            (await answer(made, [5, 6, 7], 20, SamplingParams(seed=seed, top_p=0.9), ignore_end=True)).tokens
            for seed in (1, 1, 2, None, None)
        ]
    assert drawn[0] == drawn[1]
    assert len({tuple(each) for each in drawn}) == 4


async def test_an_answer_ends_with_one_of_its_ends_but_not_too_early(llama: Any) -> None:
    prompt = prompt_of(random.Random(8), 12)
    expected = _alone(llama, prompt, 30)
    end = frozenset({expected[4]})
    first = expected.index(expected[4])

    async with engine(llama) as made:
        found = await answer(made, prompt, 30, ends=end)
        assert (found.tokens, found.finish) == (expected[: first + 1], "stop")
        later = await answer(made, prompt, 30, ends=end, min_tokens=10)
        assert len(later.tokens) >= 10
        assert not end & set(later.tokens[:10])


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, "prompt: it must have at least one token"),
        ([3, VOCAB], {}, f"prompt: token {VOCAB} is outside"),
        ([-1], {}, "prompt: token -1 is outside"),
        ([3], {"max_tokens": -1}, "max_tokens=-1"),
        ([3], {"min_tokens": 9}, "min_tokens=9: must be at most max_tokens"),
        ([3], {"timeout_s": 0}, "timeout_s=0"),
        ([3], {"prompt_logprobs": 1000}, "prompt_logprobs=1000"),
        ([3], {"sampling": SamplingParams(temperature=-1)}, "temperature=-1"),
        ([3], {"sampling": SamplingParams(temperature=float("nan"))}, "temperature=nan"),
        ([3], {"sampling": SamplingParams(top_p=0)}, "top_p=0"),
        ([3], {"sampling": SamplingParams(top_k=-1)}, "top_k=-1"),
        ([3], {"sampling": SamplingParams(min_p=2)}, "min_p=2"),
        ([3], {"sampling": SamplingParams(repetition_penalty=0)}, "repetition_penalty=0"),
        ([3], {"sampling": SamplingParams(frequency_penalty=3)}, "frequency_penalty=3"),
        ([3], {"sampling": SamplingParams(presence_penalty=-3)}, "presence_penalty=-3"),
        ([3], {"sampling": SamplingParams(logit_bias={VOCAB: 1})}, f"logit_bias: token {VOCAB}"),
        ([3], {"sampling": SamplingParams(logit_bias={3: 101})}, "logit_bias: 101"),
        ([3], {"sampling": SamplingParams(logprobs=-1)}, "logprobs=-1"),
        ([3], {"sampling": SamplingParams(seed=2**64)}, "seed="),
    ],
)
async def test_wrong_values_are_refused_by_name(
    llama: Any, prompt: list[int], options: dict[str, Any], words: str
) -> None:
    async with engine(llama) as made:
        options = {"max_tokens": 4} | options
        with pytest.raises(UsageError, match=words):
            await answer(made, prompt, **options)


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-21, 1e-20])
async def test_the_smallest_temperatures_take_the_likeliest_token_and_harm_nobody(
    llama: Any, temperature: float
) -> None:
    async with engine(llama) as made:
        likeliest = await answer(made, [5, 6, 7], 5)
        smallest = SamplingParams(temperature=temperature, top_p=1e-6, min_p=5e-324, seed=1)
        assert (await answer(made, [5, 6, 7], 5, sampling=smallest)).tokens == likeliest.tokens


async def test_a_request_whose_time_is_over_ends(llama: Any) -> None:
    async with engine(llama, timeout_s=1e-9) as made:
        with pytest.raises(DeadlineError):
            await answer(made, [5, 6], 5)
        with pytest.raises(DeadlineError):
            await made.embed([[5, 6]], "last")
        assert (await answer(made, [5, 6], 5, timeout_s=1e6)).finish is not None


class Gate:
    """A decoder that takes the steps that it may, and fails when it is told to."""

    def __init__(
        self, inner: Any, steps: threading.Semaphore, failure: Callable[[], Exception | None] = lambda: None
    ) -> None:
        self._inner = inner
        self._steps = steps
        self._failure = failure
        for name in ("facts", "page_bytes", "cache_pages", "state_pages", "shares"):
            setattr(self, name, getattr(inner, name))

    multi_step = False
    is_late = False

    def apply(self, step: Any, multi_step: Any = None) -> Any:
        assert self._steps.acquire(timeout=60)
        if (error := self._failure()) is not None:
            raise error
        return self._inner.apply(step)

    def check(self) -> None:
        if (error := self._failure()) is not None:
            raise error

    def late(self) -> bool:
        return self.is_late

    def close(self) -> None:
        self._inner.close()


async def test_a_request_whose_time_is_over_while_a_step_hangs_ends_and_others_go_on(llama: Any) -> None:
    steps = threading.Semaphore(0)
    gates: list[Gate] = []

    def load(_check: object) -> Any:
        gates.append(Gate(decoder_of(llama, EngineSettings()), steps))
        return gates[0]

    async with engine(load) as made:
        other = asyncio.ensure_future(answer(made, [5, 6, 7], 3, ignore_end=True))
        while not made.stats().running:
            await asyncio.sleep(0.001)
        with pytest.raises(DeadlineError):
            await answer(made, [5, 6], 5, timeout_s=0.01)
        gates[0].is_late = True
        assert not made.ready() and made.alive()
        gates[0].is_late = False
        assert made.ready() and not other.done()
        steps.release(100)
        assert len((await other).tokens) == 3


async def test_a_full_queue_refuses_and_draining_aborts(llama: Any) -> None:
    steps = threading.Semaphore(0)

    def load(_check: object) -> Any:
        return Gate(decoder_of(llama, EngineSettings()), steps)

    async def goes_on(done: Callable[[], bool]) -> None:
        while not done():
            steps.release()
            await asyncio.sleep(0.001)

    async with engine(load, max_batch=1, max_waiting=1) as made:
        pending = [asyncio.ensure_future(answer(made, [5, 6], 1000, ignore_end=True))]
        await goes_on(lambda: made.stats().running == 1)
        pending.append(asyncio.ensure_future(answer(made, [5, 6], 1000, ignore_end=True)))
        await goes_on(lambda: made.stats().waiting == 1)
        refused = asyncio.ensure_future(answer(made, [5, 6], 4))
        await goes_on(refused.done)
        with pytest.raises(EngineFullError) as full:
            await refused
        assert full.value.retry_after_s >= 1
        assert made.ready()
        draining = asyncio.ensure_future(made.drain(0.0))
        await goes_on(draining.done)
        assert not made.ready()
        assert [(await each).finish for each in pending] == ["abort", "abort"]
        with pytest.raises(EngineStoppedError, match="no more requests"):
            await answer(made, [5, 6], 4)
        steps.release()
    with pytest.raises(EngineStoppedError):
        await answer(made, [5, 6], 4)


async def test_a_request_is_told_how_long_it_has_waited(llama: Any) -> None:
    steps = threading.Semaphore(0)

    def load(_check: object) -> Any:
        return Gate(decoder_of(llama, EngineSettings()), steps)

    async def queued(made: Any) -> set[float]:
        request = GenerationRequest([5, 6], 3, GREEDY, ignore_end=True)
        return {chunk.queued_s async for chunk in made.generate(request)}

    async with engine(load, max_batch=1) as made:
        first = asyncio.ensure_future(queued(made))
        while not made.stats().running:
            await asyncio.sleep(0.001)
        second = asyncio.ensure_future(queued(made))
        await asyncio.sleep(0)  # until it waits
        begun = time.monotonic()
        await asyncio.sleep(0.02)
        waited = time.monotonic() - begun
        steps.release(100)
        (one,), (other,) = await first, await second
        assert one > 0 and other >= waited


async def test_a_decoder_that_fails_is_loaded_again(llama: Any) -> None:
    steps = threading.Semaphore(1_000_000)
    failures: list[Exception] = []
    loads: list[int] = []
    engines: list[Any] = []
    counted: list[int] = []  # while it is loaded again

    def load(_check: object) -> Any:
        loads.append(1)
        if len(loads) > 1:
            counted.append(engines[0].stats().generation_tokens)
        if len(loads) == 2:
            raise AnyAccelError("not yet")
        return Gate(decoder_of(llama, EngineSettings()), steps, lambda: failures.pop() if failures else None)

    async with engine(load) as made:
        engines.append(made)
        first = await answer(made, [5, 6, 7], 5)
        failures.append(AnyAccelError("a rank is gone while nothing is computed"))
        while made.ready():
            await asyncio.sleep(0.01)
        while not made.ready():
            await asyncio.sleep(0.01)
        for error in (AnyAccelError("a rank is gone"), RuntimeError("a mistake")):
            failures.append(error)
            with pytest.raises(EngineStoppedError, match="started again"):
                await answer(made, [5, 6, 7], 5)
            while not made.ready():
                await asyncio.sleep(0.01)
            assert (await answer(made, [5, 6, 7], 5)).tokens == first.tokens
        assert len(loads) == 5
        assert made.stats().generation_tokens == 3 * len(first.tokens)
        assert counted == [len(first.tokens)] * 3 + [2 * len(first.tokens)]


async def test_closing_ends_open_requests(llama: Any) -> None:
    async with engine(llama) as made:
        pending = asyncio.ensure_future(answer(made, [5, 6], 1000, ignore_end=True))
        while not made.stats().running:
            await asyncio.sleep(0.001)
    with pytest.raises(EngineStoppedError):
        await pending


async def test_a_model_that_cannot_be_loaded_says_so() -> None:
    def load(_check: object) -> Any:
        raise UsageError("there is no such model")

    with pytest.raises(UsageError, match="no such model"):
        async with engine(load):
            pass
