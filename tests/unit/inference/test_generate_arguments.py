# SPDX-License-Identifier: Apache-2.0
"""Arguments of `generate`, and of a call, that cannot be right are errors that name them and what was seen."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
import torch
from transformers import GenerationConfig

import anyaccel
import family_cases
from anyaccel.errors import UsageError
from anyaccel.inference import InferenceEngine

IDS = torch.tensor([[5, 17, 99, 3, 64], [6, 2, 7, 8, 9]])
NAN = float("nan")
NO_COUNT: list[Any] = ["5", 1.5, NAN, True, [3], -1]
NO_TOKEN: list[Any] = [2.7, "2", True, NAN, [2.5, 3], [[3]], 10**30, -2, torch.tensor([2.0])]
BAD: dict[str, list[Any]] = {
    "max_new_tokens": [*NO_COUNT, 0],
    "max_length": NO_COUNT,
    "min_new_tokens": [*NO_COUNT, 10**20],
    "min_length": [*NO_COUNT, 10**20],
    "num_return_sequences": [*NO_COUNT, 0, 10**20],
    "num_beams": [*NO_COUNT, 0],
    "eos_token_id": NO_TOKEN,
    "pad_token_id": NO_TOKEN,
    "bos_token_id": NO_TOKEN,
    "max_time": [NAN, "x", True, -1],
    "do_sample": ["no", 2, NAN],
    "use_cache": ["no"],
    "return_dict_in_generate": ["yes"],
    "stop_strings": ["", [""], 5, ["a", 5]],
    "seed": [1.5, "a", True, 2**64],
    "generator": [5, "a"],
    "streamer": [5],
    "stopping_criteria": [5, [5], print],
    "logits_processor": [5, [5]],
    "guidance_scale": [NAN, "a"],
    "length_penalty": ["a"],
}
BAD_OF_SAMPLING: dict[str, list[Any]] = {
    "temperature": [1e-300, 1e300, 0, NAN, "hot"],
    "top_p": [1e-300, 0, 2, "a"],
    "repetition_penalty": [1e-300, 1e300, NAN],
}


def cases(bad: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={value!r}"[:40]) for name in bad for value in bad[name]]


@pytest.fixture(scope="module", params=["native", "torch"])
def engine(request: pytest.FixtureRequest) -> InferenceEngine:
    return anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime=request.param)


@pytest.fixture(scope="module")
def native() -> InferenceEngine:
    return anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime="native")


@pytest.mark.parametrize(("name", "value"), cases(BAD))
def test_an_argument_that_cannot_be_is_refused_by_name(name: str, value: Any, engine: InferenceEngine) -> None:
    with pytest.raises(UsageError) as error:
        engine.generate(IDS, **({"max_new_tokens": 2} | {name: value}))
    assert str(error.value).startswith(f"{name}=") and "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "value"), cases(BAD_OF_SAMPLING))
def test_a_number_that_native_code_cannot_hold_is_refused_by_name(
    name: str, value: Any, native: InferenceEngine
) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(f'{name}={value!r}')}: must be"):
        native.generate(IDS, max_new_tokens=2, do_sample=True, **{name: value})


@pytest.mark.parametrize("name", ["eos_token_id", "pad_token_id"])
def test_a_configuration_is_checked_like_arguments(name: str, native: InferenceEngine) -> None:
    with pytest.raises(UsageError, match=f"^{name}=2.7"):
        native.generate(IDS, GenerationConfig(**{"max_new_tokens": 2, name: 2.7}))


def test_what_fits_is_taken(native: InferenceEngine) -> None:
    plain = native.generate(IDS, max_new_tokens=3, do_sample=False)
    for same in (
        {"max_new_tokens": numpy.int64(3)},
        {"max_new_tokens": 3, "eos_token_id": -1},
        {"max_new_tokens": 3, "max_time": float("inf"), "stop_strings": [], "num_return_sequences": None},
        {"max_new_tokens": 3, "do_sample": 0},
    ):
        assert torch.equal(native.generate(IDS, **({"do_sample": False} | same)), plain), same


@pytest.mark.parametrize(
    "mask",
    [IDS * NAN, torch.full((2, 5), 0.5), torch.full((2, 5), 2), torch.full((2, 5), -torch.inf), [[1] * 5] * 2, "a", {}],
    ids=["nan", "half", "two", "additive", "list", "text", "dict"],
)
def test_a_mask_is_of_zeros_and_ones(mask: Any, native: InferenceEngine) -> None:
    with pytest.raises(UsageError, match=r"^attention_mask"):
        native(IDS, attention_mask=mask)
    with pytest.raises(UsageError, match=r"^attention_mask"):
        native.generate(IDS, attention_mask=mask, max_new_tokens=2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool, torch.uint8])
def test_a_mask_may_have_any_type(dtype: torch.dtype, native: InferenceEngine) -> None:
    mask = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    plain, typed = (
        native.generate(IDS, attention_mask=each, max_new_tokens=3, do_sample=False) for each in (mask, mask.to(dtype))
    )
    assert torch.equal(plain, typed)


@pytest.mark.parametrize(
    "ids",
    [IDS.tolist(), IDS.numpy(), IDS[0], torch.tensor(3), IDS.to("meta"), IDS.to_sparse(), "hello", IDS.float()],
    ids=["list", "numpy", "row", "scalar", "meta", "sparse", "text", "float"],
)
def test_tokens_are_a_dense_tensor_of_rows(ids: Any, native: InferenceEngine) -> None:
    with pytest.raises(UsageError, match=r"^input_ids"):
        native(ids)
    with pytest.raises(UsageError, match=r"^input_ids"):
        native.generate(ids, max_new_tokens=2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_narrow_tokens_give_the_same_answer(dtype: torch.dtype, native: InferenceEngine) -> None:
    wide, narrow = (native.generate(ids, max_new_tokens=8, do_sample=False) for ids in (IDS, IDS.to(dtype)))
    assert wide.tolist() == narrow.tolist()


@pytest.mark.parametrize("value", [1.5, [0, 1], "a", None])
def test_the_logits_to_keep_are_a_number_or_positions(value: Any, native: InferenceEngine) -> None:
    with pytest.raises(UsageError, match=r"^logits_to_keep="):
        native(IDS, logits_to_keep=value)


def test_one_prompt_is_a_list_a_tensor_or_a_row(engine: InferenceEngine) -> None:
    ids = IDS[0]
    wanted = engine.generate(IDS[:1], max_new_tokens=4, do_sample=False, eos_token_id=[])[0, 5:].tolist()
    for prompt in (ids, ids[None], ids.tolist(), tuple(ids.tolist()), [ids.tolist()], ids.numpy()):
        assert list(anyaccel.inference.generate_tokens(engine, prompt, max_new_tokens=4)) == wanted
    told: Any
    for told, said in (("abc", "'abc'"), (None, "None"), (IDS, r"shape \[2, 5\]"), ([[1], [2]], r"\[\[1\], \[2\]\]")):
        with pytest.raises(UsageError, match=f"^input_ids (of )?{said}: must be the token ids of one prompt"):
            anyaccel.inference.generate_tokens(engine, told, max_new_tokens=4)
    with pytest.raises(UsageError, match="must be a whole number"):
        anyaccel.inference.generate_tokens(engine, ids.double(), max_new_tokens=4)
    with pytest.raises(UsageError, match="at least one token"):
        anyaccel.inference.generate_tokens(engine, [], max_new_tokens=4)
