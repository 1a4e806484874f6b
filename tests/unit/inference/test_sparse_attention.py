# SPDX-License-Identifier: Apache-2.0
"""Attention to the tokens that an indexer chooses: whatever a token comes with, it sees the same ones, bit by bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import decoder_reference
import family_cases
import native_models
from anyaccel.errors import UsageError
from anyaccel.inference.families.registry import family_of
from anyaccel.inference.native import shard

_llm = pytest.importorskip("anyaccel._llm")
pytest.importorskip("transformers")

_CASES = ["deepseek_v32", "glm_moe_dsa-shared"]
_VOCAB = 131


def _prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, _VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _request(model: Any, prompt: list[int], new: int = 8, **options: Any) -> Any:
    return _llm.Request(model, prompt, {"max_new_tokens": new, "logprobs": 0, **options}, None, True)


def _finish(model: Any, requests: list[Any], limit: int = 0) -> list[tuple[list[int], list[float]]]:
    while active := [each for each in requests if not each.finished]:
        model.step(active, [limit] * len(active), exact=True)
    found = []
    for each in requests:
        out = torch.empty(_VOCAB)
        each.copy_logits(out.data_ptr())
        found.append((each.tokens, out.tolist()))
    return found


@pytest.mark.parametrize("case", _CASES)
def test_answers_do_not_depend_on_company_chunks_or_what_was_forgotten(case: str) -> None:
    model = native_models.native(case, positions=512, threads=2)
    prompts = [_prompt(length, length) for length in (90, 3, 40)]
    alone = [_finish(model, [_request(model, prompt)])[0] for prompt in prompts]
    assert _finish(model, [_request(model, prompt) for prompt in prompts]) == alone
    for limit in (4, 41):  # also of fewer tokens than are chosen
        assert _finish(model, [_request(model, prompt) for prompt in prompts], limit) == alone
    requests = [_request(model, prompt) for prompt in prompts]
    for _ in range(4):
        model.step(requests, exact=True)
    for request, prompt in zip(requests, prompts, strict=True):  # as after a preemption
        request.shrink(len(prompt) - 1)
    assert _finish(model, requests) == alone
    for request in requests:
        request.finish()
    assert model.cache_used_bytes == 0


def test_a_shared_prefix_has_the_keys_of_the_indexer() -> None:
    model = native_models.native("deepseek_v32", positions=512, threads=1)
    prompt = _prompt(140)
    first = _request(model, prompt)
    answer = _finish(model, [first])[0][0]
    longer = prompt + answer + _prompt(30, 9)
    wanted = _finish(model, [_request(model, longer)])
    second = _request(model, longer)
    second.share(first, 128)
    assert second.cached == 128
    assert _finish(model, [second]) == wanted


def test_drafted_tokens_see_what_they_would_see_alone() -> None:
    model = native_models.native("deepseek_v32", positions=512, threads=1)
    prompt = _prompt(40)
    wanted = _finish(model, [_request(model, prompt, 24)])[0][0]
    text = prompt + wanted

    def drafts(so_far: list[int], before: list[int], made: list[int]) -> list[int]:
        right = text[len(so_far) :][: 1 + len(so_far) % 4]
        return [*right, (right[-1] + 1) % _VOCAB] if right and len(so_far) % 3 else right

    model.set_draft(native_models.native("llama", positions=512), lambda tokens: tokens, drafts)
    options = {"draft_tokens": 5, "draft_always": True, "draft_model": True}
    request = _llm.Request(model, prompt, {"max_new_tokens": 24, **options})
    while not request.finished:
        model.step([request], exact=True)
    drafted, accepted = request.drafts
    assert request.tokens == wanted
    assert 3 < accepted < drafted


@pytest.mark.parametrize("form", ["bf16", "i8", "i4"])
def test_other_forms_of_the_cache_are_near(form: str) -> None:
    """The chosen tokens may be others where scores are near each other, so that no difference has a narrow limit."""
    ids = _prompt(100)
    answers = []
    for each in ("f32", form):
        model = native_models.native("deepseek_v32", positions=512, threads=1, cache=each)
        answers.append(native_models.logits_of(model, _VOCAB, [model.create()], [ids]))
        sequence = model.create()
        rows = [native_models.logits_of(model, _VOCAB, [sequence], [[token]])[0] for token in ids[:70]]
        answers.append(torch.stack(rows))
    for whole, rounded in ((answers[0], answers[2]), (answers[1], answers[3])):
        alike = torch.nn.functional.cosine_similarity(whole, rounded)
        assert alike.median() > (0.98 if form != "i4" else 0.8)  # four bits of 24 values


def test_sequences_of_the_device_runtime_choose_for_themselves() -> None:
    """Shorter contexts than are chosen, and longer ones, in one step."""
    from anyaccel.inference.device.runtime import load_device
    from anyaccel.inference.options import ModelOptions

    whole = native_models.whole("glm_moe_dsa-shared", positions=512)[0]
    device = load_device(copy.deepcopy(whole), ModelOptions("fp32", cache_bytes=1 << 26), config=whole.config).model
    native = native_models.native("glm_moe_dsa-shared", positions=512, threads=1)
    answers = []
    for model in (native, device):
        requests = [_llm.Request(model, _prompt(length), {"max_new_tokens": 20}) for length in (2, 70, 9)]
        while active := [each for each in requests if not each.finished]:
            model.step(active)
        answers.append([each.tokens for each in requests])
    assert answers[0] == answers[1]


def test_300_tokens_are_those_of_transformers() -> None:
    whole, spec, _ = native_models.whole("deepseek_v32", positions=512)
    model = native_models.native("deepseek_v32", positions=512, threads=1)
    ids = _prompt(300, 3)
    with torch.inference_mode():
        wanted = whole(torch.tensor([ids])).logits[0]
    found = native_models.logits_of(model, spec.vocab, [model.create()], [ids])
    assert (found - wanted).abs().max() / wanted.abs().max() < 1e-4


def test_stages_keep_a_choice_together() -> None:
    config = family_cases.build("glm_moe_dsa-shared").config.to_dict()
    spec = family_of(config).spec(config)
    with pytest.raises(UsageError, match="layer 1 sees the tokens that a layer of another stage has chosen"):
        shard.stage_spec(spec, [range(1), range(1, 3)], 1)
    assert len(shard.stage_spec(spec, [range(2), range(2, 3)], 1).layers) == 1


def test_a_context_of_no_more_tokens_is_seen_whole() -> None:
    """Then the indexer changes nothing."""
    _, spec, values = native_models.whole("deepseek_v32", positions=512)
    ids = _prompt(5)
    reference = decoder_reference.Reference(spec, values)
    wanted = reference.step(reference.start(), ids)
    changed = {name: -value if "index_" in name else value for name, value in values.items()}
    model = native_models.fill(native_models.empty(spec), spec, changed)
    found = native_models.logits_of(model, spec.vocab, [model.create()], [ids])
    assert (found - wanted).abs().max() / wanted.abs().max() < 1e-4
