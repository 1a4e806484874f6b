# SPDX-License-Identifier: Apache-2.0
"""`anyaccel quantize`: what is written stands for the model, in a layout that others read; all of it or nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import family_cases
from anyaccel.cli import main
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.checkpoints.new_folder import new_file
from anyaccel.inference.native.checkpoint import read_checkpoint
from anyaccel.inference.native.formats import Precision
from anyaccel.inference.native.packing import Plan
from anyaccel.inference.quantize import quantize
from recorded_model import RecordedModel

HIDDEN, FEATURES, VOCAB = 64, 160, 48
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": FEATURES,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name, rows in {"q": HIDDEN, "k": 32, "v": 32, "o": HIDDEN}.items():
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        for name, shape in {"gate": (FEATURES, HIDDEN), "up": (FEATURES, HIDDEN), "down": (HIDDEN, FEATURES)}.items():
            shapes[f"{at}mlp.{name}_proj.weight"] = shape
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (HIDDEN,)
    made = tmp_path / "model"
    made.mkdir()
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, made / "model.safetensors")
    (made / "config.json").write_text(json.dumps(CONFIG))
    (made / "tokenizer.json").write_text("{}")
    (made / "pytorch_model.bin").write_bytes(b"not copied")
    return made


def load_file(path: Path) -> dict[str, Any]:
    """As numpy arrays; bfloat16, which numpy has not, as float32."""
    from safetensors.torch import load_file as load

    return {
        name: (value.float() if "bfloat16" in str(value.dtype) else value).numpy() for name, value in load(path).items()
    }


def packed(folder: Path, dtype: str | None) -> tuple[Plan, RecordedModel]:
    plan = Plan(read_checkpoint(folder), Precision(dtype), 0, 1)
    model = RecordedModel(plan.shapes())
    plan.fill(model, lambda done, total: None)  # type: ignore[arg-type]
    model.check_full()
    return plan, model


def dequantised(tensors: dict[str, Any], stem: str, bits: int) -> Any:
    """From the layout of compressed-tensors: words along the columns, values and zero points plus 8 or 128."""
    words = tensors[f"{stem}.weight_packed"].view(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    q = ((words[..., None] >> shifts) & ((1 << bits) - 1)).reshape(len(words), -1).astype(np.int64)
    rows, cols = tensors[f"{stem}.weight_shape"]
    assert q.shape == (rows, cols)
    scales = tensors[f"{stem}.weight_scale"].astype(np.float32)
    zeros = np.full(scales.shape, 1 << (bits - 1))
    if f"{stem}.weight_zero_point" in tensors:
        words = tensors[f"{stem}.weight_zero_point"].view(np.uint32)
        zeros = ((words[:, None, :] >> shifts[:, None]) & 15).reshape(-1, words.shape[1])[:rows].astype(np.int64)
    of = np.arange(cols) // (cols // scales.shape[1])
    return scales[:, of] * (q - zeros[:, of])


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"dtype": "int4"}, 0.10),
        ({"dtype": "int4", "asymmetric": True}, 0.095),
        ({"dtype": "int4", "group": 128}, 0.115),
        ({"dtype": "int8"}, 0.01),
    ],
)
def test_values_are_close_and_read_as_they_are(folder: Path, options: dict[str, Any], bound: float) -> None:
    out = folder.parent / "out"
    seen: list[tuple[int, int]] = []
    summary = quantize(folder, out, progress=lambda done, total: seen.append((done, total)), **options)
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert len(summary.matrices) == 14
    bits = 4 if options["dtype"] == "int4" else 8
    _, model = packed(out, None)
    for matrix in summary.matrices:
        stem = matrix.name.removesuffix(".weight")
        wanted = before[matrix.name]
        got = dequantised(after, stem, bits)
        error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        assert error < bound
        np.testing.assert_allclose(matrix.relative_error, error, rtol=1e-3)
    # 64 columns have no groups of 128, and 160 none of 64.
    groups = {matrix.group for matrix in summary.matrices}
    assert groups == {"int8": {0}}.get(options["dtype"], {32} if options.get("group", 32) == 32 else {32, 64})
    down = "model.layers.1.mlp.down_proj"
    np.testing.assert_allclose(model.matrices["layers.1.mlp.down"], dequantised(after, down, bits), rtol=0, atol=1e-5)
    assert "layers.1.mlp.down" in model.kept
    assert summary.bytes_after < summary.bytes_before / 2
    size = (out / "model.safetensors").stat().st_size
    assert 0 < size - summary.bytes_after < 10_000  # the header
    assert seen[-1] == (summary.bytes_before, summary.bytes_before)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in out.parent.iterdir()) == ["model", "out"]


def test_what_is_packed_is_what_packing_the_model_makes(folder: Path) -> None:
    """The same scales and values as quantising while loading."""
    from anyaccel import _llm

    out = folder.parent / "out"
    quantize(folder, out)
    after = load_file(out / "model.safetensors")
    weight = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    linear = _llm.Linear(FEATURES, HIDDEN, "i4", 32)
    linear.set_rows(0, FEATURES, weight.ctypes.data, "f32", weight.strides[0], 4)
    unit = np.eye(HIDDEN, dtype=np.float32)
    result = np.empty((HIDDEN, FEATURES), np.float32)
    linear.multiply(unit.ctypes.data, result.ctypes.data, HIDDEN, "f32")
    np.testing.assert_allclose(result.T, dequantised(after, "model.layers.0.mlp.up_proj", 4), rtol=0, atol=1e-2)


def test_short_rows_are_read_with_the_bits_that_they_have(tmp_path: Path) -> None:
    """Six words hold 24 values of seven bits, too; rows of 12, 16 and 24 values are in these models."""
    pytest.importorskip("transformers")
    for case in ("deepseek_v3", "gemma4_text"):
        family_cases.build(case).save_pretrained(tmp_path / case)
        quantize(tmp_path / case, tmp_path / f"{case}-8", dtype="int8")
        before, after = (packed(tmp_path / name, "fp32")[1] for name in (case, f"{case}-8"))
        for name, matrix in before.matrices.items():
            np.testing.assert_allclose(after.matrices[name], matrix, rtol=0, atol=0.01 * np.abs(matrix).max())


def test_nothing_is_left_when_it_fails(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj.*not numbers"):
        quantize(folder, folder.parent / "out")
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_when_it_is_ended(folder: Path, end: signal.Signals) -> None:
    """What SIGKILL leaves goes with the next call."""
    out = folder.parent / "out"
    script = (
        "import os, sys; from anyaccel.inference.quantize import quantize\n"
        "quantize(sys.argv[1], sys.argv[2], progress=lambda *_: os.kill(os.getpid(), int(sys.argv[3])))"
    )
    ended = subprocess.run([sys.executable, "-c", script, folder, out, str(int(end))], check=False, timeout=60)
    assert ended.returncode == -end
    left = {path.name for path in folder.parent.iterdir()} - {"model"}
    assert len(left) == (1 if end is signal.SIGKILL else 0)
    before = signal.getsignal(signal.SIGTERM)
    quantize(folder, out)
    assert signal.getsignal(signal.SIGTERM) is before
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model", "out"]


def test_strides_of_bin_files_mean_what_they_say(folder: Path) -> None:
    """torch keeps strides: a transposed matrix, one number, and a view that is larger than what is stored."""
    import torch

    quantize(folder, folder.parent / "expected", dtype="int8")
    tensors = {name: torch.from_numpy(values) for name, values in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    tensors = {name: each.t().contiguous().t() if each.dim() == 2 else each for name, each in tensors.items()}
    torch.save({**tensors, "masked_bias": torch.tensor(-1e9)}, folder / "pytorch_model.bin")
    quantize(folder, folder.parent / "out", dtype="int8")
    expected, found = (load_file(folder.parent / name / "model.safetensors") for name in ("expected", "out"))
    assert found.pop("masked_bias") == np.float32(-1e9)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)

    tensors["lm_head.weight"] = torch.zeros(1).expand(tensors["lm_head.weight"].shape)
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"tensor 'lm_head\.weight' has \d+ bytes and its file fewer"):
        quantize(folder, folder.parent / "again")


def test_an_existing_folder_is_replaced_only_when_forced(folder: Path) -> None:
    out = folder.parent / "out"
    out.mkdir()
    (out / "mine").write_text("")
    with pytest.raises(UsageError, match="exists already"):
        quantize(folder, out)
    with pytest.raises(UsageError, match="holds 'mine', which is no part of a model"):
        quantize(folder, out, force=True)
    (out / "mine").rename(out / "mine.txt")
    with pytest.raises(UsageError, match=r"no model folder \(it has no config\.json\)"):
        quantize(folder, out, force=True)
    assert (out / "mine.txt").exists()
    (out / "config.json").write_text("{}")
    quantize(folder, out, force=True)
    assert not (out / "mine.txt").exists()
    with pytest.raises(UsageError, match="is the model itself"):
        quantize(folder, folder, force=True)
    with pytest.raises(ModelError, match="quantised already"):
        quantize(out, folder.parent / "again")
    with pytest.raises(UsageError, match="there is no such folder as"):
        quantize(folder, folder / "absent" / "out")


@pytest.mark.parametrize("force", [False, True])
def test_what_comes_to_its_place_meanwhile_stays(folder: Path, force: bool) -> None:
    """And so does what was made."""
    out = folder.parent / "out"

    def another(done: int, total: int) -> None:
        if done < total or out.exists():
            return
        out.mkdir()
        (out / "mine").write_text("mine")

    with pytest.raises(UsageError, match=r"(exists already|holds 'mine').*what was made is .*/out-\d+$") as told:
        quantize(folder, out, dtype="int8", force=force, progress=another)
    assert [path.name for path in out.iterdir()] == ["mine"]
    made = Path(str(told.value).rpartition(" is ")[2])
    assert (made / "model.safetensors").exists() and (made / "config.json").exists()
    assert {path.name for path in folder.parent.iterdir()} == {"model", "out", made.name}


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_comes_to_its_place_meanwhile_stays(
    tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On file systems without links too."""

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refused)
    target = tmp_path / "a.gguf"

    def check() -> None:
        raise UsageError(f"{target}: exists already")

    with new_file(target, check) as made:
        made.write_text("first")
    assert target.read_text() == "first" and list(tmp_path.iterdir()) == [target]
    target.unlink()
    with (
        pytest.raises(UsageError, match=r"exists already.*what was made is .*/a-\d+\.gguf$") as told,
        new_file(target, check) as made,
    ):
        made.write_text("second")
        target.write_text("mine")
    assert target.read_text() == "mine"
    other = Path(str(told.value).rpartition(" is ")[2])
    assert other.read_text() == "second" and {*tmp_path.iterdir()} == {target, other}
    with new_file(target, lambda: None) as made:
        made.write_text("third")
    assert target.read_text() == "third"


def test_transformers_config_names_what_is_not_quantised(folder: Path) -> None:
    quantize(folder, folder.parent / "out")
    config = json.loads((folder.parent / "out" / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == {**{k: v for k, v in CONFIG.items() if k != "torch_dtype"}, "dtype": "bfloat16"}
    assert quantization["ignore"] == ["lm_head"]
    assert quantization["format"] == "pack-quantized"
    assert quantization["config_groups"]["group_0"]["weights"]["group_size"] == 32


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5_text", "mamba2", "nemotron_h", "lfm2"])
def test_a_hybrid_keeps_its_steps_in_floats(case: str, tmp_path: Path) -> None:
    """Small errors of steps add up in a state. Where they share a matrix with the rest, dtype auto says of no loss."""
    model = family_cases.build(case)
    model.save_pretrained(tmp_path / "model")
    quantize(tmp_path / "model", tmp_path / "copy", dtype="int8")
    ignored = json.loads((tmp_path / "copy" / "config.json").read_text())["quantization_config"]["ignore"]
    steps = {
        name.removesuffix(".weight")
        for name in model.state_dict()
        if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight"))
    }
    assert steps <= set(ignored) and bool(steps) == case.startswith("qwen")
    plan = Plan(read_checkpoint(tmp_path / "copy"), Precision(None), 0, 1)
    formats = {shape.name.rsplit(".", 1)[-1]: shape.format for shape in plan.matrices if "mixer" in shape.name}
    assert formats == {"in": "i8", "out": "i8"} | ({"steps": "f32"} if case != "lfm2" else {})
    assert plan.dequantised() == []


def test_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.parent / "out"
    assert main(["quantize", str(folder), str(out), "--json", "--quiet"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["dtype"] == "int4"
    assert len(summary["matrices"]) == 14
    assert main(["quantize", str(folder), str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["quantize", str(folder), str(out), "--force", "--dtype", "int8"]) == 0
    printed = capsys.readouterr()
    assert "14 matrices in int8" in printed.out
    assert f"anyaccel generate PROMPT --dtype auto --model {out}" in printed.err
