# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of float8 weights give what torch and transformers make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.quantised_layout import float8_values
from anyaccel.inference.native.checkpoint import read_checkpoint
from anyaccel.inference.native.formats import Precision
from anyaccel.inference.native.packing import Plan
from recorded_model import RecordedModel

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 200,  # no multiple of the blocks
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 48,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
LINEARS = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (200, 128),
    "mlp.up_proj": (200, 128),
    "mlp.down_proj": (128, 200),
}
FINE = {"quant_method": "fp8", "weight_block_size": [64, 32], "activation_scheme": "dynamic"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
# Settings, name of the scales, shape of those of a matrix.
CASES: dict[str, tuple[dict[str, Any], str, Any]] = {
    "blocks": (FINE, "weight_scale_inv", lambda rows, cols: (-(-rows // 64), -(-cols // 32))),
    "rows": (COMPRESSED, "weight_scale", lambda rows, cols: (rows, 1)),
    "whole": (COMPRESSED, "weight_scale", lambda rows, cols: (1,)),
    "one number": (COMPRESSED, "weight_scale", lambda rows, cols: ()),
    "even blocks": (COMPRESSED, "weight_scale", lambda rows, cols: (rows // 4, cols // 8)),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, "weight_scale", lambda rows, cols: (rows, 1)),
}


def write(folder: Path, quantization: dict[str, Any], tensors: dict[str, Any]) -> None:
    plain = {
        "model.embed_tokens.weight": torch.randn(48, 128, generator=torch.Generator().manual_seed(1)),
        "model.norm.weight": torch.ones(128),
        "model.layers.0.input_layernorm.weight": torch.ones(128),
        "model.layers.0.post_attention_layernorm.weight": torch.ones(128),
    }
    save_file(plain | tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))


def packed(folder: Path, rank: int = 0, size: int = 1) -> tuple[Plan, RecordedModel]:
    plan = Plan(read_checkpoint(folder), Precision(None), rank, size)
    model = RecordedModel(plan.shapes())
    plan.fill(model, lambda done, total: None)  # type: ignore[arg-type]
    model.check_full()
    return plan, model


def test_bytes_stand_for_what_torch_says() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(torch.from_numpy(float8_values()).nan_to_num(1e9), every.nan_to_num(1e9))


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_torch(name: str, tmp_path: Path) -> None:
    settings, scale_name, shape_of = CASES[name]
    generator = torch.Generator().manual_seed(0)
    tensors, wanted = {}, {}
    for module, (rows, cols) in LINEARS.items():
        weight = (torch.randn(rows, cols, generator=generator) * 100).to(torch.float8_e4m3fn)
        scales = torch.rand(shape_of(rows, cols), generator=generator) * 0.01
        tensors |= {f"model.layers.0.{module}.weight": weight, f"model.layers.0.{module}.{scale_name}": scales}
        grid = scales if scales.dim() == 2 else scales.reshape(1, 1)
        block = settings.get("weight_block_size") or (rows // grid.shape[0], cols // grid.shape[1])
        every = grid.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        wanted[module] = weight.float() * every[:rows, :cols]
    write(tmp_path, settings, tensors)
    plan, model = packed(tmp_path)
    assert {m.format for m in plan.matrices if m.name != "embed"} == {"bf16"}
    found = model.matrices
    qkv = torch.cat([wanted[f"self_attn.{each}_proj"] for each in "qkv"])
    assert torch.equal(torch.from_numpy(found["layers.0.qkv"]), qkv)
    assert torch.equal(torch.from_numpy(found["layers.0.mlp.down"]), wanted["mlp.down_proj"])
    halves = [torch.from_numpy(packed(tmp_path, rank, 2)[1].matrices["layers.0.mlp.down"]) for rank in range(2)]
    assert torch.equal(torch.cat(halves, 1), wanted["mlp.down_proj"])


def test_blocks_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight = torch.randn(64, 96).to(torch.float8_e4m3fn)
    scales = torch.rand(4, 3)
    theirs = transformers.Fp8Dequantize(None)._dequantize_one(weight, scales, torch.float32)
    every = scales.repeat_interleave(16, 0).repeat_interleave(32, 1)
    assert torch.equal(theirs, weight.float() * every)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"weight_scale_inv": None}, ModelError, "without a scale"),
        ({"weight_scale_inv": torch.ones(3, 5)}, ModelError, r"scales \(3, 5\) for \(128, 128\) values"),
        ({"weight_scale_inv": torch.ones(7)}, ModelError, r"scales of shape \(7,\)"),
        ({"weight_scale_inv": torch.ones(2, 4).to(torch.int8)}, ModelError, "I8"),
        ({"weight": torch.ones(128, 128).to(torch.float8_e5m2)}, ModelError, "F8_E5M2"),
        ({"weight": torch.ones(128, 64).to(torch.int8)}, ModelError, "stored as I8"),
    ],
)
def test_parts_that_do_not_fit_are_named(change: Any, error: Any, text: str, tmp_path: Path) -> None:
    parts = {"weight": torch.ones(128, 128).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(2, 4)} | change
    at = "model.layers.0.self_attn.q_proj"
    write(tmp_path, FINE, {f"{at}.{name}": each for name, each in parts.items() if each is not None})
    with pytest.raises(error, match=text):
        read_checkpoint(tmp_path).source.tensor(f"{at}.weight")
