# SPDX-License-Identifier: Apache-2.0
"""Drafts change how soon tokens come, and nothing else: neither tokens nor log-probabilities, alone or in company."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

import native_models
from anyaccel import _llm
from anyaccel.cli._model_options import check_numbers, sampling_of
from anyaccel.cli.generate import build_parser
from anyaccel.errors import UsageError
from anyaccel.inference.generate import Generation, request_steps

pytest.importorskip("transformers")

VOCAB = 131
MODES: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "temperature": 0.3, "seed": 3},
    {"do_sample": True, "temperature": 0.5, "top_k": 9, "top_p": 0.9, "seed": 4},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.02},
    {"min_new_tokens": 30, "end_tokens": list(range(0, VOCAB, 3)), "ignore_end": False},
    {"no_repeat_ngram": 12},
]


@pytest.fixture(scope="module")
def llama() -> Any:
    return native_models.native("llama", positions=1024)


def _prompt(seed: int, count: int) -> list[int]:
    """Text that repeats itself with gaps, as code and quotations do."""
    generator = random.Random(seed)
    phrases = [[generator.randrange(3, VOCAB) for _ in range(generator.randrange(2, 9))] for _ in range(4)]
    text: list[int] = []
    while len(text) < count:
        text += generator.choice(phrases)
    return text[:count]


def _request(model: Any, prompt: list[int], draft: int, **options: Any) -> Any:
    given = {"ignore_end": True, "max_new_tokens": 60, "logprobs": 2, "draft_tokens": draft, "draft_always": True}
    return _llm.Request(model, prompt, given | options)


def _answer(model: Any, prompt: list[int], draft: int, **options: Any) -> tuple[Any, Any, Any, tuple[int, int]]:
    request = _request(model, prompt, draft, **options)
    steps = 0
    while not request.finished:
        assert model.step([request])[0] >= 0
        steps += 1
    assert steps == len(request.tokens)
    return request.tokens, request.take_scores(), request.finished, request.drafts


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(mode) or "greedy")
def test_an_answer_is_the_same_with_and_without_drafts(llama: Any, mode: dict[str, Any]) -> None:
    accepted = 0
    for seed in range(6):
        prompt = _prompt(seed, 20 + 13 * seed)
        *wanted, none = _answer(llama, prompt, 0, **mode)
        assert none == (0, 0)
        for draft in (1, 5, 100):
            *found, drafts = _answer(llama, prompt, draft, **mode)
            assert found == wanted
            accepted += drafts[1]
            assert drafts[1] <= drafts[0]
    assert accepted > 0


@pytest.mark.parametrize(
    ("case", "weight", "group", "cache"),
    [
        ("llama", "bf16", 0, "bf16"),
        ("llama-64", "i8", 0, "i8"),
        ("llama-64", "i4", 32, "bf16"),
        ("gemma3", "f32", 0, "f32"),
    ],
)
def test_formats_and_windows(case: str, weight: str, group: int, cache: str) -> None:
    model = native_models.native(case, positions=1024, weight=weight, group=group, cache=cache)
    accepted = 0
    for seed in range(3):
        prompt = _prompt(seed, 40)
        *wanted, _ = _answer(model, prompt, 0)
        *found, drafts = _answer(model, prompt, 15)
        assert found == wanted
        accepted += drafts[1]
    assert accepted > 0


@pytest.mark.parametrize("case", ["llama-longrope", "phi3-longrope", "llama-dynamic"])
def test_angles_that_change_with_the_length(case: str) -> None:
    """Where the cache is made anew for them, and where each token has its own."""
    model = native_models.native(case, positions=256)
    accepted = 0
    for seed in range(4):
        for count in range(3, 15):
            prompt = _prompt(seed, count)
            *wanted, _ = _answer(model, prompt, 0, max_new_tokens=24)
            *found, drafts = _answer(model, prompt, 15, max_new_tokens=24)
            assert found == wanted, (seed, count)
            accepted += drafts[1]
    assert accepted > 0


def test_batched_requests_with_events_answer_as_without_drafts(llama: Any) -> None:
    """Batches change at random; requests go on with more prompt, forget a part, get masks, and are shared."""

    def run(draft: int) -> tuple[list[Any], int]:
        generator = random.Random(11)
        requests = [_request(llama, _prompt(seed, 30 + seed), draft, max_new_tokens=40) for seed in range(7)]
        log: list[Any] = []
        for _ in range(160):
            request = generator.choice(requests)
            event = generator.random()
            if event < 0.04:
                request.extend(_prompt(generator.randrange(99), 5), 30)
            elif event < 0.08 and request.cached > 5:
                request.shrink(request.cached - 3)
            elif event < 0.12:
                request.set_mask(bytes([0x55] * 4 * ((VOCAB + 31) // 32)))
            elif event < 0.16:
                other = _llm.Request(
                    llama,
                    [*_prompt(3, 33), 7],
                    {"max_new_tokens": 9, "draft_tokens": draft, "draft_always": True},
                    request,
                )
                requests[generator.randrange(len(requests))] = other
            batch = generator.sample(requests, generator.randrange(1, 6))
            log.append(llama.step(batch, [generator.choice((0, 1, 7)) for _ in batch], True))
        log += [request.tokens for request in requests]
        return log, sum(request.drafts[1] for request in requests)

    wanted, none = run(0)
    found, accepted = run(15)
    assert none == 0 < accepted
    assert found == wanted


def test_drafts_end_with_the_context_the_answer_and_the_cache() -> None:
    model = native_models.native("llama", positions=64)
    prompt = [5, 6, 7, 8] * 12
    *wanted, _ = _answer(model, prompt, 0, max_new_tokens=0)
    *found, drafts = _answer(model, prompt, 15, max_new_tokens=0)
    assert found == wanted
    assert len(found[0]) == 16
    assert drafts[0] > 0
    small = native_models.native("llama", positions=1024, cache_limit=model.cache_bytes_per_token() * 64)
    *within, _ = _answer(small, prompt, 15, max_new_tokens=17)
    assert within[0] == _answer(small, prompt, 0, max_new_tokens=17)[0]


def test_a_request_that_is_dropped_leaves_nothing_in_the_cache(llama: Any) -> None:
    before = llama.cache_used_bytes
    for steps in range(1, 12):
        request = _request(llama, [5, 6, 7, 8] * 12, 15)
        for _ in range(steps):
            llama.step([request])
        request.finish()
        assert llama.cache_used_bytes == before


@pytest.mark.parametrize(("text", "tokens"), [("ngram", 15), ("ngram:3", 3)])
def test_the_option_of_the_commands(text: str, tokens: int) -> None:
    options = build_parser().parse_args(["--draft", text, "a prompt"])
    assert sampling_of(options).draft_tokens == tokens


def test_the_device_runtime_refuses_drafts_before_anything_is_loaded() -> None:
    options = build_parser().parse_args(["--draft", "ngram:3", "--runtime", "device", "a prompt"])
    with pytest.raises(UsageError, match="--draft ngram: only the native runtime has drafts, not --runtime device"):
        check_numbers(options)


@pytest.mark.parametrize("text", ["", "ngram:", "ngram:0", "ngram:-1", "ngram:x", "lookup", "ngram:99999999999"])
def test_an_option_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError, match=r"--draft: .*: must be ngram, ngram:N"):
        build_parser().parse_args(["--draft", text, "a prompt"])


def test_a_number_of_drafts_that_cannot_be(llama: Any) -> None:
    with pytest.raises(UsageError, match="draft_tokens is -1"):
        _request(llama, [5], -1)


def test_a_generation_tells_how_many_were_right(llama: Any) -> None:
    native: Any = SimpleNamespace(model=llama, saving=None, dtype="fp32")
    result = Generation()
    request = _request(llama, [5, 6, 7, 8] * 12, 15)
    assert list(request_steps(native, request, result)) == request.tokens
    assert (result.drafted, result.accepted) == request.drafts and 0 < result.accepted <= result.drafted
