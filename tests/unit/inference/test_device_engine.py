# SPDX-License-Identifier: Apache-2.0
"""`runtime="device"` in an engine: Hugging Face's model around the other executor, here forced on the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import anyaccel
import family_cases
from anyaccel.errors import UsageError
from anyaccel.inference import generate_tokens, optimize

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model and its folder."""
    folder = tmp_path_factory.mktemp("llama")
    model = family_cases.build("llama")
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def engine(llama: tuple[Any, Path]) -> Any:
    return anyaccel.init_inference(llama[1], dtype="fp32", runtime="device")


def test_its_logits_and_answers_are_those_of_transformers(llama: tuple[Any, Path], engine: Any) -> None:
    model, _ = llama
    assert (engine.runtime, engine.why, type(engine).__name__) == ("device", "", type(model).__name__)
    ids_BT = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(3))
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, :3] = 0
    with torch.inference_mode():
        expected = model(ids_BT, attention_mask=mask_BT).logits
    logits = engine(ids_BT, attention_mask=mask_BT).logits
    assert not logits.is_inference()
    torch.testing.assert_close(logits[mask_BT.bool()], expected[mask_BT.bool()], rtol=0, atol=1e-4)
    more = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answer = model.generate(ids_BT, attention_mask=mask_BT, **more)
    assert torch.equal(engine.generate(ids_BT, attention_mask=mask_BT, **more), answer)
    beams = more | {"num_beams": 2}
    assert torch.equal(engine.generate(ids_BT[:1], **beams), model.generate(ids_BT[:1], **beams))


def test_tokens_come_one_by_one_and_are_the_native_runtimes(llama: tuple[Any, Path], engine: Any) -> None:
    native = anyaccel.init_inference(llama[1], dtype="fp32", runtime="native")
    prompt = torch.tensor([5, 17, 99, 3, 64])
    for options in ({}, {"temperature": 0.9, "top_p": 0.8, "seed": 7}):
        answers = [list(generate_tokens(each, prompt, max_new_tokens=16, **options)) for each in (engine, native)]
        assert answers[0] == answers[1]


def test_a_model_in_memory_is_taken_over(llama: tuple[Any, Path]) -> None:
    model = copy.deepcopy(llama[0])
    fast = optimize(model, "fp32", runtime="device")
    assert fast is model
    ids_BT = torch.tensor([[5, 17, 99]])
    torch.testing.assert_close(fast(ids_BT).logits, llama[0](ids_BT).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 0.05), ("fp16", 0.01)])
def test_types_of_16_bits_are_near(llama: tuple[Any, Path], dtype: str, bound: float) -> None:
    near = anyaccel.init_inference(llama[1], dtype=dtype, runtime="device")
    ids_BT = torch.randint(3, 131, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, expected = near(ids_BT).logits, llama[0](ids_BT).logits
    assert logits.dtype is getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype])
    assert float((logits.float() - expected).abs().max() / expected.abs().max()) < bound


def test_what_it_lacks_is_said(llama: tuple[Any, Path]) -> None:
    with pytest.raises(UsageError, match="kv_cache='int8'"):
        anyaccel.init_inference(llama[1], dtype="fp32", kv_cache="int8", runtime="device")


@pytest.mark.parametrize(("runtime", "smaller"), [("device", False), ("native", True)])
def test_a_cache_that_is_too_small_names_only_what_the_runtime_has(
    llama: tuple[Any, Path], runtime: str, smaller: bool
) -> None:
    small = anyaccel.init_inference(llama[1], dtype="fp32", runtime=runtime, cache_bytes=1 << 16)
    with pytest.raises(UsageError, match="or a larger cache_bytes") as error:
        small.generate(torch.full((64, 20), 5), max_new_tokens=30, do_sample=False)
    assert ("kv_cache=" in str(error.value)) is smaller
