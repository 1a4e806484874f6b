# SPDX-License-Identifier: Apache-2.0
"""Every family of the native runtime computes what transformers computes, in every variant of its config."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import anyaccel
import decoder_reference
import family_cases
from anyaccel._llm import Request
from anyaccel.errors import ModelError
from anyaccel.inference.device import rotary
from anyaccel.inference.families.registry import FAMILIES, family_of
from anyaccel.inference.options import ModelOptions
from anyaccel.inference.spec.decoder import DecoderSpec
from anyaccel.inference.spec.mapping import Unsupported

pytest.importorskip("transformers")

_TOLERANCE = 1e-4  # relative to the largest logit
_PROMPTS = (1, 7, 14)  # shortest first: transformers' dynamic rotary positions remember the longest
_STEPS = 2
# A case of each family; its variants take longer.
_FAMILIES = [pytest.param(name, marks=[pytest.mark.slow] if "-" in name else []) for name in family_cases.CASES]
_ON_DEVICE = _FAMILIES


@dataclasses.dataclass(frozen=True)
class Case:
    model: Any
    config: dict[str, Any]
    spec: DecoderSpec
    weights: dict[str, torch.Tensor]
    tokens: list[list[int]]  # each prompt and what follows it
    logits: list[torch.Tensor]  # of all of them


def _start(model: Any) -> dict[str, Any]:
    """What a first step gets: RecurrentGemma has its states in its modules, and gives back no cache that it makes."""
    if model.config.model_type != "recurrent_gemma":
        return {}
    from transformers import DynamicCache

    model._setup_cache(model.config, 1, "cpu", torch.float32)
    return {"past_key_values": DynamicCache(config=model.config)}


def _past(model: Any, output: Any, length: int) -> dict[str, Any]:
    """What the next step gets of this one; Mamba's models have a name of their own for it, and some count from 0."""
    past = {name: output[name] for name in ("past_key_values", "cache_params") if name in output}
    counts = model.config.model_type in ("bamba", "recurrent_gemma")
    return past | ({"position_ids": torch.tensor([[length]])} if counts else {})


@functools.cache
def _case(name: str) -> Case:
    """The model and what transformers computes: the prompt at once, then token by token."""
    model = family_cases.build(name)
    config = model.config.to_dict()
    family = family_of(config)
    spec = family.spec(config)
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, spec.vocab, (count + _STEPS,), generator=generator).tolist() for count in _PROMPTS]
    logits = []
    with torch.inference_mode():
        for count, ids in zip(_PROMPTS, tokens, strict=True):
            start = _start(model)
            output = model(torch.tensor([ids[:count]]), use_cache=True, **start)
            rows = [output.logits[0]]
            for length, token in enumerate(ids[count:], count):
                output = model(torch.tensor([[token]]), use_cache=True, **start | _past(model, output, length))
                rows.append(output.logits[0])
            logits.append(torch.cat(rows))
    return Case(model, config, spec, decoder_reference.assemble(family, spec, model.state_dict()), tokens, logits)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    difference = float((actual - expected).abs().max() / expected.abs().max())
    assert difference <= _TOLERANCE


@pytest.mark.parametrize("name", family_cases.CASES)
def test_the_spec_means_what_transformers_computes(name: str) -> None:
    case = _case(name)
    reference = decoder_reference.Reference(case.spec, case.weights)
    for count, ids, expected in zip(_PROMPTS, case.tokens, case.logits, strict=True):
        sequence = reference.start()
        rows = [reference.step(sequence, ids[:count])]
        rows += [reference.step(sequence, [token]) for token in ids[count:]]
        _assert_close(torch.cat(rows), expected)


def _native(source: Any, config: Any = None, rank: int = 0, **more: Any) -> Any:
    """A float32 model of the native runtime."""
    pytest.importorskip("anyaccel._llm")
    from anyaccel.inference.native.runtime import RankPlace, load_native

    options = ModelOptions("fp32", cache_bytes=1 << 26, **more)
    return load_native(copy.deepcopy(source), options, RankPlace(rank), config=config).model


def _on_device(source: Any, config: Any = None) -> Any:
    """A float32 model of inference/device, on the CPU."""
    from anyaccel.inference.device.runtime import load_device

    options = ModelOptions("fp32", cache_bytes=1 << 26)
    return load_device(copy.deepcopy(source), options, config=config).model


def _run(model: Any, vocab: int, tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits of all tokens: the prompts of all sequences in one call, then a token of each at a time."""
    prompts = (_PROMPTS * len(tokens))[: len(tokens)]
    sequences = [model.create() for _ in tokens]
    logits: list[list[torch.Tensor]] = [[] for _ in tokens]

    def forward(news: list[Sequence[int]]) -> None:
        counts = [len(new) for new in news]
        flat = torch.tensor([token for new in news for token in new], dtype=torch.int64)
        out = torch.full((len(flat), vocab), float("nan"))
        model.forward(sequences, counts, flat.data_ptr(), out.data_ptr(), list(range(len(flat))))
        for rows, part in zip(logits, out.split(counts), strict=True):
            rows.append(part)

    forward([ids[:count] for count, ids in zip(prompts, tokens, strict=True)])
    for step in range(_STEPS):
        forward([ids[count + step :][:1] for count, ids in zip(prompts, tokens, strict=True)])
    for sequence, ids in zip(sequences, tokens, strict=True):
        assert model.length(sequence) == len(ids)
        model.destroy(sequence)
    return [torch.cat(rows) for rows in logits]


@pytest.mark.parametrize("name", family_cases.CASES)
def test_the_native_runtime_computes_what_transformers_computes(name: str) -> None:
    case = _case(name)
    logits = _run(_native(case.model, threads=2), case.spec.vocab, case.tokens)
    for actual, expected in zip(logits, case.logits, strict=True):
        _assert_close(actual, expected)


def _in_8_bits(x_THD: torch.Tensor) -> torch.Tensor:
    largest = x_THD.abs().amax(-1, keepdim=True)
    return torch.round(x_THD * (127 / largest)) * (largest / 127)


def _in_4_bits(x_THD: torch.Tensor) -> torch.Tensor:
    """Of heads of up to 32 values, which are one group and not rotated."""
    assert x_THD.shape[-1] < 32
    low, high = x_THD.amin(-1, keepdim=True), x_THD.amax(-1, keepdim=True)
    scale, least = ((high - low) * (1 / 15)).half().float(), low.half().float()
    return least + scale * torch.floor((x_THD - least) * (1 / scale) + 0.5).clamp(0, 15)


@pytest.mark.parametrize(("dtype", "keep"), [("int8", _in_8_bits), ("int4", _in_4_bits)])
@pytest.mark.parametrize("name", ["llama-mqa-biases", "mistral", "gemma2-softcaps", "bloom", "gpt_oss", "deepseek_v2"])
def test_a_cache_of_few_bits_rounds_keys_and_values(name: str, dtype: str, keep: Any) -> None:
    case = _case(name)
    reference = decoder_reference.Reference(case.spec, case.weights, keep=keep)
    found = _run(_native(case.model, threads=2, kv_cache=dtype), case.spec.vocab, case.tokens)
    differences, rounding = [], []
    for count, ids, actual, exact in zip(_PROMPTS, case.tokens, found, case.logits, strict=True):
        sequence = reference.start()
        rows = [reference.step(sequence, ids[:count])]
        rows += [reference.step(sequence, [token]) for token in ids[count:]]
        differences.append((actual - torch.cat(rows)).abs().amax(-1) / exact.abs().max())
        rounding.append((actual - exact).abs().amax(-1) / exact.abs().max())
    # A value halfway between two steps may be rounded to either: that changes what comes after it, and is rare. With
    # four bits, queries and weights are rounded to eight.
    difference, whole = float(torch.cat(differences).median()), float(torch.cat(rounding).median())
    assert difference <= (_TOLERANCE if dtype == "int8" else 0.4 * whole) and whole > _TOLERANCE


@pytest.mark.parametrize("name", _ON_DEVICE)
def test_the_device_runtime_computes_what_transformers_computes(name: str) -> None:
    """The other executor of the same spec and weights: eight sequences at once, and one alone."""
    case = _case(name)
    model = _on_device(case.model, config=case.config)
    for tokens in ((case.tokens * 3)[:8], case.tokens[:1]):
        for actual, expected in zip(_run(model, case.spec.vocab, tokens), case.logits * 3, strict=False):
            _assert_close(actual, expected)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "cohere", "qwen3", "olmo2", "deepseek_v3", "phi3-longrope"])
def test_positions_without_complex_numbers_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with 16 bits, and on devices that have no complex numbers."""
    from anyaccel.inference.device import decoder

    case = _case(name)
    assert rotary.has_complex(case.spec, torch.float32, torch.device("cpu"))
    assert not rotary.has_complex(case.spec, torch.bfloat16, torch.device("cpu"))
    monkeypatch.setattr(decoder, "has_complex", lambda *_: False)
    model = _on_device(case.model, config=case.config)
    for actual, expected in zip(_run(model, case.spec.vocab, case.tokens), case.logits, strict=True):
        _assert_close(actual, expected)


@pytest.mark.parametrize("name", _ON_DEVICE)
def test_both_executors_give_the_same_tokens(name: str) -> None:
    case = _case(name)
    answers = []
    for model in (_native(case.model, config=case.config, threads=1), _on_device(case.model, config=case.config)):
        most = 32 if not 0 < case.spec.max_tokens < 46 else case.spec.max_tokens - 14
        requests = [Request(model, prompt, {"max_new_tokens": most}) for prompt in case.tokens[1:]]
        while not all(request.finished for request in requests):
            model.step(requests)
        answers.append([request.tokens for request in requests])
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", family_cases.CASES)
def test_long_prompts_of_a_padded_batch(name: str) -> None:
    """Several pages of the cache, products of many tokens, and rows that begin later."""
    model, steps = family_cases.build(name, positions=512), 3
    native = family_of(model.config.to_dict()).spec(model.config.to_dict())
    lengths = (200, 131, 64) if native.max_tokens >= 256 or not native.max_tokens else (28, 17, 9)
    engine = anyaccel.init_inference(copy.deepcopy(model), dtype="fp32", threads=2, runtime="native")
    width = max(lengths)
    ids_BT = torch.randint(3, 131, (len(lengths), width + steps), generator=torch.Generator().manual_seed(3))
    mask_BT = torch.ones_like(ids_BT)
    for row, length in enumerate(lengths):
        mask_BT[row, : width - length] = 0
    with torch.inference_mode():
        output = engine(ids_BT[:, :width], attention_mask=mask_BT[:, :width], use_cache=True)
        parts = [output.logits]
        for end in range(width + 1, width + steps + 1):
            past = output.past_key_values
            output = engine(ids_BT[:, end - 1 : end], attention_mask=mask_BT[:, :end], past_key_values=past)
            parts.append(output.logits)
        logits_BTV = torch.cat(parts, 1)
        for row, length in reversed(list(enumerate(lengths))):  # shortest first, as above
            tokens = ids_BT[row : row + 1, width - length :]
            if name in family_cases.RECURRENT:
                # All at once: transformers limits Mamba-2's steps (Nemotron-H: to at least 0.001) in prompts only.
                _assert_close(logits_BTV[row, width - length :], model(tokens).logits[0])
                continue
            plain = model(tokens[:, :length], use_cache=True)
            rows = [plain.logits[0]]
            for step in range(length, length + steps):
                plain = model(tokens[:, step : step + 1], **_past(model, plain, step))
                rows.append(plain.logits[0])
            _assert_close(logits_BTV[row, width - length :], torch.cat(rows))


def _run_ranks(case: Case, size: int, threads: int = 1) -> list[list[torch.Tensor]]:
    """What each of `size` ranks computes; the ranks are threads of this process."""
    models = [_native(case.model, rank=rank, tp=size, threads=threads) for rank in range(size)]
    names = [model.create_segment(20.0) for model in models]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda model: model.connect(names, [os.getpid()] * size), models))
        for model in models:
            model.unlink()
        return list(pool.map(lambda model: _run(model, case.spec.vocab, case.tokens), models))


# Norms before the sum and after it, attention beside the MLP.
_MORE_RANKS = (("llama", 3), ("gemma2", 3), ("cohere", 4))


def _sizes() -> Iterator[Any]:
    """Two ranks for a case of each family; the rest takes longer."""
    for name in family_cases.CASES:
        yield pytest.param(name, 2, marks=[pytest.mark.slow] if "-" in name else [])
        for size in (3, 4):  # from three on, ranks divide the rows of prompts among them
            yield pytest.param(name, size, marks=[] if (name, size) in _MORE_RANKS else [pytest.mark.slow])


@pytest.mark.parametrize(("name", "size"), list(_sizes()))
def test_ranks_compute_what_transformers_computes(name: str, size: int) -> None:
    """6 heads with 2 KV heads: 4 ranks have 2 or 1 of the query heads, and pairs of them the same KV head."""
    case = _case(name)
    for logits in _run_ranks(case, size):
        for actual, expected in zip(logits, case.logits, strict=True):
            _assert_close(actual, expected)


@pytest.mark.parametrize("name", ["gemma2", "gemma3n_text"])
def test_the_rows_that_ranks_divide_are_others_than_those_of_their_threads(name: str) -> None:
    case = _case(name)
    for _ in range(3):  # threads are not always in each other's way
        for logits in _run_ranks(case, 3, threads=2):
            for actual, expected in zip(logits, case.logits, strict=True):
                _assert_close(actual, expected)


@pytest.mark.parametrize("name", _FAMILIES)
def test_a_saved_model_maps(name: str, tmp_path: Path) -> None:
    """config.json and the names of a checkpoint differ from those of the model in memory."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    case = _case(name)
    case.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    family = family_of(config)
    spec = family.spec(config)
    assert spec == case.spec
    found = decoder_reference.assemble(family, spec, load_file(tmp_path / "model.safetensors"))
    assert found.keys() == case.weights.keys()
    assert all(torch.equal(found[key], case.weights[key]) for key in found)
    model = _native(tmp_path, threads=1)
    _assert_close(_run(model, spec.vocab, case.tokens)[-1], case.logits[-1])


def test_a_tied_pair_is_found_under_either_name() -> None:
    case = _case("llama-mha-tied")
    family = family_of(case.config)
    tensors = {name: value for name, value in case.model.state_dict().items() if name != "model.embed_tokens.weight"}
    found = decoder_reference.assemble(family, case.spec, tensors)
    assert torch.equal(found["embed"], case.weights["embed"])


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn", "longrope", "proportional"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rotary_frequencies_are_those_of_transformers(kind: str, head_dim: int) -> None:
    """To the rounding of float32: a long context multiplies the difference."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    half = head_dim // 2
    parameters = {
        "default": {},
        "linear": {"factor": 8.0},
        "llama3": {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0},
        "longrope": {"short_factor": [1 + i / 100 for i in range(half)], "long_factor": [1.0 + i for i in range(half)]},
        "proportional": {"factor": 2.0, "partial_rotary_factor": 0.25},
    }[kind] | {"rope_type": kind, "rope_theta": 5e5}
    if kind in ("llama3", "yarn", "longrope"):
        parameters["original_max_position_embeddings"] = 8192
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=32768,
        rope_parameters=parameters,
    )
    expected = LlamaRotaryEmbedding(config)
    rope = FAMILIES["llama"].spec(config.to_dict()).ropes[0]
    assert rope.scale == pytest.approx(expected.attention_scaling, rel=1e-12)
    torch.testing.assert_close(torch.tensor(rope.inv_freq), expected.inv_freq, rtol=2e-6, atol=0.0)


def _config_class(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_config_lacks_is_what_transformers_takes(model_type: str) -> None:
    least: dict[str, Any] = {
        "deepseek_v2": {"num_experts_per_tok": 6},
        "dots1": {"num_experts_per_tok": 6, "n_routed_experts": 128, "n_shared_experts": 2},
    }.get(model_type, {})  # what has no default
    config = _config_class(model_type)(**least).to_dict()
    minimal = {"model_type": model_type, **least} | ({"text_config": {}} if FAMILIES[model_type].text else {})
    assert FAMILIES[model_type].spec(minimal) == FAMILIES[model_type].spec(config)


def test_every_family_has_a_case() -> None:
    tested = {_config_class_name(name) for name in family_cases.CASES}
    assert tested | {name for name, family in FAMILIES.items() if family.text} == FAMILIES.keys()


def _config_class_name(case: str) -> str:
    import transformers

    return str(getattr(transformers, family_cases.CASES[case][0]).model_type)


def test_a_model_of_several_modalities_maps_its_text_part() -> None:
    import transformers

    text = family_cases.CASES["gemma3"][1]
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**text),
        vision_config=vision | {"image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=1,
    )
    with torch.no_grad():
        model = transformers.Gemma3ForConditionalGeneration(config).eval()
        values = config.to_dict()
        family = family_of(values)
        spec = family.spec(values)
        found = decoder_reference.assemble(family, spec, model.state_dict())
        reference = decoder_reference.Reference(spec, found)
        _assert_close(reference.step(reference.start(), [5, 9, 70]), model(torch.tensor([[5, 9, 70]])).logits[0])


def test_whole_checkpoints_of_gemma_3n_map() -> None:
    """As Google publishes them: the language model is a part of one that sees and hears, with an older config."""
    case = _case("gemma3n_text")
    family = FAMILIES["gemma3n"]
    text = {key: value for key, value in case.config.items() if key != "rope_parameters"}
    text |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None, "query_pre_attn_scalar": 256}
    spec = family.spec({"model_type": "gemma3n", "text_config": text, "audio_config": {}, "vision_config": {}})
    assert spec == case.spec
    tensors = {
        name.replace("model.", "model.language_model.", 1): value
        for name, value in case.model.state_dict().items()
        if name != "lm_head.weight"
    }
    found = decoder_reference.assemble(family, spec, tensors)
    assert found.keys() == case.weights.keys()
    assert all(torch.equal(found[key], case.weights[key]) for key in found)


_LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "old",
    [
        {},
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 5e4},
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        },
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"num_key_value_heads": None, "head_dim": None},
    ],
)
def test_an_older_config_means_the_same(old: dict[str, Any]) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig.from_dict(dict(_LLAMA) | json.loads(json.dumps(old)))
    assert FAMILIES["llama"].spec(_LLAMA | old) == FAMILIES["llama"].spec(config.to_dict())


@pytest.mark.parametrize(
    ("model_type", "old"),
    [
        ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 5000}),
        ("gpt_neox", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rotary_pct": 1.0}),
        ("gpt2", {"hidden_size": 96, "num_attention_heads": 6, "max_position_embeddings": 77}),
        ("bloom", {"n_embed": 96, "num_attention_heads": 6}),
        ("falcon", {"n_embed": 142, "num_kv_heads": 1}),
        ("stablelm", {"partial_rotary_factor": 0.5, "rope_theta": 5000}),
        ("phi", {"partial_rotary_factor": 0.4}),
        (
            "phi3",
            {
                "rope_scaling": {
                    "type": "su",
                    "short_factor": [1.0] * 48,
                    "long_factor": [2.0] * 48,
                    "original_max_position_embeddings": 4096,
                },
                "max_position_embeddings": 131072,
            },
        ),
        (
            "phi3",
            {
                "partial_rotary_factor": 0.75,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 36, "long_factor": [2.0] * 36},
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 2048,
            },
        ),
        ("gemma3_text", {"rope_theta": 5e5, "rope_local_base_freq": 5e3, "sliding_window_pattern": 3}),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("olmo3", {"rope_theta": 4e5, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}}),
        ("cohere2", {"sliding_window_pattern": 2}),
        ("gpt_oss", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}, "rope_theta": 1e5}),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}}),
        ("mixtral", {"rope_theta": 5e5, "num_experts": 4}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 5}),
    ],
)
def test_an_older_config_of_another_family_means_the_same(model_type: str, old: dict[str, Any]) -> None:
    config = _config_class(model_type).from_dict(json.loads(json.dumps(old)))
    family = FAMILIES[model_type]
    assert family.spec({"model_type": model_type} | old) == family.spec(config.to_dict())


@pytest.mark.parametrize(
    ("change", "feature"),
    [
        ({"model_type": "rwkv"}, "model_type 'rwkv'"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "tanh"}, "hidden_act 'tanh'"),
        ({"rope_scaling": {"type": "axial"}}, "rope_type 'axial'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "quanto"}}, "quantization 'quanto'"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization 'aqlm'"),
        ({"per_layer_config": {"0": {"hidden_size": 4}}}, "per_layer_config"),
        ({"model_type": "ministral", "layer_types": ["linear_attention"] * 2}, "layer type 'linear_attention'"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "opt", "do_layer_norm_before": False}, "do_layer_norm_before"),
        ({"model_type": "opt", "word_embed_proj_dim": 32}, "word_embed_proj_dim"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention"),
        ({"model_type": "mpt", "attn_config": {"alibi": False}}, "alibi"),
        ({"model_type": "mpt", "attn_config": {"qk_ln": True}}, "qk_ln"),
        ({"model_type": "mpt", "logit_scale": "inv_sqrt_d_model"}, "logit_scale"),
        ({"model_type": "olmoe", "clip_qkv": 1.0}, "clip_qkv"),
        ({"model_type": "gpt_oss", "swiglu_limit": 5.0}, "swiglu_limit"),
        ({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "topk_method": "noaux_tc"}, "topk_method"),
        ({"model_type": "falcon", "new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        ({"model_type": "ernie4_5_moe", "moe_norm_min": 0.5}, "moe_norm_min"),
        ({"model_type": "glm4_moe_lite", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "solar_open", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {
                "model_type": "mellum",
                "num_experts_per_tok": 2,
                "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}},
            },
            "partial_rotary_factor",
        ),
        ({"model_type": "phimoe", "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        (
            {"model_type": "llama4_text", "layer_types": ["chunked_attention"] * 2, "attention_chunk_size": None},
            "attention_chunk_size",
        ),
        ({"model_type": "mistral4", "rope_parameters": {"partial_rotary_factor": 0.3}}, "partial_rotary_factor"),
        ({"model_type": "nanochat", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
    ],
)
def test_a_feature_that_the_runtime_lacks_is_named(change: dict[str, Any], feature: str) -> None:
    config = _LLAMA | change
    with pytest.raises(Unsupported, match="the native runtime has no") as error:
        family_of(config).spec(config)
    assert feature in error.value.feature


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_damaged_config_is_told(model_type: str) -> None:
    """Whatever a value is, the result is a spec or an error that names it, at once."""
    family = FAMILIES[model_type]
    damaged = (None, "x", -1, 0, 0.5, 10**30, float("nan"), float("inf"), True, [], ["x"], {}, {"rope_type": "yarn"})
    least = {"num_experts_per_tok": 2} | {family.aliases.get("num_hidden_layers", "num_hidden_layers"): 2}
    for name in {*family.defaults, "rope_scaling", "head_dim", "layer_types", "quantization_config", "n_group"}:
        for value in damaged:
            values = least | {name: value}
            with contextlib.suppress(ModelError):
                spec = family.spec({"model_type": model_type} | ({family.text: values} if family.text else values))
                assert len(spec.layers) <= 512


def test_families_are_read_without_torch() -> None:
    code = (
        "import sys; from anyaccel.inference.families.registry import FAMILIES; "
        "FAMILIES['llama'].spec({'model_type': 'llama'}); "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
