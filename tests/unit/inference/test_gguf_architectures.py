# SPDX-License-Identifier: Apache-2.0
"""GGUF files of llama.cpp's own converter (tools/record_gguf.py) give transformers' logits."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.checkpoints.gguf_file import GgufSource
from anyaccel.inference.families.gguf_models import open_gguf
from anyaccel.inference.families.registry import ARCHITECTURES
from anyaccel.inference.native.checkpoint import read_checkpoint
from anyaccel.inference.native.formats import Precision
from anyaccel.inference.native.packing import Plan
from anyaccel.inference.native.runtime import NativeModel, RankPlace, load_native
from anyaccel.inference.native.shard import shard
from anyaccel.inference.options import ModelOptions
from anyaccel.inference.spec.decoder import DecoderSpec, Layer, LinearAttention
from recorded_model import RecordedModel

DATA = Path(__file__).parents[2] / "data" / "gguf"
FILES = sorted(path.stem for path in DATA.glob("*.gguf"))


def _logits(path: Path, tokens: list[int], kept: list[int]) -> np.ndarray:
    native = load_native(path, ModelOptions("fp32"))
    logits = np.empty((len(kept), native.whole_spec.vocab), np.float32)
    sequence = native.model.create()
    ids = np.array(tokens, np.int64)
    native.model.forward([sequence], [len(tokens)], ids.ctypes.data, logits.ctypes.data, kept)
    return logits


@pytest.mark.parametrize("name", FILES)
def test_logits_are_those_of_transformers(name: str, caplog: pytest.LogCaptureFixture) -> None:
    path = DATA / f"{name}.gguf"
    recorded = json.loads((DATA / f"{name}.json").read_text())
    assert open_gguf(path).config["model_type"] == recorded["model_type"]
    want = np.array(recorded["logits of tokens 1 and 11"], np.float32)
    got = _logits(path, recorded["tokens"], [1, 11])
    exact = "q8_0" not in name
    np.testing.assert_allclose(got, want, rtol=0, atol=(2e-4 if exact else 0.1) * float(np.abs(want).max()))
    assert "not part of the model" not in caplog.text


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_heads_that_take_turns_on_the_keys(size: int) -> None:
    """llama.cpp's converter has Qwen3.5's first value head of each key head, then the second ones."""
    path = DATA / "qwen35.gguf"
    recorded = json.loads((DATA / "qwen35.json").read_text())
    models = [load_native(path, ModelOptions("fp32", tp=size, threads=1), RankPlace(rank)) for rank in range(size)]
    names = [each.model.create_segment(20.0) for each in models]

    def run(native: NativeModel) -> np.ndarray:
        native.model.connect(names, [os.getpid()] * size)
        logits = np.empty((2, native.whole_spec.vocab), np.float32)
        ids = np.array(recorded["tokens"], np.int64)
        native.model.forward([native.model.create()], [len(ids)], ids.ctypes.data, logits.ctypes.data, [1, 11])
        return logits

    want = np.array(recorded["logits of tokens 1 and 11"], np.float32)
    with ThreadPoolExecutor(size) as pool:
        for got in pool.map(run, models):
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * float(np.abs(want).max()))
    for each in models:
        each.model.unlink()


def test_heads_that_take_turns_are_not_divided_otherwise() -> None:
    mixer = LinearAttention(6, 3, 8, 8, tiled=True)
    layer = Layer(None, None, recurrent=mixer)
    spec = DecoderSpec(vocab=64, hidden=48, layers=(layer,), final_norm=None)
    with pytest.raises(UsageError, match="6 heads of linear attention, which take turns on 3 heads of keys"):
        shard(spec, 1, 4)


def test_a_rate_that_has_no_logarithm_is_told(tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes((DATA / "mamba2.gguf").read_bytes())
    source = GgufSource(path)
    info = source.file_of("blk.1.ssm_a").infos["blk.1.ssm_a"]
    with path.open("r+b") as file:
        file.seek(info.begin)
        file.write(np.array([0.5], np.float32).tobytes())
    with pytest.raises(ModelError, match=r"tensor 'blk\.1\.ssm_a': the largest value is 0\.5; all must be below 0"):
        load_native(path, ModelOptions("fp32"))


def test_a_stack_that_is_quantised_across_the_rows_of_its_matrix() -> None:
    """attn_k_b of DeepSeek: blocks run along the keys, rows of the weight along the latents."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    path = DATA / "deepseek2-v3-q8_0.gguf"
    plan = Plan(read_checkpoint(path), Precision("fp32"), 0, 1)
    model = RecordedModel(plan.shapes())
    plan.fill(model, lambda done, total: None)  # type: ignore[arg-type]
    stored = {each.name: each for each in gguf.GGUFReader(path).tensors}
    for layer in range(2):
        keys, values = (
            gguf.dequantize(stored[f"blk.{layer}.attn_{each}_b.weight"].data, gguf.GGMLQuantizationType.Q8_0)
            for each in ("k", "v")
            if stored[f"blk.{layer}.attn_{each}_b.weight"].tensor_type == gguf.GGMLQuantizationType.Q8_0
        )
        heads = len(keys)
        want = np.concatenate([part for head in range(heads) for part in (keys[head].T, values[head])])
        np.testing.assert_array_equal(model.matrices[f"layers.{layer}.kv_b"], want)


def test_every_architecture_has_a_file() -> None:
    """Here, or in test_native_gguf.py, which writes files itself."""
    import test_native_gguf

    recorded = {GgufSource(DATA / f"{name}.gguf").metadata["general.architecture"] for name in FILES}
    assert set(ARCHITECTURES) == recorded | {each[2] for each in test_native_gguf.MODELS.values()}
