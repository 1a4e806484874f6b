# SPDX-License-Identifier: Apache-2.0
"""Whatever transformers changes in a configuration during a call is put back, whatever ends it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import anyaccel
import family_cases
from anyaccel.inference.hf.native_generate import preserve_configurations

IDS = torch.tensor([[5, 17, 99, 3, 64]])


@pytest.mark.parametrize("runtime", ["native", "torch", "plain"])
@pytest.mark.parametrize(
    "more", [{}, {"renormalize_logits": True}], ids=["their drafts alone", "with an option of their loop"]
)
def test_an_early_exit_changes_neither_answers_nor_the_model(runtime: str, more: dict[str, Any]) -> None:
    engine = anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime=runtime)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **more}
    want = engine.generate(IDS, **options)
    layers = engine.config.num_hidden_layers
    assert torch.equal(engine.generate(IDS, assistant_early_exit=1, **options), want)
    assert engine.config.num_hidden_layers == layers
    assert torch.equal(engine.generate(IDS, **options), want)


@pytest.mark.parametrize("runtime", ["native", "plain"])
def test_a_call_that_an_error_ends_leaves_the_model_as_it_was(runtime: str) -> None:
    engine = anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime=runtime)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    want, before = engine.generate(IDS, **options), engine.config.to_dict()

    def interrupted(_ids: torch.Tensor, _scores: torch.Tensor) -> torch.Tensor:
        engine.config.num_hidden_layers = 1
        engine.generation_config.temperature = 7.0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(IDS, logits_processor=[interrupted], **options)
    assert engine.config.to_dict() == before
    assert engine.generation_config.temperature != 7.0
    assert torch.equal(engine.generate(IDS, **options), want)


def test_inner_configurations_and_new_attributes() -> None:
    model = family_cases.build("llama")
    model.config.inner = type(model.config)(hidden_size=64)
    with preserve_configurations(model, None):
        model.config.inner.hidden_size = 1
        model.config.new = True
    assert model.config.inner.hidden_size == 64
    assert not hasattr(model.config, "new")
