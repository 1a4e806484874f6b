# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints give the logits of their dequantised models, in every runtime and in families of each kind."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import anyaccel
import family_cases
from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.dequantised import checkpoint_in
from anyaccel.inference.checkpoints.slices import Slice, take
from anyaccel.inference.modules.layers import PackedLinear

INT8 = {"quant_method": "compressed-tensors", "format": "int-quantized"}
FP8 = {"quant_method": "compressed-tensors", "format": "naive-quantized"}
RUNTIMES = ("native", "device", "torch")
IDS = torch.arange(3, 20)[None]


def quantised(model: Any, folder: Path, settings: dict[str, Any]) -> Any:
    """Write `model` with linears of int8 or float8, and a scale for each row; returns transformers' dequantised one."""
    model.save_pretrained(folder / "plain")
    model.save_pretrained(folder / "quantised")
    plain = load_file(folder / "plain" / "model.safetensors")
    # Those of a Conv1D are [in, out], and stored as a linear's.
    turned = {f"{name}.weight" for name, module in model.named_modules() if type(module).__name__ == "Conv1D"}
    stored = {}
    for name, weight in plain.items():
        inner = (
            (".layers." in name or ".h." in name)
            and weight.dim() == 2
            and "norm" not in name
            and "gate.weight" not in name
        )
        if not inner:
            stored[name] = weight
            continue
        weight = weight.T.contiguous() if name in turned else weight
        scale = weight.abs().amax(1, keepdim=True) / 100
        q = (weight / scale).round().to(torch.int8 if settings is INT8 else torch.float8_e4m3fn)
        stored |= {name: q, name.replace(".weight", ".weight_scale"): scale}
        dequantised = q.float() * scale
        plain[name] = (dequantised.T if name in turned else dequantised).contiguous()
    save_file(plain, folder / "plain" / "model.safetensors", {"format": "pt"})
    save_file(stored, folder / "quantised" / "model.safetensors", {"format": "pt"})
    describe(folder / "quantised", settings)
    return type(model).from_pretrained(folder / "plain", dtype=torch.float32).eval()


def describe(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def check_logits(folder: Path, wanted: Any, runtime: str, within: float = 1e-4) -> Any:
    with torch.no_grad():
        logits = wanted(IDS).logits
        engine = anyaccel.init_inference(folder, dtype="fp32", runtime=runtime)
        torch.testing.assert_close(engine(IDS).logits, logits, rtol=0, atol=within * logits.abs().max().item())
    return engine


# A plain one, one whose experts transformers stacks while loading, and one that the native runtime has no code for.
@pytest.mark.parametrize(
    ("family", "runtime"),
    [*((family, each) for family in ("llama", "qwen3_moe", "gpt2") for each in RUNTIMES), ("lfm2", "torch")],
)
@pytest.mark.parametrize("settings", [INT8, FP8], ids=["int8", "float8"])
def test_logits_are_those_of_the_dequantised_model(
    family: str, runtime: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    if family == "lfm2":
        from transformers import Lfm2Config, Lfm2ForCausalLM

        model: Any = Lfm2ForCausalLM(
            Lfm2Config(
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                vocab_size=128,
                num_attention_heads=4,
                num_key_value_heads=2,
                full_attn_idxs=[1],
                conv_L_cache=3,
            )
        )
    else:
        model = family_cases.build(family)
    wanted = quantised(model.float(), tmp_path, settings)
    check_logits(tmp_path / "quantised", wanted, runtime)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_experts_of_gpt_oss_as_they_are_published(runtime: str, tmp_path: Path) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = GptOssConfig(
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=128,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model = GptOssForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.05, generator=generator)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [each for each in tensors if each.endswith("_proj") and ".experts." in each]:
        experts, cols, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, cols // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(119, 122, (experts, rows, cols // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    describe(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    check_logits(tmp_path, model.eval(), runtime)
    theirs = GptOssForCausalLM.from_pretrained(
        tmp_path, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    with torch.no_grad():
        assert torch.equal(theirs(IDS).logits, model(IDS).logits)
    kept = anyaccel.init_inference(tmp_path, dtype="auto", runtime="native")
    assert "fp4" in str(kept.native.forms["mxfp4"])


def test_what_dequantising_costs_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantised(family_cases.build("llama").float(), tmp_path, INT8)
    with caplog.at_level(logging.WARNING):
        anyaccel.init_inference(tmp_path / "quantised", dtype="auto", runtime="native")
        assert "stored as" not in caplog.text
        anyaccel.init_inference(tmp_path / "quantised", dtype="bf16", runtime="native")
    said = [each.message for each in caplog.records if "stored as" in each.message]
    assert len(said) == 1
    assert "become bf16: 0." in said[0]
    assert said[0].endswith("dtype auto keeps them as they are")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        anyaccel.init_inference(tmp_path / "quantised", dtype="bf16", runtime="torch")
    assert "stored as compressed-tensors become bf16" in caplog.text


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_packed_layers_keep_what_packed_formats_hold(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = quantised(family_cases.build(family).float(), tmp_path, INT8)
    with caplog.at_level(logging.WARNING):
        engine = anyaccel.init_inference(tmp_path / "quantised", dtype="auto", runtime="torch")
    assert "stored as" not in caplog.text
    layers = {name: each for name, each in engine.module.named_modules() if isinstance(each, PackedLinear)}
    inner = {name: each for name, each in layers.items() if "head" not in name}
    assert len(inner) >= 8
    for name, layer in inner.items():
        rows, cols = layer.out_features, layer.in_features
        assert layer.packed.bytes < 1.5 * (-(-rows // 16) * 16) * (-(-cols // 64) * 64) + 64 * rows, name
        weight = wanted.get_submodule(name).weight.detach()
        weight = weight.T if type(wanted.get_submodule(name)).__name__ == "Conv1D" else weight
        x = torch.eye(cols)
        bias = getattr(wanted.get_submodule(name), "bias", None)
        y = layer(x) - (0 if bias is None else bias.detach().bfloat16().float())
        # Activations may be rounded to int8, which ones and zeros are not.
        torch.testing.assert_close(y, weight.T, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        logits = wanted(IDS).logits
    assert (engine(IDS).logits.float() - logits).abs().max() < 0.05 * logits.abs().max()


@pytest.mark.parametrize(
    "part",
    [
        Slice(0, (range(3, 9),)),
        Slice(1, (range(16, 32),)),
        Slice(0, (range(2), range(20, 22))),
        Slice(1, (range(1, 2), range(9, 32))),
    ],
)
def test_slices_are_parts_of_the_whole(part: Slice, tmp_path: Path) -> None:
    wanted = quantised(family_cases.build("llama").float(), tmp_path, INT8)
    name = "model.layers.0.mlp.up_proj.weight"
    weight = wanted.get_parameter(name)
    found = checkpoint_in(tmp_path / "quantised").read(name, weight.shape, part)
    torch.testing.assert_close(found, take(weight.data, part), rtol=0, atol=0)


def test_another_shape_is_refused(tmp_path: Path) -> None:
    quantised(family_cases.build("llama").float(), tmp_path, INT8)
    checkpoint = checkpoint_in(tmp_path / "quantised")
    with pytest.raises(ModelError, match=r"stands for .* needs"):
        checkpoint.read("model.layers.0.mlp.up_proj.weight", torch.Size([3, 4]), None)


@pytest.mark.parametrize("runtime", ["auto", "torch"])
def test_a_refused_method_is_named_at_once(runtime: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    family_cases.build("llama").save_pretrained(tmp_path)
    describe(tmp_path, {"quant_method": "aqlm"})
    with caplog.at_level(logging.WARNING), pytest.raises(ModelError, match="no reader for quantization 'aqlm'"):
        anyaccel.init_inference(tmp_path, runtime=runtime)
    assert "own code" not in caplog.text


def test_pickled_subclasses_of_torchao_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torchao")
    module.Int8Tensor = type("Int8Tensor", (), {"__module__": "torchao"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", module)
    family_cases.build("llama").config.save_pretrained(tmp_path)
    describe(tmp_path, {"quant_method": "torchao"})
    torch.save({"lm_head.weight": module.Int8Tensor()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"would run 'torchao\.Int8Tensor'.*save the model as safetensors with"):
        anyaccel.init_inference(tmp_path)


def test_a_model_in_memory_with_weights_of_another_library(tmp_path: Path) -> None:
    """As torchao's: a subclass of torch's tensors, whose products are the library's."""

    class Theirs(torch.Tensor):
        pass

    model = family_cases.build("llama").float().eval()
    linear = model.model.layers[0].mlp.down_proj
    linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(Theirs), requires_grad=False)
    with torch.no_grad():
        logits = model(IDS).logits
        engine = anyaccel.init_inference(model, dtype="fp32")
        assert engine.runtime == "torch"
        assert type(engine.module.model.layers[0].mlp.down_proj) is torch.nn.Linear
        assert isinstance(engine.module.model.layers[0].mlp.up_proj, PackedLinear)
        torch.testing.assert_close(engine(IDS).logits.as_subclass(torch.Tensor), logits, rtol=0, atol=1e-4)
