# SPDX-License-Identifier: Apache-2.0
"""GGUF files of llama.cpp's own converter (tools/record_gguf.py) give transformers' logits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from anyaccel.inference.checkpoints.gguf_file import GgufSource
from anyaccel.inference.families.gguf_models import open_gguf
from anyaccel.inference.families.registry import ARCHITECTURES
from anyaccel.inference.native.checkpoint import read_checkpoint
from anyaccel.inference.native.formats import Precision
from anyaccel.inference.native.packing import Plan
from anyaccel.inference.native.runtime import load_native
from anyaccel.inference.options import ModelOptions
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
def test_logits_are_those_of_transformers(name: str) -> None:
    path = DATA / f"{name}.gguf"
    recorded = json.loads((DATA / f"{name}.json").read_text())
    assert open_gguf(path).config["model_type"] == recorded["model_type"]
    want = np.array(recorded["logits of tokens 1 and 11"], np.float32)
    got = _logits(path, recorded["tokens"], [1, 11])
    exact = "q8_0" not in name
    np.testing.assert_allclose(got, want, rtol=0, atol=(2e-4 if exact else 0.1) * float(np.abs(want).max()))


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
