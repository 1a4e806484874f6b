# SPDX-License-Identifier: Apache-2.0
"""Models that run their own code behind `_llm.Request`: their tokens are those of transformers' `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import anyaccel
from anyaccel import _llm
from anyaccel.errors import ModelError
from anyaccel.inference import generate_tokens
from anyaccel.inference.generic.executor import BatchedExecutor, OneByOneExecutor
from anyaccel.inference.spec.decoder import DecoderSpec

transformers = pytest.importorskip("transformers")

VOCAB = 300
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
# Attention through transformers' interface: plain, of windows and full in turn, capped, with sinks, in chunks.
TOGETHER: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "helium": ("HeliumConfig", {"head_dim": 8}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 4}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "gpt_oss": ("GptOssConfig", {"head_dim": 8, "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 8,
            "attention_chunk_size": 4,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "no_rope_layers": [1, 1, 0],
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", {}),
}
# States of their own, or attention of their own.
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("MambaConfig", {"state_size": 4}),
    "recurrent_gemma": ("RecurrentGemmaConfig", {"head_dim": 8, "lru_width": 32, "attention_window_size": 6}),
    "diffllama": ("DiffLlamaConfig", {}),
}
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [40, 41], [100, 90, 80, 70, 60])


def _module(name: str, more: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**_SMALL, **more})
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in module.parameters():  # initial values are small, and answers then depend on little
        parameter.data.mul_(3) if parameter.dim() > 1 else None
    return module


def _expected(module: Any, prompt: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        out = module.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return [int(token) for token in out[0, len(prompt) :]]


def _model(executor: Any) -> _llm.ExternalModel:
    return _llm.ExternalModel(DecoderSpec(VOCAB, 32, (), None, max_tokens=128), executor)


def _answer(model: Any, requests: list[Any]) -> list[list[int]]:
    while not all(request.finished for request in requests):
        model.step([request for request in requests if not request.finished])
    return [list(request.tokens) for request in requests]


@pytest.mark.parametrize("name", TOGETHER)
def test_sequences_of_several_lengths_are_computed_together(name: str) -> None:
    module = _module(*TOGETHER[name])
    expected = [_expected(module, prompt, 9) for prompt in PROMPTS]
    executor = BatchedExecutor(module, 1 << 24, 0)
    assert executor.paged  # the native attention has all of these masks
    model = _model(executor)
    requests = [_llm.Request(model, prompt, {"max_new_tokens": 9}) for prompt in PROMPTS]
    assert _answer(model, requests) == expected
    again = _llm.Request(
        model, [*PROMPTS[0], *expected[0][:4]], {"max_new_tokens": 5}, requests[0]
    )  # its prefix is kept
    assert _answer(model, [again]) == [expected[0][4:]]


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_generate_of_an_engine_computes_its_rows_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the loop of the native runtime; a call of the module is still transformers', also between the steps."""
    module = _module(*TOGETHER[name])
    expected = [_expected(module, prompt, 9) for prompt in PROMPTS]
    with torch.inference_mode():
        logits = module(torch.tensor([PROMPTS[0]])).logits
    engine = anyaccel.init_inference(module, dtype="fp32", runtime="torch")
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(each)) + each for each in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in PROMPTS])
    sizes: list[int] = []
    compute = BatchedExecutor.compute

    def counted(self: Any, segments: Any, *others: Any) -> Any:
        sizes.append(len(segments))
        return compute(self, segments, *others)

    def ended(ids: torch.Tensor, _scores: Any) -> torch.Tensor:
        torch.testing.assert_close(engine(torch.tensor([PROMPTS[0]])).logits, logits, atol=1e-4, rtol=1e-4)
        return torch.zeros(len(ids), dtype=torch.bool)

    monkeypatch.setattr(BatchedExecutor, "compute", counted)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 9, "pad_token_id": 0}
    found = engine.generate(ids, do_sample=False, stopping_criteria=[ended], **options)
    assert found[:, longest:].tolist() == expected
    assert sizes[-9:] == [3] * 9
    assert list(generate_tokens(engine, PROMPTS[0], max_new_tokens=9)) == expected[0]
    drawn = [engine.generate(ids, do_sample=True, seed=seed, **options).tolist() for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    sizes.clear()
    beams = engine.generate(ids, do_sample=False, num_beams=2, **options)  # transformers' loop has it
    assert beams.shape == found.shape
    assert not sizes


def test_positions_that_begin_behind_padding_are_noticed() -> None:
    module = _module("RobertaConfig", {"is_decoder": True, "pad_token_id": 1})
    with pytest.raises(ModelError, match="differ from those of the module alone"):
        BatchedExecutor(module, 1 << 24, 0)
    expected = [_expected(module, prompt, 4) for prompt in PROMPTS]
    model = _model(OneByOneExecutor(module, 1 << 24, 0))
    assert _answer(model, [_llm.Request(model, prompt, {"max_new_tokens": 4}) for prompt in PROMPTS]) == expected


def test_masks_of_no_known_pattern_are_computed_as_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of transformers are told apart by what they hold, at every length."""
    from transformers import masking_utils

    from anyaccel.inference.generic.pages import Pattern, pattern_of

    assert pattern_of(masking_utils.causal_mask_function) == Pattern()
    for size in (1, 3, 100, 4096):
        assert pattern_of(masking_utils.sliding_window_causal_mask_function(size)) == Pattern(window=size)
        if size > 1:
            chunks = masking_utils.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))
            assert pattern_of(chunks) == Pattern(chunk=size)
    moved = masking_utils.chunked_causal_mask_function(6, torch.ones(1, dtype=torch.int64))
    for strange in (masking_utils.bidirectional_mask_function, moved, lambda _, __, query, key: key % 2 == query % 2):
        with pytest.raises(ModelError, match="pattern"):
            pattern_of(strange)

    module = _module(*TOGETHER["gemma2"])
    expected = [_expected(module, prompt, 9) for prompt in PROMPTS]
    monkeypatch.setattr("anyaccel.inference.generic.executor.pattern_of", lambda sees: pattern_of(lambda *_: strange))
    executor = BatchedExecutor(module, 1 << 24, 0)
    assert not executor.paged
    model = _model(executor)
    assert _answer(model, [_llm.Request(model, prompt, {"max_new_tokens": 9}) for prompt in PROMPTS]) == expected


def test_a_long_text_and_short_ones_in_parts_have_the_logits_that_they_have_alone() -> None:
    module = _module(*TOGETHER["gemma3"])
    texts = [[5 + 3 * index % 200 for index in range(100)], [40, 41, 42], list(range(20, 50))]
    with torch.inference_mode():
        expected = [module(input_ids=torch.tensor([text])).logits[0] for text in texts]
    executor = BatchedExecutor(module, 1 << 24, 0)
    found: list[list[torch.Tensor]] = [[], [], []]
    for number in range(3):
        executor.change(number, -1, 0)
    for parts in ((70, 1, 17), (28, 1, 11), (1, 1, 1), (1, 0, 1)):
        segments = []
        for number, count in enumerate(parts):
            start = sum(map(len, found[number]))
            if count:
                segments.append((number, start, texts[number][start : start + count], 0))
        logits, _ = executor.compute(segments, range(sum(parts)), False)
        for (number, *_), rows in zip(segments, logits.split([each for each in parts if each]), strict=True):
            found[number].append(rows)
    for rows, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(rows), wanted, atol=1e-3, rtol=1e-3)
    assert executor.used_bytes == 4 * 64 * executor.token_bytes  # pages of 64 tokens


@pytest.mark.parametrize("name", ALONE)
def test_models_with_states_go_one_after_another(name: str) -> None:
    module = _module(*ALONE[name])
    expected = [_expected(module, prompt, 9) for prompt in PROMPTS]
    model = _model(OneByOneExecutor(module, 1 << 24, 0))
    requests = [_llm.Request(model, prompt, {"max_new_tokens": 9}) for prompt in PROMPTS]
    assert _answer(model, requests) == expected
    again = _llm.Request(model, [*PROMPTS[0], *expected[0][:4]], {"max_new_tokens": 5}, requests[0])
    assert _answer(model, [again]) == [expected[0][4:]]


def test_a_model_with_states_is_refused_by_the_one_that_computes_together() -> None:
    module = _module(*ALONE["mamba"])
    usual = module.config._attn_implementation
    with pytest.raises(ModelError, match="states of its own"):
        BatchedExecutor(module, 1 << 24, 0)
    assert module.config._attn_implementation == usual


@pytest.mark.parametrize(("name", "keeps"), [("recurrent_gemma", False), ("mamba", True), ("diffllama", True)])
def test_states_in_the_module_are_noticed(name: str, keeps: bool) -> None:
    assert OneByOneExecutor(_module(*ALONE[name]), 1 << 24, 0).keeps_states is keeps


@pytest.mark.parametrize("name", ALONE)
def test_a_prompt_may_come_in_parts(name: str) -> None:
    module = _module(*ALONE[name])
    with torch.inference_mode():
        expected = module(input_ids=torch.tensor([PROMPTS[0]])).logits[0]
    executor = OneByOneExecutor(module, 1 << 24, 0)
    executor.change(0, -1, 0)
    parts = [
        executor.compute([(0, begin, PROMPTS[0][begin:end], 0)], range(end - begin), False)[0]
        for begin, end in ((0, 3), (3, 7))
    ]
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=1e-4)


def test_positions_that_depend_on_the_length_are_each_sequences_own() -> None:
    """A long text beside a short one does not change the frequencies of the short one's rotary positions."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    module = _module("LlamaConfig", {"rope_parameters": rope, "max_position_embeddings": 16})
    with pytest.raises(ModelError, match="depend on the longest"):
        BatchedExecutor(module, 1 << 24, 0)
    prompts = ([7, 8, 9] * 12, [40, 41], list(range(100, 120)))
    expected = [_expected(module, prompt, 6) for prompt in prompts]
    model = _model(OneByOneExecutor(module, 1 << 24, 0))
    assert _answer(model, [_llm.Request(model, prompt, {"max_new_tokens": 6}) for prompt in prompts]) == expected


def test_two_that_share_a_prefix_do_not_see_each_other(tmp_path: Path) -> None:
    module = _module(*TOGETHER["llama"])
    first, second = [*PROMPTS[0], 20], [*PROMPTS[0], 30]
    expected = [_expected(module, prompt, 6) for prompt in (first, second)]
    model = _model(BatchedExecutor(module, 1 << 24, 0))
    common = _llm.Request(model, PROMPTS[0], {"max_new_tokens": 1})
    _answer(model, [common])
    both = [_llm.Request(model, prompt, {"max_new_tokens": 6}, common) for prompt in (first, second)]
    assert _answer(model, both) == expected


def test_rows_of_another_width_than_the_config_says_are_an_error() -> None:
    module = _module(*TOGETHER["llama"])
    module.config.vocab_size = VOCAB - 44
    spec = DecoderSpec(VOCAB - 44, 32, (), None, max_tokens=128)
    model = _llm.ExternalModel(spec, BatchedExecutor(module, 1 << 24, 0))
    with pytest.raises(ModelError, match="its config says"):
        _answer(model, [_llm.Request(model, PROMPTS[0], {"max_new_tokens": 2, "logprobs": 1})])


def test_clearing_a_sequence_leaves_those_that_share_its_beginning() -> None:
    module = _module(*TOGETHER["llama"])
    executor = BatchedExecutor(module, 1 << 24, 0)
    executor.change(0, -1, 0)
    executor.compute([(0, 0, PROMPTS[0], 0)], [], False)
    executor.change(1, 0, len(PROMPTS[0]))
    expected, _ = executor.compute([(1, len(PROMPTS[0]), [9], 0)], [0], False)
    executor.change(2, 0, len(PROMPTS[0]))
    executor.clear(0)
    found, _ = executor.compute([(2, len(PROMPTS[0]), [9], 0)], [0], False)
    torch.testing.assert_close(found, expected)


def test_a_full_cache_is_an_error() -> None:
    model = _model(BatchedExecutor(_module(*TOGETHER["llama"]), 1 << 10, 0))
    with pytest.raises(ModelError, match="cache"):
        _answer(model, [_llm.Request(model, list(range(100)), {"max_new_tokens": 5})])
