# SPDX-License-Identifier: Apache-2.0
"""What goes through transformers' own loop and pipelines, on a native model: as with transformers' own."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import anyaccel
import family_cases
from anyaccel.errors import UsageError
from anyaccel.inference import InferenceEngine

IDS = torch.tensor([[5, 17, 99, 3, 64]])
OPTIONS: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def reference() -> Any:
    return family_cases.build("llama").eval()


@pytest.fixture(scope="module")
def engine() -> InferenceEngine:
    return anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime="native")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    # Each token is a letter; transformers looks for stop strings by tokens that spell "abcdef".
    letters = ["<", "|", ">", *"abcdef", *(chr(0x4E00 + number) for number in range(122))]
    made = Tokenizer(models.WordLevel({letter: token for token, letter in enumerate(letters)}, unk_token="<"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<", eos_token=">")


def _same(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores


@pytest.mark.parametrize(
    "more",
    [
        {"num_beams": 2},
        {"logits_processor": [_same]},
        {"bad_words_ids": [[7]]},
        {"use_cache": False},
        {"prompt_lookup_num_tokens": 2},
    ],
    ids=lambda more: next(iter(more)),
)
def test_stop_strings_in_their_loop(
    more: dict[str, Any], engine: InferenceEngine, reference: Any, tokenizer: Any
) -> None:
    options = {**OPTIONS, **more, "attention_mask": torch.ones_like(IDS), "tokenizer": tokenizer}
    free = reference.generate(IDS, max_new_tokens=6, **{**options, "stop_strings": ["abcdef"]})
    stop = tokenizer.decode(free[0, 7:8])
    want = reference.generate(IDS, max_new_tokens=6, stop_strings=[stop], **options)
    assert want.shape[1] < free.shape[1]
    assert torch.equal(engine.generate(IDS, max_new_tokens=6, stop_strings=[stop], **options), want)


@pytest.mark.parametrize("place", ["argument", "config", "model"])
@pytest.mark.parametrize("more", [{"bad_words_ids": [[7]]}, {"use_cache": False}, {"output_scores": True}])
def test_drafts_by_lookup_change_no_answer(
    more: dict[str, Any], place: str, engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several rows, scores and runs without a cache go on as without drafts, which transformers refuses."""
    options = dict(OPTIONS, max_new_tokens=6, repetition_penalty=1.1, return_dict_in_generate=True, **more)
    rows = IDS.repeat(2, 1)
    want = engine.generate(rows, **options)
    if place == "argument":
        options["prompt_lookup_num_tokens"] = 3
    elif place == "config":
        options["generation_config"] = transformers.GenerationConfig(prompt_lookup_num_tokens=3)
    else:
        monkeypatch.setattr(engine.generation_config, "prompt_lookup_num_tokens", 3)
    got = engine.generate(rows, **options)
    assert torch.equal(got.sequences, want.sequences)
    assert (got.scores is None) == (want.scores is None)
    assert all(map(torch.equal, got.scores or (), want.scores or ()))


@pytest.mark.parametrize("count", [3, 5])
def test_a_cache_of_the_whole_prompt_is_an_error_that_says_so(count: int, engine: InferenceEngine) -> None:
    cache = engine(IDS, use_cache=True).past_key_values
    with pytest.raises(UsageError, match=rf"past_key_values: has 5 tokens and input_ids {count}.*crop\({count - 1}\)"):
        engine.generate(IDS[:, :count], past_key_values=cache, max_new_tokens=3, **OPTIONS)
    cache.crop(count - 1)  # as it says
    got = engine.generate(IDS[:, :count], past_key_values=cache, max_new_tokens=3, **OPTIONS)
    assert torch.equal(got, engine.generate(IDS[:, :count], max_new_tokens=3, **OPTIONS))
    # The new tokens alone, where the mask counts the cached ones.
    cache = engine(IDS, use_cache=True).past_key_values
    mask = torch.ones(1, 7)
    got = engine.generate(IDS[:, :2], past_key_values=cache, attention_mask=mask, max_new_tokens=3, **OPTIONS)
    want = engine.generate(torch.cat([IDS, IDS[:, :2]], 1), max_new_tokens=3, **OPTIONS)
    assert torch.equal(got[:, 2:], want[:, 7:])


@pytest.mark.parametrize("runtime", ["native", "plain"])
def test_a_pipeline_knows_an_engine(runtime: str, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime=runtime)
    own = logging.getLogger("transformers")
    own.addHandler(caplog.handler)
    try:
        transformers.pipeline("text-generation", model=engine, tokenizer=tokenizer)
    finally:
        own.removeHandler(caplog.handler)
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert isinstance(engine, InferenceEngine)
    assert not isinstance(engine, transformers.LlamaForCausalLM)
    assert repr(engine).startswith("InferenceEngine(")


def test_an_engine_is_copied_and_pickled_as_before() -> None:
    engine = anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime="plain")
    with torch.inference_mode():
        want = engine(IDS).logits
        for other in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
            assert type(other) is type(engine)
            assert torch.equal(other(IDS).logits, want)
