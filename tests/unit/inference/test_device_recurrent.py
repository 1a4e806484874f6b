# SPDX-License-Identifier: Apache-2.0
"""Recurrent states of the device runtime: chunks of prompts, and what the engine does with states, as natively."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import family_cases
import native_models
from anyaccel._llm import Request
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.device import recurrence
from device_models import on_device

pytest.importorskip("transformers")

CASES = family_cases.MIXERS
VOCAB = 131


def _prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _request(model: Any, prompt: list[int], **options: Any) -> Any:
    return Request(model, prompt, {"max_new_tokens": 8, **options})


def _finish(model: Any, requests: list[Any], limit: int = 0) -> list[list[int]]:
    while active := [each for each in requests if not each.finished]:
        model.step(active, [limit] * len(active), exact=True)
    return [each.tokens for each in requests]


@pytest.mark.parametrize("case", CASES)
def test_batches_chunks_preemption_and_shared_prefixes_give_the_tokens_of_native(case: str) -> None:
    native, model = native_models.native(case, positions=512), on_device(case, positions=512)
    prompts = [_prompt(length, length) for length in (150, 3, 70)]
    alone = [_finish(native, [_request(native, prompt)])[0] for prompt in prompts]
    assert _finish(model, [_request(model, prompt) for prompt in prompts]) == alone
    assert _finish(model, [_request(model, prompt) for prompt in prompts], limit=41) == alone
    requests = [_request(model, prompt, keep_states=True) for prompt in prompts]
    for _ in range(4):
        model.step(requests, exact=True)
    for request, prompt in zip(requests, prompts, strict=True):  # as after a preemption
        request.shrink(len(prompt) - 1)
    assert _finish(model, requests) == alone

    first = requests[0]
    longer = [*prompts[0], *first.tokens, *_prompt(30, 9)]
    wanted = _finish(native, [_request(native, longer)])
    for tokens in (128, 64):  # where a state was kept, and where the next step computes what is missing
        second = _request(model, longer)
        second.share(first, tokens)
        assert second.cached == tokens
        assert _finish(model, [second]) == wanted
    del requests, request, first, second
    gc.collect()
    assert model.cache_used_bytes == 0


def test_sequences_fork_and_go_back_where_there_is_a_state() -> None:
    model = on_device("qwen3_next", positions=512)
    sequence, plain = model.create(), model.create()
    tokens = torch.tensor(_prompt(20))

    def logits(of: int, some: torch.Tensor) -> torch.Tensor:
        out = torch.empty(VOCAB)
        model.forward([of], [len(some)], some.data_ptr(), out.data_ptr(), [len(some) - 1])
        return out

    logits(sequence, tokens)
    twin = model.fork(sequence, 20)
    wanted = logits(sequence, torch.tensor([7]))
    assert torch.equal(logits(twin, torch.tensor([7])), wanted)
    for go_back in (lambda: model.truncate(sequence, 20), lambda: model.fork(sequence, 3)):
        with pytest.raises(UsageError, match=r"cannot go back to .* only to 0"):
            go_back()
    model.truncate(sequence, 0)
    expected = logits(plain, tokens)
    assert torch.equal(logits(sequence, tokens), expected)


def test_states_count_in_the_limit_and_those_that_are_kept_make_room() -> None:
    whole = on_device("qwen3_next", positions=512)
    state, page = whole.cache_bytes_per_state(), 64 * whole.cache_bytes_per_token()
    counted = -(-state // page) * page
    model = on_device("qwen3_next", positions=512, cache_limit=2 * (counted + page))
    requests = [_request(model, _prompt(10, seed)) for seed in range(3)]
    with pytest.raises(ModelError, match="the key/value cache needs"):
        model.step(requests)
    assert _finish(model, requests[:2]) == [_finish(whole, [_request(whole, _prompt(10, seed))])[0] for seed in (0, 1)]
    assert model.cache_used_bytes == 2 * (counted + page)

    small = on_device("qwen3_next", positions=512, cache_limit=2 * (counted + page))
    first = _request(small, _prompt(100), max_new_tokens=60)
    first.keep(64)
    wanted = _finish(whole, [_request(whole, _prompt(100), max_new_tokens=60)])
    assert _finish(small, [first]) == wanted  # the third page takes the place of what was kept


def _token_by_token(state: torch.Tensor, rows: list[torch.Tensor], delta: bool) -> tuple[torch.Tensor, torch.Tensor]:
    made = []
    for t in range(rows[0].shape[1]):
        y, state = recurrence.attended(state, *(each[:, t : t + 1] for each in rows), delta)  # type: ignore[arg-type]
        made.append(y)
    return torch.cat(made, 1), state


@pytest.mark.parametrize("strong", [1.0, 30.0])
@pytest.mark.parametrize("channels", [1, 12])
@pytest.mark.parametrize("delta", [False, True])
def test_chunks_are_what_single_tokens_are(delta: bool, channels: int, strong: float) -> None:
    """Also with decays whose product over a chunk is no float any more."""
    generator = torch.Generator().manual_seed(channels)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v, state = some(2, 150, 3, 12), some(2, 150, 3, 12), some(2, 150, 3, 5), some(2, 3, 12, 5)
    k = k / k.norm(dim=-1, keepdim=True)
    rows = [q, k, v, -strong * some(2, 150, 3, channels).exp(), some(2, 150, 3).sigmoid()]
    y, after = _token_by_token(state, rows, delta)
    chunked, chunked_after = recurrence.attended(state, *rows, delta)  # type: ignore[arg-type]
    torch.testing.assert_close(chunked, y)
    torch.testing.assert_close(chunked_after, after)
