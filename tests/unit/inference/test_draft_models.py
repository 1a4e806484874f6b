# SPDX-License-Identifier: Apache-2.0
"""A draft model changes how soon tokens come, and nothing else; it is left aside where it cannot help."""

from __future__ import annotations

import gc
import math
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import native_models
from anyaccel import _llm
from anyaccel.errors import UsageError
from anyaccel.inference.spec.decoder import Moe, weights

pytest.importorskip("transformers")

VOCAB = 131
MODES: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "temperature": 0.8, "seed": 3},
    {"do_sample": True, "temperature": 0.6, "top_k": 9, "top_p": 0.9, "seed": 4},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "bias": {7: 1.5}},
    {"min_new_tokens": 12, "end_tokens": list(range(0, VOCAB, 3)), "ignore_end": False},
]


def like(name: str, noise: float = 0.1, positions: int = 0, seed: int = 1, **options: Any) -> Any:
    """A model that says about the same as that of a case; with much noise, something else."""
    _, spec, values = native_models.whole(name, positions)
    generator = torch.Generator().manual_seed(seed)
    changed = {
        key: value + noise * value.std().nan_to_num() * torch.randn(value.shape, generator=generator)
        for key, value in values.items()
    }
    return native_models.fill(native_models.empty(spec, **options), spec, changed)


def pair(name: str, noise: float = 0.1, positions: int = 256, **options: Any) -> Any:
    model = native_models.native(name, positions=positions, **options)
    model.set_draft(like(name, noise, positions))
    return model


@pytest.fixture(scope="module")
def llama() -> Any:
    return pair("llama")


def request(model: Any, prompt: list[int], draft: int, **options: Any) -> Any:
    given = {"ignore_end": True, "max_new_tokens": 40, "logprobs": 2}
    drafts = {"draft_tokens": draft, "draft_model": True, "draft_always": True} if draft else {}
    return _llm.Request(model, prompt, given | drafts | options)


def answer(model: Any, prompt: list[int], draft: int, **options: Any) -> tuple[Any, tuple[int, int]]:
    one = request(model, prompt, draft, **options)
    while not one.finished:
        assert model.step([one])[0] >= 0
    return (one.tokens, one.take_scores(), one.finished), one.drafts


def prompt_of(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, VOCAB) for _ in range(count)]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(mode) or "greedy")
def test_an_answer_is_the_same_with_and_without_drafts(llama: Any, mode: dict[str, Any]) -> None:
    drafted = accepted = 0
    for seed in range(4):
        prompt = prompt_of(seed, 5 + 9 * seed)
        wanted, none = answer(llama, prompt, 0, **mode)
        assert none == (0, 0)
        for draft in (1, 4, 100):
            found, drafts = answer(llama, prompt, draft, **mode)
            assert found == wanted
            drafted += drafts[0]
            accepted += drafts[1]
    assert 0 < accepted < drafted


def test_a_draft_model_that_knows_only_the_end_of_the_text(llama: Any) -> None:
    drafted = accepted = 0
    for seed, mode in enumerate(MODES):
        prompt = prompt_of(seed, 60)
        wanted, _ = answer(llama, prompt, 0, **mode)
        read = llama.draft_work[0]
        found, drafts = answer(llama, prompt, 4, draft_end=True, **mode)
        assert found == wanted
        assert llama.draft_work[0] - read < 40 * (16 + 4)
        drafted += drafts[0]
        accepted += drafts[1]
    assert 0 < accepted < drafted


@pytest.mark.parametrize(
    "name",
    ["qwen3", "gemma2", "gemma3", "mistral", "gpt2", "deepseek_v3", "mixtral", "bloom", "cohere", "llama-dynamic"],
)
def test_families(name: str) -> None:
    model = pair(name, 0.05)
    accepted = 0
    for seed in range(3):
        prompt = prompt_of(seed, 4 + 5 * seed)
        wanted, _ = answer(model, prompt, 0)
        found, drafts = answer(model, prompt, 5)
        assert found == wanted
        accepted += drafts[1]
    assert accepted > 0


@pytest.mark.parametrize(
    ("weight", "group", "cache"),
    [("bf16", 0, "bf16"), ("i8", 0, "i8"), ("i4", 32, "bf16"), ("i4", 32, "i4")],
)
def test_formats(weight: str, group: int, cache: str) -> None:
    model = pair("llama-64", 0.02, weight=weight, group=group, cache=cache)
    accepted = 0
    for seed in range(3):
        wanted, _ = answer(model, prompt_of(seed, 30), 0)
        found, drafts = answer(model, prompt_of(seed, 30), 15)
        assert found == wanted
        accepted += drafts[1]
    assert accepted > 0


def test_batched_requests_with_events_answer_as_without_drafts(llama: Any) -> None:
    """Batches change at random; requests go on with more prompt, forget a part, get masks, and are shared."""

    def run(draft: int) -> tuple[list[Any], int]:
        generator = random.Random(5)
        requests = [request(llama, prompt_of(seed, 20 + seed), draft) for seed in range(6)]
        log: list[Any] = []
        for _ in range(140):
            one = generator.choice(requests)
            event = generator.random()
            if event < 0.05:
                one.extend(prompt_of(generator.randrange(99), 5), 30)
            elif event < 0.1 and one.cached > 5:
                one.shrink(one.cached - 3)
            elif event < 0.13:
                one.set_mask(bytes([0x55] * 4 * ((VOCAB + 31) // 32)))
            elif event < 0.17:
                options = {"max_new_tokens": 9}
                if draft:
                    options |= {"draft_tokens": draft, "draft_model": True, "draft_always": True}
                other = _llm.Request(llama, [*prompt_of(3, 23), 7], options, one)
                requests[generator.randrange(len(requests))] = other
            batch = generator.sample(requests, generator.randrange(1, 6))
            log.append(llama.step(batch, [generator.choice((0, 1, 7)) for _ in batch], True))
        log += [one.tokens for one in requests]
        return log, sum(one.drafts[1] for one in requests)

    wanted, none = run(0)
    found, accepted = run(15)
    assert none == 0 < accepted
    assert found == wanted


def test_sampling_keeps_the_distribution() -> None:
    """20,000 draws of two tokens each, by chi-square against the softmax of the logits."""
    model = pair("llama", 0.05, positions=64)
    prompt, draws, degrees = prompt_of(7, 6), 20_000, 0
    options = {"max_new_tokens": 2, "do_sample": True, "top_k": 12, "temperature": 1.3}
    first: Counter[int] = Counter()
    second: dict[int, Counter[int]] = {}
    accepted = 0
    whole = _llm.Request(model, prompt, {"max_new_tokens": 1})
    model.step([whole])
    # The first token comes of the prompt; the second one behind a draft, as a third one would go on.
    drafts = {"draft_tokens": 3, "draft_model": True, "draft_always": True}
    for seed in range(draws):
        one = _llm.Request(model, prompt, options | drafts | {"seed": seed, "max_new_tokens": 3}, whole)
        while not one.finished:
            model.step([one])
        first[one.tokens[0]] += 1
        second.setdefault(one.tokens[0], Counter())[one.tokens[1]] += 1
        accepted += one.drafts[1]
        one.finish()
    assert accepted > draws // 10
    statistic = 0.0
    (top, found) = max(second.items(), key=lambda item: item[1].total())
    for told, text in ((first, prompt), (found, [*prompt, top])):
        one = _llm.Request(model, text, {"max_new_tokens": 1}, None, True)
        model.step([one])
        logits_V = torch.empty(VOCAB)
        one.copy_logits(logits_V.data_ptr())
        best = logits_V.topk(12)
        shares = torch.softmax(best.values.double() / 1.3, 0).tolist()
        assert set(told) <= set(best.indices.tolist())
        for token, share in zip(best.indices.tolist(), shares, strict=True):
            expected = told.total() * share
            statistic += (told[token] - expected) ** 2 / expected
        degrees += 11
    # Wilson and Hilferty's approximation of the chi-square distribution: one run in 10,000 is above it.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit


def test_drafts_end_with_the_context_and_the_caches() -> None:
    prompt = prompt_of(2, 50)
    model = pair("llama", 0.05, positions=64)
    wanted, _ = answer(model, prompt, 0, max_new_tokens=0)
    found, drafts = answer(model, prompt, 15, max_new_tokens=0)
    assert found == wanted and len(found[0]) == 14 and drafts[0] > 0
    for most in (1, 2, 3):  # there is one draft less than there are tokens to come
        found, drafts = answer(model, prompt, 15, max_new_tokens=most)
        assert len(found[0]) == most and (drafts[0] > 0) == (most > 2)
    small = native_models.native("llama", positions=256, cache_limit=model.cache_bytes_per_token() * 64)
    small.set_draft(like("llama", 0.05, 256))
    assert answer(small, prompt, 15, max_new_tokens=14)[0] == answer(small, prompt, 0, max_new_tokens=14)[0]
    full = native_models.native("llama", positions=256)  # the draft model's own cache has no room for the answer
    full.set_draft(like("llama", 0.05, 256, cache_limit=model.cache_bytes_per_token() * 64))
    found, drafts = answer(full, prompt, 15)
    assert found == answer(full, prompt, 0)[0] and drafts[0] > 0
    assert len(found[0]) == 40


def test_a_draft_model_with_a_shorter_context_drafts_as_far_as_it_reaches() -> None:
    model = native_models.native("llama", positions=256)
    model.set_draft(like("llama", 0.05, 64))
    found, drafts = answer(model, prompt_of(2, 40), 4)
    assert found == answer(model, prompt_of(2, 40), 0)[0] and 0 < drafts[0] < 40
    assert answer(model, prompt_of(2, 100), 4)[1] == (0, 0)


def test_an_end_among_the_drafts_ends_the_answer(llama: Any) -> None:
    prompt = prompt_of(1, 12)
    (tokens, *_), _ = answer(llama, prompt, 0)
    for place in range(2, 12):
        ends = {"end_tokens": [tokens[place]], "ignore_end": False}
        wanted, _ = answer(llama, prompt, 0, **ends)
        found, _ = answer(llama, prompt, 15, **ends)
        assert found == wanted and found[2] == "end"


def test_a_draft_model_whose_logits_are_no_numbers_is_left_aside() -> None:
    model = native_models.native("llama", positions=256)
    model.set_draft(like("llama", float("nan"), 256))
    found, drafts = answer(model, prompt_of(1, 9), 4)
    assert drafts == (0, 0)
    assert found == answer(model, prompt_of(1, 9), 0)[0]


def test_a_draft_model_that_cannot_pay_reads_nothing() -> None:
    """One as large as the model takes as long for a token as it saves, however right it is."""
    model = pair("llama", 0.0, positions=1024)
    assert model.draft_cost == pytest.approx(1) and not model.draft_can_pay
    for seed in range(2):
        _, drafts = answer(model, prompt_of(seed, 9), 15, draft_always=False, max_new_tokens=300)
        assert drafts == (0, 0)
    assert model.draft_work == (0, 0)
    answer(model, prompt_of(0, 9), 15, max_new_tokens=5)  # where it is asked for all the same
    assert model.draft_work[0] >= 9 and model.draft_work[1] > 0
    model.set_draft(None)
    assert model.draft_cost is None and not model.draft_can_pay


def test_what_a_draft_model_costs_is_told_from_the_bytes_of_its_passes() -> None:
    """Of an embedding that is no head a token has one row, and of experts only those that are chosen for it."""

    def passes(name: str, share: bool = True) -> float:
        _, spec, _ = native_models.whole(name, 64)
        moe = spec.layers[0].mlp
        part = moe.top_k / moe.experts if isinstance(moe, Moe) and share else 1
        return sum(
            (part if ".experts." in each.name else 1) * ((each.rows + 15) // 16 * 16) * each.cols
            for each in weights(spec)[0]
            if each.name != "embed" or spec.tied
        )

    model = native_models.native("llama-64", positions=64, weight="bf16")
    model.set_draft(native_models.native("llama-64", positions=64, weight="i4", group=32))
    assert 0.25 < model.draft_cost < 0.4 and model.draft_can_pay
    model = native_models.native("llama", positions=64)
    model.set_draft(native_models.native("mixtral", positions=64))
    wanted = passes("mixtral") / passes("llama")
    assert model.draft_cost == pytest.approx(wanted, rel=0.05)
    assert passes("mixtral", share=False) / passes("llama") > 1.2 * wanted


def test_drafts_that_are_wrong_are_soon_given_up() -> None:
    """A draft model of a quarter of the bytes, which says something else, costs more than it saves."""
    model = native_models.native("llama-64", positions=1024, weight="f32")
    model.set_draft(like("llama-64", 5.0, 1024, weight="i4", group=32))
    assert model.draft_can_pay
    drafted = tokens = 0
    for seed in range(4):
        (said, *_), drafts = answer(model, prompt_of(seed, 9), 15, draft_always=False, max_new_tokens=400)
        tokens += len(said)
        drafted += drafts[0]
    assert drafted < tokens // 8


def test_nothing_is_left_in_the_caches() -> None:
    model = native_models.native("llama", positions=256)
    draft = like("llama", 0.1, 256)
    model.set_draft(draft)
    for steps in range(1, 9):
        one = request(model, prompt_of(1, 20), 15)
        for _ in range(steps):
            model.step([one])
        one.finish()
        assert model.cache_used_bytes == draft.cache_used_bytes == 0
    del one
    gc.collect()


def test_what_cannot_be() -> None:
    model, draft = native_models.native("llama"), native_models.native("llama")
    with pytest.raises(UsageError, match="cannot draft for itself"):
        model.set_draft(model)
    model.set_draft(draft)
    with pytest.raises(UsageError, match="has a draft model itself"):
        draft.set_draft(model)
    with pytest.raises(UsageError, match="the model has no draft model"):
        request(draft, [5], 3)
    with pytest.raises(UsageError, match="weights are not complete"):
        model.set_draft(native_models.empty(native_models.whole("llama")[1]))
    model.set_draft(None)
    with pytest.raises(UsageError, match="the model has no draft model"):
        request(model, [5], 3)


def test_another_vocabulary_by_functions_between_the_two() -> None:
    """The draft model numbers its tokens the other way round."""
    _, spec, values = native_models.whole("llama", 256)
    turned = {key: value.flip(0) if value.shape[0] == VOCAB else value for key, value in values.items()}
    draft = native_models.fill(native_models.empty(spec), spec, turned)
    model = native_models.native("llama", positions=256)

    def turn(tokens: list[int]) -> list[int]:
        return [VOCAB - 1 - token for token in tokens]

    def back(tokens: list[int], before: list[int], said: list[int]) -> list[int]:
        assert turn(tokens) == before
        return turn(said)

    model.set_draft(draft, turn, back)
    found, drafts = answer(model, prompt_of(1, 20), 5)
    assert found == answer(model, prompt_of(1, 20), 0)[0]
    assert drafts[0] == drafts[1] > 20  # it says the same

    def fails(tokens: list[int]) -> list[int]:
        raise ValueError("no text")

    model.set_draft(draft, fails, back)
    one = request(model, prompt_of(1, 20), 5)
    model.step([one])
    with pytest.raises(ValueError, match="no text"):
        model.step([one])
    model.set_draft(draft, turn, back)
    while not one.finished:
        model.step([one])
    assert one.tokens == found[0]


@pytest.mark.parametrize("always", [False, True])
def test_ranks_draft_together(always: bool) -> None:
    whole = native_models.native("llama")
    options = {"max_new_tokens": 30, "do_sample": True, "top_k": 5, "seed": 3}

    def run(model: Any, drafts: dict[str, Any]) -> tuple[list[Any], int]:
        ones = [_llm.Request(model, prompt, options | drafts) for prompt in native_models.PROMPTS[:2]]
        while not all(one.finished for one in ones):
            model.step([one for one in ones if not one.finished])
        return [one.tokens for one in ones], ones[0].drafts[0]

    with ThreadPoolExecutor(2) as pool:

        def ranks(weight: str) -> list[Any]:
            made = [native_models.rank_of("llama", rank, 2, weight=weight) for rank in range(2)]
            names = [model.create_segment(20.0, False, [0, 0], []) for model in made]
            list(pool.map(lambda model: model.connect(names, [0, 0]), made))
            return made

        models, drafters = ranks("f32"), ranks("bf16")
        for model, drafter in zip(models, drafters, strict=True):
            with pytest.raises(UsageError, match="divided among 1 ranks, the model among 2"):
                model.set_draft(whole)
            model.set_draft(drafter)
        wanted = [found for found, _ in pool.map(lambda model: run(model, {}), models)]
        drafts = {"draft_tokens": 4, "draft_model": True, "draft_always": always}
        found = list(pool.map(lambda model: run(model, drafts), models))
    assert [tokens for tokens, _ in found] == wanted
    assert found[0][1] == found[1][1] and (found[0][1] > 0 or not always)
