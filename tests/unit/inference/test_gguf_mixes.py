# SPDX-License-Identifier: Apache-2.0
"""Models whose matrices have several types, as llama.cpp's mixes (Q4_K_M and others): each keeps its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anyaccel.inference import init_inference
from anyaccel.inference.native.checkpoint import read_checkpoint
from anyaccel.inference.native.formats import Precision
from anyaccel.inference.native.packing import Plan
from gguf_cases import random_blocks

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KEYS, WIDTH, VOCAB = 256, 4, 2, 512, 96


def write_model(path: Path, keys: str, values: str, experts: int = 0) -> None:
    """A Qwen2 (rows are not permuted, and queries have biases) of two layers."""
    architecture = "qwen2moe" if experts else "qwen2"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(2)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(VOCAB)])
    rng = np.random.default_rng(5)

    def matrix(name: str, kind: str, rows: int, cols: int, seed: int) -> None:
        blocks = random_blocks(kind, rows, cols, seed, 0.002 if kind == "F32" else 0.0002)
        data = blocks.view(np.float32) if kind == "F32" else blocks
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])

    matrix("token_embd.weight", "Q6_K", VOCAB, HIDDEN, 1)
    matrix("output.weight", "Q6_K", VOCAB, HIDDEN, 2)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(2):
        at = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{at}{name}.weight", rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32))
        rows = KEYS * HIDDEN // HEADS
        for number, (name, kind, count) in enumerate(
            (("attn_q", keys, HIDDEN), ("attn_k", keys, rows), ("attn_v", values, rows), ("attn_output", keys, HIDDEN))
        ):
            matrix(f"{at}{name}.weight", kind, count, HIDDEN, 10 * layer + number)
        for name, count in (("attn_q", HIDDEN), ("attn_k", rows), ("attn_v", rows)):
            writer.add_tensor(f"{at}{name}.bias", rng.normal(0, 0.1, count).astype(np.float32))
        matrix(f"{at}ffn_gate.weight", keys, WIDTH, HIDDEN, 20 + layer)
        matrix(f"{at}ffn_up.weight", keys, WIDTH, HIDDEN, 30 + layer)
        matrix(f"{at}ffn_down.weight", values, HIDDEN, WIDTH, 40 + layer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def planned(path: Path, rank: int = 0, size: int = 1) -> dict[str, Any]:
    plan = Plan(read_checkpoint(path), Precision(None), rank, size)
    plan.fit_to_llm(Precision(None))
    return {shape.name: shape for shape in plan.matrices}


@pytest.mark.parametrize(("keys", "values"), [("Q4_K", "Q6_K"), ("Q3_K", "Q5_K"), ("IQ4_XS", "Q5_K"), ("Q2_K", "Q3_K")])
@pytest.mark.parametrize("size", [1, 2])
def test_values_have_a_format_of_their_own(keys: str, values: str, size: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, keys, values)
    bits = {"Q2_K": "i2", "Q3_K": "i3", "Q4_K": "i4", "Q5_K": "i5", "Q6_K": "i6", "IQ4_XS": "nl4"}
    for rank in range(size):
        shapes = planned(path, rank, size)
        qkv, v = shapes["layers.0.qkv"], shapes["layers.0.v"]
        assert (qkv.format, v.format) == (bits[keys], bits[values])
        assert (qkv.rows, v.rows) == ((HIDDEN + HIDDEN // 2) // size, HIDDEN // 2 // size)
        assert {each.scales for each in (qkv, v, shapes["layers.1.mlp.down"])} == {"superblocks"}
        assert (shapes["layers.0.o"].scales == "superblocks") == (
            size == 1
        )  # two ranks share superblocks of 256 columns


@pytest.mark.parametrize(("keys", "values"), [("Q4_K", "Q6_K"), ("Q3_K", "Q5_K"), ("Q4_K", "Q4_K"), ("Q4_K", "F32")])
def test_answers_are_those_of_the_values(keys: str, values: str, tmp_path: Path) -> None:
    """Beside the same file in float32: only activations are rounded."""
    path = tmp_path / "m.gguf"
    write_model(path, keys, values)
    ids = torch.arange(3, 43)[None]
    exact = init_inference(str(path), dtype="fp32")(ids).logits
    found = init_inference(str(path), dtype="auto")(ids).logits
    assert (found - exact).norm() / exact.norm() < 0.02
    step = init_inference(str(path), dtype="auto").generate(ids[:, :5], max_new_tokens=8, do_sample=False)
    assert step.shape[1] >= 6


def test_a_precision_that_is_asked_for_holds_for_all(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, "Q4_K", "Q6_K")
    plan = Plan(read_checkpoint(path), Precision("int4"), 0, 1)
    plan.fit_to_llm(Precision("int4"))
    assert "layers.0.v" not in {shape.name for shape in plan.matrices}
