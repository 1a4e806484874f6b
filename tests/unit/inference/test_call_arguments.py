# SPDX-License-Identifier: Apache-2.0
"""A native model's forward answers each argument as the model's own forward does, or refuses it."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import pytest
import torch

import anyaccel
import family_cases
from anyaccel.errors import UsageError

IDS = torch.randint(3, 131, (2, 6), generator=torch.Generator().manual_seed(7))
ONES = torch.ones_like(IDS)
_CASES = ("llama", "gpt2", "gpt_neo", "mixtral", "bloom")


@functools.cache
def _own(case: str) -> Any:
    return family_cases.build(case)


@functools.cache
def _engine(case: str) -> Any:
    engine = anyaccel.init_inference(copy.deepcopy(_own(case)), dtype="fp32")
    assert engine.runtime == "native"
    return engine


@pytest.mark.parametrize(
    ("case", "name", "value"),
    [
        ("gpt2", "token_type_ids", IDS.flip(0)),
        ("gpt2", "token_type_ids", torch.zeros_like(IDS)),
        ("gpt_neo", "token_type_ids", IDS),
        ("gpt2", "encoder_hidden_states", torch.ones(2, 3, 36)),
        ("gpt2", "encoder_attention_mask", ONES),
        ("gpt2", "head_mask", torch.zeros(2, 6)),
        ("bloom", "head_mask", torch.zeros(2, 6)),
        ("llama", "cu_seq_lens_q", torch.tensor([0, 3, 6])),
        ("llama", "seq_idx", torch.zeros_like(IDS)),
        ("llama", "is_causal", False),
        ("llama", "cache_position", torch.arange(3, 9)),
        ("llama", "attention_masc", ONES),
        ("llama", "output_hidden_states", True),
        ("llama", "output_router_logits", True),
        ("mixtral", "output_router_logits", True),
    ],
)
def test_what_is_not_answered_is_refused(case: str, name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{name}.*runtime='torch'"):
        _engine(case)(IDS, **{name: value})


@pytest.mark.parametrize("case", _CASES)
def test_each_argument_of_the_models_own_forward_is_answered_or_refused(case: str) -> None:
    """Also those that a later transformers adds: a value for which the own answer changes must not be ignored."""
    own, engine = _own(case), _engine(case)
    with torch.inference_mode():
        usual = own(IDS).logits
        for name in inspect.signature(own.forward).parameters:
            if name in ("input_ids", "kwargs", "inputs_embeds", "past_key_values", "labels", "logits_to_keep"):
                continue
            for value in (ONES, torch.zeros_like(IDS), torch.ones(2, 6, 36), True, False):
                try:
                    expected = own(IDS, **{name: value}).logits
                except Exception:  # noqa: BLE001 - not of this kind
                    continue
                if expected.shape == usual.shape and torch.allclose(expected, usual, atol=1e-4):
                    continue
                try:
                    found = engine(IDS, **{name: value}).logits
                except UsageError:
                    continue
                kept = value.bool() if name == "attention_mask" else slice(None)
                torch.testing.assert_close(found[kept], expected[kept], rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize(
    ("case", "more"),
    [
        ("llama", {"token_type_ids": torch.zeros_like(IDS)}),  # what tokenizers give, and its forward ignores
        ("gpt2", {"token_type_ids": None, "encoder_hidden_states": None, "head_mask": None}),
        ("mixtral", {"output_router_logits": False, "output_attentions": False, "is_causal": True}),
        ("llama", {"use_cache": False, "return_dict": True, "cache_position": torch.arange(6)}),
        ("llama", {"labels": IDS, "num_items_in_batch": torch.tensor(4)}),
        ("llama", {"labels": IDS.where(IDS > 60, -1), "ignore_index": -1}),
        ("llama", {"labels": IDS, "shift_labels": IDS}),
    ],
)
def test_what_changes_nothing_or_the_loss_alone_is_taken(case: str, more: dict[str, Any]) -> None:
    with torch.inference_mode():
        expected = _own(case)(IDS, **more)
        found = _engine(case)(IDS, **more)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-3)
    if "labels" in more:
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-3, atol=1e-3)


def test_a_loss_that_includes_the_routers_is_refused() -> None:
    model = family_cases.build("mixtral")
    model.config.output_router_logits = True
    engine = anyaccel.init_inference(model, dtype="fp32", runtime="native")
    with pytest.raises(UsageError, match="labels: the loss of the router"):
        engine(IDS, labels=IDS)


@pytest.mark.parametrize("case", _CASES)
def test_generation_by_hugging_face_passes_nothing_that_is_refused(case: str) -> None:
    """Beams are not the native loop's."""
    expected = _own(case).generate(IDS, attention_mask=ONES, max_new_tokens=4, num_beams=2, do_sample=False)
    found = _engine(case).generate(IDS, attention_mask=ONES, max_new_tokens=4, num_beams=2, do_sample=False)
    assert torch.equal(found, expected)
