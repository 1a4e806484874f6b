# SPDX-License-Identifier: Apache-2.0
"""Steps of the native decoder as a server takes them: prompts in parts, shared caches, scores, masks, hidden states."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import native_models
from anyaccel import _llm
from anyaccel.errors import UsageError

pytest.importorskip("transformers")

VOCAB = 131
PAGE = 64


@pytest.fixture(scope="module")
def llama() -> Any:
    return native_models.native("llama", positions=1024)


def _prompt(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(3, VOCAB) for _ in range(count)]


def _request(model: Any, prompt: list[int], keep: bool = False, **options: Any) -> Any:
    return _llm.Request(model, prompt, {"ignore_end": True} | options, None, keep)


def _logits(request: Any) -> bytes:
    kept = torch.empty(VOCAB)
    request.copy_logits(kept.data_ptr())
    return kept.numpy().tobytes()


def _alone(model: Any, prompt: list[int], **options: Any) -> tuple[list[int], list[bytes]]:
    request = _request(model, prompt, keep=True, **options)
    seen = []
    while not request.finished:
        if model.step([request], exact=True)[0] >= 0:  # else the next step goes on with what is computed anew
            seen.append(_logits(request))
    return request.tokens, seen


@pytest.mark.parametrize(
    ("case", "weight", "group", "cache"),
    [
        ("llama", "f32", 0, "f32"),
        ("llama", "bf16", 0, "bf16"),
        ("llama-64", "i8", 0, "i8"),
        ("llama-64", "i4", 32, "bf16"),
    ],
)
def test_exact_steps_have_the_same_bits_alone_and_in_any_company(
    case: str, weight: str, group: int, cache: str
) -> None:
    model = native_models.native(case, positions=1024, weight=weight, group=group, cache=cache)
    generator = random.Random(5)
    system = _prompt(generator, 3 * PAGE)
    prompts = [
        (system if number % 3 == 0 else []) + _prompt(generator, number if number < 9 else generator.randrange(1, 150))
        for number in range(1, 22)
    ]
    expected = [_alone(model, prompt, max_new_tokens=6) for prompt in prompts]
    holder = _request(model, [*system, 5], max_new_tokens=1)
    model.step([holder], exact=True)
    waiting = [_request(model, prompt, keep=True, max_new_tokens=6) for prompt in prompts]
    for number in range(2, 21, 6):
        waiting[number].share(holder, 3 * PAGE)
    order, running = dict(enumerate(waiting)), dict[int, Any]()
    seen: dict[int, list[bytes]] = {number: [] for number in order}
    while order or running:
        for number in list(order)[: generator.randrange(4)]:
            running[number] = order.pop(number)
        if not running:
            continue
        limits = [generator.choice([1, 2, 7, 16, 50, PAGE, 2 * PAGE]) for _ in running]
        chosen = model.step(list(running.values()), limits, exact=True)
        for (number, request), token in zip(list(running.items()), chosen, strict=True):
            if token >= 0:
                seen[number].append(_logits(request))
            if request.finished:
                del running[number]
    assert [request.tokens for request in waiting] == [tokens for tokens, _ in expected]
    # And they are right, also for prompts of fewer tokens than a panel of the kernels for many.
    for prompt, (tokens, _) in zip(prompts, expected, strict=True):
        if weight == "f32":
            free = _request(model, prompt, max_new_tokens=6)
            while not free.finished:
                model.step([free])
            assert free.tokens == tokens
    differing = [number for number, (_, logits) in enumerate(expected) if seen[number] != logits]
    assert not differing


def test_a_prompt_in_parts_gives_no_token_before_its_end(llama: Any) -> None:
    prompt = _prompt(random.Random(1), 200)
    whole, parts = (_request(llama, prompt, max_new_tokens=3) for _ in range(2))
    llama.step([whole])
    found = []
    for expected in (64, 128, 192, 200):
        found += llama.step([parts], [64])
        assert parts.cached == expected
    assert found == [-2, -2, -2, whole.tokens[0]]
    with pytest.raises(UsageError, match="2 limits for 1 requests"):
        llama.step([parts], [1, 2])


def test_what_a_request_forgets_is_computed_again(llama: Any) -> None:
    prompt = _prompt(random.Random(2), 150)
    expected = _alone(llama, prompt, max_new_tokens=8)[0]
    request = _request(llama, prompt, max_new_tokens=8)
    for forget in (0, 64, 128, 0):
        llama.step([request])
        request.shrink(forget)
        assert request.cached == forget
    while not request.finished:
        llama.step([request])
    assert request.tokens == expected
    request.shrink(64)  # as a holder of what others share
    other = _request(llama, prompt[:100], max_new_tokens=1)
    with pytest.raises(UsageError, match="first 65 tokens"):
        other.share(request, 65)
    with pytest.raises(UsageError, match="first 64 tokens"):
        _request(llama, [3, *prompt], max_new_tokens=1).share(request, 64)
    other.share(request, 64)
    request.finish()
    assert llama.step([other]) == [_alone(llama, prompt[:100], max_new_tokens=1)[0][0]]


@pytest.mark.parametrize(
    ("case", "weight", "group", "cache", "length"),
    [
        ("llama", "f32", 0, "f32", 150),
        ("llama", "bf16", 0, "bf16", 150),
        ("llama-64", "i8", 0, "i8", 150),
        ("llama-64", "i4", 32, "bf16", 150),
        ("gemma3", "bf16", 0, "bf16", 70),
        # Their angles change with the length: those of the first time are meant.
        ("llama-dynamic", "bf16", 0, "bf16", 9),
        ("llama-longrope", "bf16", 0, "bf16", 9),
        ("phi3-longrope", "bf16", 0, "bf16", 9),
    ],
)
def test_exact_steps_compute_what_was_forgotten_with_the_same_bits(
    case: str, weight: str, group: int, cache: str, length: int
) -> None:
    model = native_models.native(case, positions=1024, weight=weight, group=group, cache=cache)
    generator = random.Random(6)
    prompt, answer = _prompt(generator, length), 45
    tokens, expected = _alone(model, prompt, max_new_tokens=answer)
    beside = [_request(model, _prompt(generator, count)) for count in (5, 20)]
    differing = []
    for _ in range(4):
        forgotten, turn = _request(model, prompt, keep=True, max_new_tokens=answer), 0
        while not forgotten.finished:
            if turn > 1 and generator.random() < 0.2:
                left = generator.choice([0, length // 2, length, generator.randrange(forgotten.cached + 1)])
                forgotten.shrink(min(left, forgotten.cached))
            company = generator.sample(beside, generator.randrange(3))
            limits = [generator.choice([0, 3, 16, 100]) for _ in range(1 + len(company))]
            if model.step([forgotten, *company], limits, exact=True)[0] >= 0:
                if _logits(forgotten) != expected[turn]:
                    differing.append(turn)
                turn += 1
        assert forgotten.tokens == tokens
    assert not differing


def test_scores_are_those_of_transformers(llama: Any) -> None:
    reference, _, _ = native_models.whole("llama", 1024)
    prompt = _prompt(random.Random(3), 300)
    answer = _alone(llama, prompt, max_new_tokens=5)[0]
    with torch.no_grad():
        expected = torch.log_softmax(reference(torch.tensor([prompt + answer])).logits[0].double(), dim=-1)
    request = _request(llama, prompt, max_new_tokens=5, logprobs=3, prompt_logprobs=2)
    told = []
    while not request.finished:
        llama.step([request], [128], exact=True)
        told += request.take_scores()
    assert [token for token, _, _ in told] == answer
    scores = request.prompt_scores() + told
    assert [token for token, _, _ in scores] == (prompt + answer)[1:]
    for place, (token, logprob, top) in enumerate(scores):
        assert logprob == pytest.approx(float(expected[place, token]), abs=1e-3)
        best = expected[place].topk(len(top))
        assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=1e-3)
    assert {len(top) for _, _, top in scores} == {2, 3}
    only = _request(llama, prompt, goal="scores", prompt_logprobs=0)
    assert llama.step([only]) == [-2]
    assert only.finished == "length"
    assert [score[0] for score in only.prompt_scores()] == prompt[1:]
    assert only.tokens == []


@pytest.mark.parametrize("goal", ["mean", "last"])
def test_hidden_states_are_those_of_transformers(llama: Any, goal: str) -> None:
    reference, _, _ = native_models.whole("llama", 1024)
    for count in (1, 7, 150):
        prompt = _prompt(random.Random(count), count)
        with torch.no_grad():
            states = reference.model(torch.tensor([prompt])).last_hidden_state[0]
        pooled = states.mean(dim=0) if goal == "mean" else states[-1]
        expected = torch.nn.functional.normalize(pooled, dim=0)
        request = _request(llama, prompt, goal=goal)
        with pytest.raises(UsageError, match="no hidden states"):
            request.embedding()
        beside = _request(llama, prompt[:3], max_new_tokens=40)
        while not request.finished:
            llama.step([request, beside], [64, 0])
        assert torch.allclose(torch.tensor(request.embedding()), expected, atol=1e-4)
        assert torch.allclose(torch.tensor(request.embedding(normalize=False)), pooled, atol=1e-4)


def test_masks_and_biases_decide_what_may_come(llama: Any) -> None:
    prompt = [5, 17, 99]
    free = _alone(llama, prompt, max_new_tokens=1)[0][0]
    request = _request(llama, prompt, max_new_tokens=3)
    mask = bytearray(b"\xff" * (4 * ((VOCAB + 31) // 32)))
    mask[free // 8] &= ~(1 << free % 8)
    request.set_mask(bytes(mask))
    assert llama.step([request]) != [free]
    only = bytearray(len(mask))
    only[77 // 8] = 1 << 77 % 8
    request.set_mask(bytes(only))
    assert llama.step([request]) == [77]
    with pytest.raises(UsageError, match="the vocabulary has 5"):
        request.set_mask(b"\0" * 8)
    biased = _request(llama, prompt, max_new_tokens=1, bias={free: -100.0, 78: 100})
    assert llama.step([biased]) == [78]
