# SPDX-License-Identifier: Apache-2.0
"""The table of DeepSpeed's settings: what tools/deepspeed_matrix.py compares, and that the page has what it runs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from generators import support

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("deepspeed_matrix", ROOT / "tools" / "deepspeed_matrix.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["deepspeed_matrix"] = loaded  # dataclasses look their module up
    spec.loader.exec_module(loaded)
    return loaded


def test_the_table_has_every_setting_and_each_trains_like_deepspeeds_own(matrix: ModuleType) -> None:
    written = json.loads(matrix.RESULTS.read_text())["settings"]
    assert {name: row["says"] for name, row in written.items()} == {
        name: setting.says for name, setting in matrix.SETTINGS.items()
    }
    for name, row in written.items():
        assert sorted(map(int, row["ranks"])) == sorted(matrix.SETTINGS[name].ranks), name
        for ranks, found in row["ranks"].items():
            assert found.get("difference", 1) <= row["limit"], (name, ranks, found)
            assert found["last"] < found["first"], (name, ranks)


def test_losses_that_differ_and_errors_are_told(matrix: ModuleType) -> None:
    flat = {"losses": [2.0] * matrix.STEPS}
    other = {"losses": [*[2.0] * (matrix.STEPS - 1), 2.002]}
    assert matrix.compare(flat, flat) == {"difference": 0.0, "first": 2.0, "last": 2.0}
    assert matrix.compare(flat, other)["difference"] == pytest.approx(0.001, rel=0.01)
    assert matrix.compare({"error": "E: a", "losses": []}, flat) == {"ours": "E: a"}
    assert matrix.compare(flat, {"error": "E: b", "losses": []}) == {"theirs": "E: b"}
    assert "3 steps" in matrix.compare({"losses": [1.0] * 3}, flat)["ours"]


def test_cells_of_the_page() -> None:
    assert support.training({"difference": 0.0}, 1e-5) == "same bits"
    assert support.training({"difference": 3e-7}, 1e-5) == "3e-07"
    assert support.training({"difference": 3e-4}, 1e-5) == "**3e-04**"
    assert support.training({"ours": "RuntimeError: x"}, 1e-5) == "**RuntimeError: x**"
    assert support.training({"theirs": "E: y"}, 1e-5) == "trains; DeepSpeed's own does not: E: y"
    assert support.training({}, 1e-5) == ""


def test_data_is_the_same_whatever_the_ranks(matrix: ModuleType) -> None:
    import torch

    whole = matrix.batch(3, 8, 512)
    assert torch.equal(torch.cat([matrix.batch(3, 8, 512, part, 4) for part in range(4)]), whole)
    assert not torch.equal(matrix.batch(4, 8, 512), whole)
