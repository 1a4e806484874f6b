# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels of runtime="device", by Triton's interpreter on the CPU, against torch's operators.

In a process of their own: whether kernels are interpreted is settled when Triton is imported.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from anyaccel.inference.device.kernels import choice

CASES = Path(__file__).parents[2] / "kernel_cases.py"


@pytest.fixture(scope="module")
def errors() -> dict[str, Any]:
    """Case -> its largest error, and what it may be."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton, a gigabyte that the extra dev does not bring: pip install triton")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(CASES)], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kernel", ["gated", "turn", "add_norm"])
def test_each_kernel_gives_what_torch_gives(errors: dict[str, Any], kernel: str) -> None:
    mine = {case: both for case, both in errors.items() if case.startswith(kernel)}
    assert len(mine) >= 4
    assert {case: both for case, both in mine.items() if not both[0] <= both[1]} == {}


def test_a_decoder_gives_the_same_through_them(errors: dict[str, Any]) -> None:
    mine = {case: both for case, both in errors.items() if case.startswith("model")}
    assert len(mine) >= 4
    assert {case: both for case, both in mine.items() if not both[0] <= both[1]} == {}


def test_what_is_wrong_or_does_not_compile_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class WithTriton:
        def device(self) -> torch.device:
            return torch.device("cpu")

        def is_triton_supported(self) -> bool:
            return True

    def broken() -> choice.Kernels:
        raise RuntimeError("no C compiler")

    device = torch.device("cpu")
    monkeypatch.setattr(choice, "get_accelerator", WithTriton)
    for load, said in (
        (broken, "Triton cannot be used (RuntimeError: no C compiler)"),
        (lambda: choice.Kernels(_zeros, _nothing, _add_norm, 1 << 14), "Triton's gated and turn is wrong on cpu"),
    ):
        monkeypatch.setattr(choice, "load", load)
        with caplog.at_level(logging.WARNING):
            assert choice.kernels_of.__wrapped__(device) is None
        assert said in caplog.text


def _zeros(_activation: str, gate_up: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(gate_up), gate_up.shape[1] // 2)


def _nothing(*_arguments: object) -> None:
    pass


def _add_norm(
    residual: torch.Tensor, y: torch.Tensor, scale: float, weight: torch.Tensor, _bias: None, eps: float, _layer: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + scale * y
    return total, torch.nn.functional.rms_norm(total, total.shape[1:], weight, eps)
