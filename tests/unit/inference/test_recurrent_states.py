# SPDX-License-Identifier: Apache-2.0
"""Recurrent states in the engine: batches, chunks, preemption, prefixes, forks and memory give the answers of each
request alone, bit by bit.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

import family_cases
import native_models
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.spec.decoder import Recurrent

_llm = pytest.importorskip("anyaccel._llm")

CASES = family_cases.MIXERS
VOCAB = 131


def _prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _request(model: Any, prompt: list[int], new: int = 8, **options: Any) -> Any:
    return _llm.Request(model, prompt, {"max_new_tokens": new, "logprobs": 0, **options}, None, True)


def _logits(request: Any) -> torch.Tensor:
    out = torch.empty(VOCAB)
    request.copy_logits(out.data_ptr())
    return out


def _finish(model: Any, requests: list[Any], limit: int = 0) -> list[tuple[list[int], torch.Tensor]]:
    while active := [each for each in requests if not each.finished]:
        model.step(active, [limit] * len(active), exact=True)
    return [(each.tokens, _logits(each)) for each in requests]


def _assert_same(found: list[Any], wanted: list[Any]) -> None:
    for (tokens, logits), (want_tokens, want_logits) in zip(found, wanted, strict=True):
        assert tokens == want_tokens
        assert torch.equal(logits, want_logits)


def test_every_mixer_has_a_case() -> None:
    specs = [native_models.whole(case)[1] for case in CASES]
    found = {type(layer.recurrent) for spec in specs for layer in spec.layers if layer.recurrent is not None}
    assert found == set(get_args(Recurrent))


@pytest.mark.parametrize("case", CASES)
def test_answers_do_not_depend_on_company_chunks_or_what_was_forgotten(case: str) -> None:
    model = native_models.native(case, positions=512, threads=2)
    prompts = [_prompt(length, length) for length in (150, 3, 70)]
    alone = [_finish(model, [_request(model, prompt)])[0] for prompt in prompts]
    _assert_same(_finish(model, [_request(model, prompt) for prompt in prompts]), alone)
    _assert_same(_finish(model, [_request(model, prompt) for prompt in prompts], limit=41), alone)
    # As after a preemption: all of it is computed again, without being asked for.
    requests = [
        _request(model, prompt, keep_states=each) for prompt, each in zip(prompts, (True, False, True), strict=True)
    ]
    for _ in range(4):
        model.step(requests, exact=True)
    for request, prompt in zip(requests, prompts, strict=True):
        request.shrink(len(prompt) - 1)
    _assert_same(_finish(model, requests), alone)
    for request in requests:
        request.finish()
    assert model.cache_used_bytes == 0


@pytest.mark.parametrize("case", CASES)
def test_a_kept_state_is_where_another_request_goes_on(case: str) -> None:
    model = native_models.native(case, positions=512, threads=2)
    prompt = _prompt(140)
    first = _request(model, prompt)
    first.keep(128)
    answer = _finish(model, [first])[0][0]
    longer = prompt + answer + _prompt(30, 9)
    wanted = _finish(model, [_request(model, longer)])
    for tokens in (128, 64):  # of the second no state was kept: the next step computes what is missing
        second = _request(model, longer)
        second.share(first, tokens)
        assert second.cached == tokens
        _assert_same(_finish(model, [second]), wanted)
        second.finish()
    # What comes next of the first one does not change what was shared.
    first.shrink(128)
    assert first.cached == 128
    one, two = _request(model, longer), _request(model, prompt[:128] + _prompt(20, 4))
    one.share(first, 128)
    two.share(first, 128)
    alone = _finish(model, [_request(model, prompt[:128] + _prompt(20, 4))])
    _assert_same(_finish(model, [one, two]), [*wanted, *alone])
    with pytest.raises(UsageError, match="keep: behind 5 tokens"):
        one.keep(5)


@pytest.mark.parametrize("case", CASES)
def test_sequences_of_others_fork_at_their_end_only(case: str) -> None:
    model = native_models.native(case, positions=512, threads=1)
    sequence = model.create()
    prompt = _prompt(20)
    native_models.logits_of(model, VOCAB, [sequence], [prompt])
    twin = model.fork(sequence, 20)
    both = native_models.logits_of(model, VOCAB, [sequence, twin], [[7, 8], [9]])
    plain = model.create()
    wanted = native_models.logits_of(model, VOCAB, [plain], [[*prompt, 9]])
    torch.testing.assert_close(both[2], wanted[-1], rtol=1e-4, atol=1e-4)
    for go_back in (lambda: model.truncate(sequence, 21), lambda: model.fork(sequence, 3)):
        with pytest.raises(UsageError, match=r"cannot go back to .* only to 0"):
            go_back()
    model.truncate(sequence, 0)
    for each in (sequence, twin, plain):
        model.destroy(each)
    assert model.cache_used_bytes == 0


@pytest.mark.parametrize("case", CASES)
def test_states_count_in_the_limit(case: str) -> None:
    state = native_models.native(case, positions=512).cache_bytes_per_state()
    page = 64 * native_models.native(case, positions=512).cache_bytes_per_token()
    assert state > 0
    model = native_models.native(case, positions=512, cache_limit=2 * (state + page))
    requests = [_request(model, _prompt(10, seed)) for seed in range(3)]
    with pytest.raises(ModelError, match="the key/value cache needs"):
        model.step(requests, exact=True)
    assert len(_finish(model, requests[:2])) == 2
    assert model.cache_used_bytes == 2 * (state + page)


def _drafting(model: Any, texts: list[list[int]]) -> dict[str, Any]:
    """Options of answers whose drafts are right for some tokens, then wrong: as many as come before are even or odd."""

    def drafts(so_far: list[int], before: list[int], made: list[int]) -> list[int]:
        text = next(each for each in texts if each[: len(so_far)] == so_far)
        right = text[len(so_far) :][: 1 + len(so_far) % 4]
        return [*right, (right[-1] + 1) % VOCAB] if right and len(so_far) % 3 else right

    model.set_draft(native_models.native("llama", positions=512), lambda tokens: tokens, drafts)
    return {"draft_tokens": 5, "draft_always": True, "draft_model": True, "keep_states": True}


@pytest.mark.parametrize("case", CASES)
def test_drafts_give_the_same_tokens(case: str) -> None:
    """States go back behind wrong drafts, also in company, over the ends of blocks, and where the next turn goes on."""
    model = native_models.native(case, positions=512, threads=2)
    prompts = [_prompt(50), _prompt(70, 4)]
    wanted = [_finish(model, [_request(model, prompt, 40)])[0][0] for prompt in prompts]
    further = _prompt(5, 8)
    after = [
        _finish(model, [_request(model, [*prompt, *answer, *further], 10)])[0][0]
        for prompt, answer in zip(prompts, wanted, strict=True)
    ]
    texts = [[*a, *b] for a, b in zip(prompts, wanted, strict=True)]
    options = _drafting(model, texts + [[*a, *further, *b] for a, b in zip(texts, after, strict=True)])
    requests = [_llm.Request(model, prompt, {"max_new_tokens": 40, **options}) for prompt in prompts]
    while active := [each for each in requests if not each.finished]:
        model.step(active, exact=True)
    assert [each.tokens for each in requests] == wanted
    for request, want in zip(requests, after, strict=True):
        drafted, accepted = request.drafts
        assert 5 < accepted < drafted - 5
        request.extend(further, 10)
        while not request.finished:
            model.step([request], exact=True)
        assert request.tokens == want
        request.finish()
    assert model.cache_used_bytes == 0


def test_an_answer_with_drafts_that_stops_in_the_middle() -> None:
    """Tokens that were chosen and not given are forgotten, states and all."""
    model = native_models.native("lfm2", positions=512, threads=1)
    prompt = _prompt(50)
    wanted = _finish(model, [_request(model, prompt, 30)])[0][0]
    options = _drafting(model, [[*prompt, *wanted]])
    for steps in range(1, 20):
        request = _llm.Request(model, prompt, {"max_new_tokens": 30, **options})
        for _ in range(steps):
            model.step([request], exact=True)
        assert request.tokens == wanted[:steps]
        request.shrink(len(prompt) + steps - 1)
        while not request.finished:
            model.step([request], exact=True)
        assert request.tokens == wanted
        request.finish()


def test_a_model_with_states_makes_no_drafts() -> None:
    with pytest.raises(UsageError, match="a model with a recurrent state makes no drafts"):
        native_models.native("llama").set_draft(native_models.native("lfm2"))


def test_where_memory_is_scarce_there_are_no_drafts() -> None:
    whole = native_models.native("mamba2", positions=512)
    state, page = whole.cache_bytes_per_state(), 64 * whole.cache_bytes_per_token()
    model = native_models.native("mamba2", positions=512, cache_limit=state + 3 * page)
    request = _llm.Request(model, [5, 6, 7, 8] * 10, {"max_new_tokens": 20, "draft_tokens": 5, "draft_always": True})
    while not request.finished:
        model.step([request], exact=True)
    assert request.drafts == (0, 0) and len(request.tokens) == 20
