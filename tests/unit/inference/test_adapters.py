# SPDX-License-Identifier: Apache-2.0
"""Adapters of PEFT beside an engine: merged ones are packed, others are named before anything is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import anyaccel
import family_cases
from anyaccel.errors import UsageError

peft: Any = pytest.importorskip("peft", reason="peft is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own

IDS = torch.tensor([[5, 17, 99, 3, 64]])
KINDS: dict[str, dict[str, Any]] = {"lora": {}, "dora": {"use_dora": True}}


def _adapted(kind: str) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **KINDS[kind]
    )
    return peft.get_peft_model(family_cases.build("llama").eval(), config)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("runtime", ["native", "torch", "device"])
def test_a_model_with_adapters_is_refused_before_it_is_packed(kind: str, runtime: str) -> None:
    model = _adapted(kind)
    want = _logits(model)
    for each in (model, model.base_model.model):
        with pytest.raises(UsageError, match=r"merge_and_unload\(\).*runtime='plain'"):
            anyaccel.init_inference(each, dtype="fp32", runtime=runtime)
    with pytest.raises(UsageError, match="merge_and_unload"):
        anyaccel.init_inference(model, dtype="int4")  # auto, which would otherwise leave the weights as they are
    assert torch.equal(_logits(model), want)
    merged = anyaccel.init_inference(model.merge_and_unload(), dtype="fp32", runtime=runtime)
    torch.testing.assert_close(_logits(merged), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_auto_leaves_adapters_as_they_are_and_says_so(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = _adapted(kind)
    want = _logits(model)
    with caplog.at_level(logging.WARNING, "anyaccel"):
        engine = anyaccel.init_inference(model, dtype="fp32")
    assert engine.runtime == "plain"
    assert caplog.text.count("merge_and_unload()") == 1
    assert torch.equal(_logits(engine), want)
    with engine.module.disable_adapter():
        assert not torch.allclose(_logits(engine), want)
    torch.testing.assert_close(_logits(engine.module.merge_and_unload()), want)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")  # of the attempts before
@pytest.mark.parametrize("runtime", ["native", "torch"])
def test_a_packed_model_takes_no_adapters(runtime: str, tmp_path: Path) -> None:
    _adapted("lora").save_pretrained(tmp_path)
    engine = anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime=runtime)
    want = _logits(engine)
    for attempt in (
        lambda: engine.load_adapter(tmp_path),
        lambda: engine.module.add_adapter(peft.LoraConfig()),
        lambda: peft.PeftModel.from_pretrained(engine.module, tmp_path),
        lambda: peft.PeftModel.from_pretrained(engine, tmp_path),
    ):
        with pytest.raises((UsageError, ValueError), match=r"before init_inference.*runtime='plain'"):
            attempt()
    if runtime == "torch":
        assert torch.equal(_logits(engine), want)
    else:  # PEFT had put its layers in before it came to the weights
        with pytest.raises(UsageError, match="q_proj was changed after the native runtime had packed the model"):
            _logits(engine)


@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # PEFT's own, in generate
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_learned_prompts_around_a_packed_model_compute_as_in_peft(kind: str) -> None:
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    engine = anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime="torch")
    expected = peft.get_peft_model(family_cases.build("llama").eval(), config).eval()
    found = peft.get_peft_model(engine.module, config).eval()
    found.prompt_encoder.load_state_dict(expected.prompt_encoder.state_dict())
    torch.testing.assert_close(_logits(found), _logits(expected), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(_logits(found)[:, -IDS.shape[1] :], _logits(engine), atol=1e-2)
    arguments = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(found.generate(**arguments), expected.generate(**arguments))
