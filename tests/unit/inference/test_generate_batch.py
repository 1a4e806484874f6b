# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's generate_batch on engines of each runtime: their results, by their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import anyaccel
import family_cases
from anyaccel.errors import UsageError
from anyaccel.inference import InferenceEngine

PROMPTS = [[5, 17, 99], [8], [9, 10, 11, 12, 13, 14]]


@pytest.fixture(scope="module", params=["native", "device", "torch"])
def engine(request: Any) -> InferenceEngine:
    return anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime=request.param)


def _alone(prompt: list[int], new: int, end: int | None = None) -> list[int]:
    model = family_cases.build("llama").eval()
    row = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=end, pad_token_id=0)
    tokens: list[int] = row[0, len(prompt) :].tolist()
    return tokens


def test_answers_are_those_of_each_prompt_alone(engine: InferenceEngine) -> None:
    config = transformers.GenerationConfig(max_new_tokens=6, do_sample=False)
    got = engine.generate_batch(PROMPTS, generation_config=config)
    assert list(got) == ["req_0", "req_1", "req_2"]
    assert [each.prompt_ids for each in got.values()] == PROMPTS
    assert [each.generated_tokens for each in got.values()] == [_alone(prompt, 6) for prompt in PROMPTS]
    assert all(each.is_finished() and each.error is None for each in got.values())
    assert config.max_new_tokens == 6


def test_an_end_token_ends_an_answer_and_is_part_of_it(engine: InferenceEngine) -> None:
    end = _alone(PROMPTS[0], 6)[2]
    config = transformers.GenerationConfig(do_sample=False, eos_token_id=end)
    got = engine.generate_batch(PROMPTS, generation_config=config, max_new_tokens=6)
    assert [each.generated_tokens for each in got.values()] == [_alone(prompt, 6, end) for prompt in PROMPTS]
    assert got["req_0"].generated_tokens[-1] == end


def test_several_answers_to_a_prompt(engine: InferenceEngine) -> None:
    config = transformers.GenerationConfig(do_sample=True, num_return_sequences=3, max_new_tokens=4)
    got = engine.generate_batch(PROMPTS[:2], generation_config=config)
    assert list(got) == [
        name for row in (0, 1) for name in (f"req_{row}__child#0", f"req_{row}__child#1", f"req_{row}")
    ]
    assert {len(each.generated_tokens) for each in got.values()} == {4}


def test_more_prompts_than_the_cache_has_room_for() -> None:
    engine = anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime="native", cache_bytes=200_000)
    got = engine.generate_batch(PROMPTS * 20, max_new_tokens=6)
    assert len(got) == 60
    assert got["req_57"].generated_tokens == _alone(PROMPTS[0], 6)


@pytest.mark.parametrize("inputs", [[[]], [[5], "text"], [5, 6], [[5.5]]])
def test_what_is_no_prompt_is_named(engine: InferenceEngine, inputs: Any) -> None:
    with pytest.raises(UsageError, match=r"inputs\[\d\]"):
        engine.generate_batch(inputs)


def test_what_has_no_answer_is_an_error(engine: InferenceEngine) -> None:
    assert engine.generate_batch([]) == {}
    with pytest.raises(UsageError, match="vocabulary"):
        engine.generate_batch([[5, 999]])
    if engine.native is not None:  # with the model's own code the manager is transformers'
        with pytest.raises(UsageError, match="generate_batch"):
            engine.init_continuous_batching()
