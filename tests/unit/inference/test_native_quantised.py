# SPDX-License-Identifier: Apache-2.0
"""GPTQ, AWQ and compressed-tensors checkpoints give the values that their layouts stand for; others are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anyaccel.errors import ModelError
from anyaccel.inference.native.checkpoint import read_checkpoint
from anyaccel.inference.native.formats import Precision
from anyaccel.inference.native.packing import Plan
from quantised_cases import CASES, FEATURES, GPTQ, HIDDEN, LINEARS, Arrays, gptq, make, random_values, write
from recorded_model import RecordedModel


def packed(folder: Path, dtype: str | None = None, rank: int = 0, size: int = 1) -> tuple[Plan, RecordedModel]:
    plan = Plan(read_checkpoint(folder), Precision(dtype), rank, size)
    model = RecordedModel(plan.shapes())
    plan.fill(model, lambda done, total: None)  # type: ignore[arg-type]
    model.check_full()
    return plan, model


def expected(weights: Arrays) -> Arrays:
    return {
        "layers.0.qkv": np.concatenate([weights[f"self_attn.{name}_proj"] for name in "qkv"]),
        "layers.0.o": weights["self_attn.o_proj"],
        "layers.0.mlp.gate_up": np.concatenate([weights["mlp.gate_proj"], weights["mlp.up_proj"]]),
        "layers.0.mlp.down": weights["mlp.down_proj"],
    }


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Arrays]:
    return tmp_path, make(request.param, tmp_path)


@pytest.mark.parametrize(("checkpoint", "name"), [(name, name) for name in CASES], indirect=["checkpoint"])
def test_values_are_what_the_layout_stands_for(checkpoint: tuple[Path, Arrays], name: str) -> None:
    folder, weights = checkpoint
    plan, model = packed(folder)
    form = CASES[name][-1]
    for matrix, values in expected(weights).items():
        tolerance = 1e-6 if form[0] != "bf16" else 0.0  # the recorder keeps the floats of what is converted
        np.testing.assert_allclose(model.matrices[matrix], values, rtol=0, atol=tolerance * np.abs(values).max())
        chosen = next((m.format, m.group, m.minimum) for m in plan.matrices if m.name == matrix)
        assert chosen == form
        assert (matrix in model.kept) == (form[0] != "bf16")


@pytest.mark.parametrize("checkpoint", ["gptq-asym-128", "awq-128", "compressed-sym", "gptq-row"], indirect=True)
def test_ranks_have_their_parts(checkpoint: tuple[Path, Arrays]) -> None:
    folder, weights = checkpoint
    whole = expected(weights)
    ranks = [packed(folder, rank=rank, size=2)[1].matrices for rank in range(2)]
    for name in ("layers.0.o", "layers.0.mlp.down"):
        both = np.concatenate([rank[name] for rank in ranks], axis=1)
        np.testing.assert_allclose(both, whole[name], rtol=0, atol=1e-6)
    gates = [rank["layers.0.mlp.gate_up"] for rank in ranks]
    half = FEATURES // 2
    both = np.concatenate([gates[0][:half], gates[1][:half], gates[0][half:], gates[1][half:]])
    np.testing.assert_allclose(both, whole["layers.0.mlp.gate_up"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("checkpoint", ["awq"], indirect=True)
def test_another_precision_is_converted(checkpoint: tuple[Path, Arrays]) -> None:
    folder, weights = checkpoint
    plan, model = packed(folder, "bf16")
    assert {m.format for m in plan.matrices} == {"bf16"}
    for matrix, values in expected(weights).items():
        np.testing.assert_array_equal(model.matrices[matrix], values)
    plan, model = packed(folder, "int4")  # what is in four bits already stays as it is
    assert {(m.format, m.group, m.minimum) for m in plan.matrices if m.name != "embed"} == {("i4", 64, True)}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"bits": 9}, "gptq weights of 9 bits"),
        ({"checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "quanto"}, "quanto"),
        ({"quant_method": "awq", "version": "gemv_fast"}, "gemv_fast"),
        ({"quant_method": "awq", "bits": 8}, "8 bits"),
    ],
)
def test_what_does_not_map_is_named(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    write(tmp_path, {**GPTQ, **change}, {})
    with pytest.raises(ModelError, match=text):
        Plan(read_checkpoint(tmp_path), Precision(None), 0, 1)


@pytest.mark.parametrize("zero", [8, None])
def test_activation_order_is_converted(zero: int | None, tmp_path: Path) -> None:
    """With desc_act, g_idx says each column's group (auto_gptq/nn_modules/qlinear/qlinear_cuda.py, `forward`)."""
    rng = np.random.default_rng(0)
    linears, weights = {}, {}
    for module, (rows, cols) in LINEARS.items():
        q, scales, zeros = random_values(rng, rows, cols, 32, 4, zero)
        linears[module] = gptq(q, scales, zeros)
        order = rng.permutation(linears[module]["g_idx"])
        linears[module]["g_idx"] = order
        weights[module] = scales.astype(np.float32)[:, order] * (q - zeros[:, order])
    write(tmp_path, {**GPTQ, "desc_act": True}, linears)
    plan, model = packed(tmp_path)
    for matrix, values in expected(weights).items():
        np.testing.assert_allclose(model.matrices[matrix], values, rtol=0, atol=0)
        assert {(m.format, m.group) for m in plan.matrices if m.name == matrix} == {("bf16", 0)}
    halves = [packed(tmp_path, rank=rank, size=2)[1].matrices["layers.0.o"] for rank in range(2)]
    np.testing.assert_array_equal(np.concatenate(halves, axis=1), expected(weights)["layers.0.o"])


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("scales", np.ones((4, HIDDEN + 8), np.float16), "136 columns of scales for 128 rows"),
        ("scales", np.ones((3, HIDDEN), np.float16), "3 groups do not divide 128"),
        ("qzeros", np.zeros((2, HIDDEN // 8), np.int32), "zero points"),
        ("g_idx", np.zeros(5, np.int32), "5 entries for 128 columns"),
        ("g_idx", np.full(HIDDEN, 4, np.int32), "groups up to 4 of 4"),
        ("qweight", np.zeros((16, HIDDEN), np.float32), "layout with F32"),
    ],
)
def test_parts_that_do_not_fit_are_named(name: str, value: Any, text: str, tmp_path: Path) -> None:
    parts = gptq(*random_values(np.random.default_rng(0), HIDDEN, HIDDEN, 32, 4, 8))
    parts[name] = value
    write(tmp_path, GPTQ, {"self_attn.q_proj": parts})
    with pytest.raises(ModelError, match=text):
        read_checkpoint(tmp_path).source.tensor("model.layers.0.self_attn.q_proj.weight")
