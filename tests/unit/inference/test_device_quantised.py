# SPDX-License-Identifier: Apache-2.0
"""Quantised weights in torch's operators: the values of the checkpoint, and the tokens of the native runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anyaccel
import decoder_reference
import family_cases
import quantised_cases
from anyaccel import _llm
from anyaccel._llm import Request
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.checkpoints.model_path import default_model_file
from anyaccel.inference.device import quantised
from anyaccel.inference.device.executor import device_logits
from anyaccel.inference.device.quantised import Quantised
from anyaccel.inference.device.runtime import load_device
from anyaccel.inference.native.checkpoint import read_checkpoint
from anyaccel.inference.native.formats import Precision
from anyaccel.inference.native.packing import Plan
from anyaccel.inference.native.runtime import load_native
from anyaccel.inference.options import ModelOptions
from anyaccel.inference.spec.decoder import MatrixShape
from anyaccel.inference.spec.packed_formats import QUANTISED
from gguf_cases import random_blocks

_LIMIT = 1 << 26
_TOKENS = [5, 17, 40, 3, 21, 8, 33]
_CPU = torch.device("cpu")


def _device(source: Any, dtype: str, arithmetic: str = "fp32", **more: Any) -> Any:
    return load_device(source, ModelOptions(dtype, kv_cache=arithmetic, cache_bytes=_LIMIT, **more)).model


def _logits(model: Any, tokens: list[int] = _TOKENS) -> torch.Tensor:
    """Of a prompt and of two tokens behind it, one at a time."""
    sequence = model.create()
    count = len(tokens) - 2
    rows = [device_logits(model, [sequence], [count], tokens[:count], list(range(count)))]
    rows += [device_logits(model, [sequence], [1], [token], [0]) for token in tokens[count:]]
    return torch.cat(rows).float()


def _answers(model: Any, prompts: list[list[int]], most: int = 16) -> list[list[int]]:
    requests = [Request(model, prompt, {"max_new_tokens": most}) for prompt in prompts]
    while not all(request.finished for request in requests):
        model.step([request for request in requests if not request.finished])
    return [request.tokens for request in requests]


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def _forms(model: Any) -> set[tuple[str, int, bool]]:
    of_layer = model.executor.decoder.layers[0]
    weights = [
        each.weight for each in (of_layer.mixer.qkv, of_layer.mixer.out, of_layer.mlp.gate_up, of_layer.mlp.down)
    ]
    return {each.form if isinstance(each, Quantised) else (str(each.dtype), 0, False) for each in weights}


@pytest.mark.parametrize("name", quantised_cases.CASES)
def test_checkpoints_are_kept_as_they_are_and_computed_exactly(name: str, tmp_path: Path) -> None:
    """In float32 to its rounding, in bfloat16 within 3 %: scales are rounded to that by torch's operators."""
    quantised_cases.make(name, tmp_path)
    form = quantised_cases.CASES[name][-1]
    exact = _logits(_device(tmp_path, "fp32"))
    kept = _device(tmp_path, *(("bf16", "auto") if form[0] == "bf16" else ("auto", "fp32")))
    if form[0] == "bf16":  # groups that no format has
        assert _forms(kept) == {("torch.bfloat16", 0, False)}
        assert _difference(_logits(kept), exact) < 0.03
        return
    of_device = form if form[0] in ("i4", "i8") else ("i8", *form[1:])  # which has no other whole numbers
    assert _forms(kept) == {of_device}
    assert _difference(_logits(kept), exact) < 1e-5
    assert _difference(_logits(_device(tmp_path, "auto", "bf16")), exact) < 0.03


def _rounded(shape: MatrixShape, values: torch.Tensor) -> torch.Tensor:
    """Rows as native packing rounds them, or as they are."""
    if shape.format not in QUANTISED:
        return values
    groups = -(-shape.cols // shape.group) if shape.group else 1
    q = np.empty((shape.rows, shape.cols), np.int8 if shape.format == "i8" else np.uint8)
    scales, minima = np.empty((shape.rows, groups), np.float32), np.zeros((shape.rows, groups), np.float32)
    _llm.quantise(
        values.data_ptr(), "f32", 4 * shape.cols, shape.rows, shape.cols, shape.format, shape.group, shape.minimum,
        q.ctypes.data, scales.ctypes.data, minima.ctypes.data if shape.minimum else 0,
    )  # fmt: skip
    if shape.format == "i4" and not shape.minimum:
        minima = -8 * scales
    wide, least = (np.repeat(each, shape.group or shape.cols, 1)[:, : shape.cols] for each in (scales, minima))
    return torch.from_numpy(q * wide + least)


@pytest.mark.parametrize(("dtype", "group"), [("int8", 32), ("int4", 32), ("int4", 64)])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "gpt2", "mixtral", "gpt_oss", "deepseek_v3", "gemma2"])
def test_floats_are_rounded_as_natively(name: str, dtype: str, group: int, tmp_path: Path) -> None:
    """Matrices of which pairs turn, biases, experts, latents: each with the whole numbers that native has."""
    model = family_cases.build(name)
    model.save_pretrained(tmp_path)
    plan = Plan(read_checkpoint(tmp_path), Precision(dtype, group), 0, 1)
    weights = decoder_reference.assemble(plan.family, plan.whole, model.state_dict())
    weights |= {shape.name: _rounded(shape, weights[shape.name].contiguous()) for shape in plan.matrices}
    reference = decoder_reference.Reference(plan.whole, weights)
    expected = reference.step(reference.start(), _TOKENS)
    own = _device(tmp_path, dtype, group_size=group)
    assert _difference(_logits(own), expected) < 1e-4
    assert own.weight_bytes < 0.6 * _device(tmp_path, "fp32").weight_bytes


@pytest.mark.parametrize("dtype", ["auto", "int8", "int4"])
@pytest.mark.slow  # random models do the same above
def test_a_real_model_answers_as_natively(dtype: str) -> None:
    """SmolLM2-135M in Q4_1, kept, or brought to another precision."""
    own = _device(default_model_file(), dtype)
    options = ModelOptions(dtype, kv_cache="fp32", cache_bytes=_LIMIT, threads=1)
    native = load_native(default_model_file(), options)
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    assert _answers(own, [prompt], 12) == _answers(native.model, [prompt], 12)
    if dtype == "auto":
        assert _forms(own) == {("i4", 32, True)}
        assert own.weight_bytes < 1.3 * native.model.weight_bytes


_TYPES = {  # of ggml -> what it runs as
    "Q4_0": ("i4", 32, False),
    "Q4_1": ("i4", 32, True),
    "Q8_0": ("i8", 32, False),
    "Q4_K": ("i4", 32, True),
    "Q6_K": ("i8", 16, False),
    "Q5_K": ("i8", 32, True),
    "Q2_K": ("i8", 16, True),
    "IQ4_NL": ("i8", 32, False),
}


@pytest.mark.parametrize("kind", _TYPES)
def test_types_of_gguf_files(kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    hidden, features, vocabulary = 256, 512, 48
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "context_length": 64, "embedding_length": hidden, "block_count": 1, "feed_forward_length": features,
        "attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": vocabulary,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    rng = np.random.default_rng(2)
    writer.add_tensor("token_embd.weight", rng.standard_normal((vocabulary, hidden)).astype(np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    sizes = {
        "attn_q": (hidden, hidden), "attn_k": (hidden // 2, hidden), "attn_v": (hidden // 2, hidden),
        "attn_output": (hidden, hidden), "ffn_gate": (features, hidden), "ffn_up": (features, hidden),
        "ffn_down": (hidden, features),
    }  # fmt: skip
    for seed, (name, (rows, cols)) in enumerate(sizes.items()):
        data = random_blocks(kind, rows, cols, seed)
        writer.add_tensor(f"blk.0.{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    exact = _logits(_device(path, "fp32"))
    kept = _device(path, "auto")
    assert _forms(kept) == {_TYPES[kind]}
    assert _difference(_logits(kept), exact) < 2e-3  # scales of two levels are one half: docs/inference.md


@pytest.mark.parametrize("kind", ["i8", "i4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "cols"), [(48, 64), (47, 96), (32, 80), (5, 33)])
@pytest.mark.parametrize("group", [0, 32])
def test_a_product_is_that_of_the_dequantised_matrix(
    kind: str, dtype: torch.dtype, rows: int, cols: int, group: int
) -> None:
    """Whatever its size: where the operator does not take it, it is dequantised."""
    if kind == "i4" and not group:
        pytest.skip("four bits have groups")
    generator = torch.Generator().manual_seed(rows)
    groups = -(-cols // group) if group else 1
    low, high = (-128, 128) if kind == "i8" else (0, 16)
    q = torch.randint(low, high, (rows, cols), generator=generator).to(torch.int8 if kind == "i8" else torch.uint8)
    scales = (torch.rand(rows, groups, generator=generator) * 0.01).half().float()
    for minima in (None, torch.randn(rows, groups, generator=generator).half().float()):
        matrix = Quantised((rows, cols), kind, group, minima is not None, dtype, _CPU, gathered=True)
        for to, values in matrix.parts(q, scales, minima):
            to.copy_(values)
        matrix.choose_product({})
        least = torch.zeros_like(scales) if minima is None else minima
        if minima is None and kind == "i4":
            least = -8 * scales
        wide, low_ = (each.repeat_interleave(group or cols, 1)[:, :cols] for each in (scales, least))
        exact = q * wide + low_
        x = torch.randn(9, cols, generator=generator).to(dtype)
        expected = x.float() @ exact.T
        assert float((matrix(x).float() - expected).norm() / expected.norm()) < quantised._BOUNDS[dtype]
        numbers = torch.tensor([3, 0, 3])
        torch.testing.assert_close(matrix.of_rows(numbers).float(), exact[numbers].to(dtype).float(), rtol=0.01, atol=0)


def test_an_operator_that_is_wrong_or_missing_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-128, 128, (64, 64), generator=generator).to(torch.int8)

    def made() -> Quantised:
        matrix = Quantised((64, 64), "i8", 0, False, torch.float32, _CPU)
        for to, values in matrix.parts(q, torch.rand(64, 1, generator=generator), None):
            to.copy_(values)
        return matrix

    calls = []

    def wrong(m: Quantised) -> quantised.Product:
        calls.append(m)
        return lambda x: x @ (m.dequantised() * 1.01).T

    def missing(m: Quantised) -> quantised.Product:
        raise NotImplementedError("aten::_weight_int8pack_mm is not there")

    def right(m: Quantised) -> quantised.Product:
        return lambda x: x @ m.dequantised().T

    monkeypatch.setattr(quantised, "_MAKERS", (missing, wrong))
    tried: dict[object, Any] = {}
    for matrix in (made(), made()):
        matrix.choose_product(tried)
        assert matrix._product is None
    assert len(calls) == 1  # once for a size
    monkeypatch.setattr(quantised, "_MAKERS", (missing, wrong, right))
    matrix = made()
    matrix.choose_product({})
    assert matrix._product is not None


def test_without_operators_all_is_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised_cases.make("awq", tmp_path)
    by_operators = _logits(_device(tmp_path, "auto"))
    monkeypatch.setattr(quantised, "_MAKERS", ())
    assert _difference(_logits(_device(tmp_path, "auto")), by_operators) < 1e-5


def test_an_engine_has_them(tmp_path: Path) -> None:
    family_cases.build("llama").save_pretrained(tmp_path)
    engine = anyaccel.init_inference(tmp_path, dtype="int8", runtime="device")
    exact = anyaccel.init_inference(tmp_path, dtype="fp32", runtime="device")
    assert (engine.runtime, engine.why) == ("device", "")
    ids = torch.tensor([_TOKENS])
    assert _difference(engine(ids).logits, exact(ids).logits) < 0.05
    assert engine.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None).shape == (1, len(_TOKENS) + 4)
    with pytest.raises(UsageError, match="kv_cache='int8': runtime='device' has bf16, fp32 here"):
        anyaccel.init_inference(tmp_path, dtype="int4", kv_cache="int8", runtime="device")


def test_values_that_are_no_numbers_are_said(tmp_path: Path) -> None:
    model = family_cases.build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"up_proj.*NaN or infinite"):
        _device(tmp_path, "int8")


def test_no_more_than_a_few_rows_of_the_file_are_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes from the plan is a part of a matrix; it goes to the device at once."""
    from anyaccel.inference.device.weights import DeviceWeights

    monkeypatch.setattr("anyaccel.inference.native.packing._CHUNK_BYTES", 1 << 12)
    quantised_cases.make("awq", tmp_path)
    seen = []
    write = DeviceWeights._write_quantised

    def noted(self: DeviceWeights, name: str, first: int, q: torch.Tensor, *more: Any) -> None:
        seen.append(q.numel())
        write(self, name, first, q, *more)

    monkeypatch.setattr(DeviceWeights, "_write_quantised", noted)
    _device(tmp_path, "auto")
    assert len(seen) > 8 and max(seen) <= 1 << 12
