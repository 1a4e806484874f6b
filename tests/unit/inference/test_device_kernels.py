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

import device_models
from anyaccel.inference.device import activations, attention, parts, rotary
from anyaccel.inference.device.executor import device_logits
from anyaccel.inference.device.kernels import choice

CASES = Path(__file__).parents[2] / "helpers" / "kernel_cases.py"


@pytest.fixture(scope="module")
def errors() -> dict[str, Any]:
    """Case -> its largest error, and what it may be."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton, a gigabyte that the extra dev does not bring: pip install triton")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(CASES)], capture_output=True, text=True, timeout=300, env=env)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this version of Triton's interpreter needs a numpy before 2.5")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kernel", ["tried", "gated", "turn", "add_norm", "norm", "product", "attend"])
def test_each_kernel_gives_what_torch_gives(errors: dict[str, Any], kernel: str) -> None:
    mine = {case: both for case, both in errors.items() if case.startswith(kernel)}
    assert len(mine) >= 3
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
        (
            lambda: choice.Kernels(**_WRONG),
            "Triton's gated, attend, turn, convolve, attend_linearly, scan: wrong on cpu",
        ),
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


def _product(x: torch.Tensor, q: torch.Tensor, norm: tuple[torch.Tensor, float] | None = None) -> torch.Tensor:
    return torch.nn.functional.linear(x if norm is None else torch.nn.functional.rms_norm(x, x.shape[1:], *norm), q)


_WRONG: dict[str, Any] = {
    "gated": _zeros,
    "turn": _nothing,
    "add_norm": _add_norm,
    "norm": lambda x, _weight, _bias, eps, _layer: torch.nn.functional.layer_norm(x, x.shape[1:], eps=eps),
    "product": _product,
    "dequantised": _nothing,
    "attend": lambda q, *_arguments: torch.zeros(len(q), q.shape[1] * 16),
    "convolve": lambda windows, numbers, x, *_arguments: torch.zeros_like(x),
    "attend_linearly": lambda m, states, *_arguments: torch.zeros(2, m.heads * m.value_dim),
    "scan": lambda states, numbers, steps, *_arguments: torch.zeros_like(steps),
    "widest": 1 << 14,
    "most_tokens": 64,
    "milliseconds": None,
}


class _Strict:
    """What Triton's kernels compute, with torch, of what they take: rows of tokens whose values are neighbours."""

    widest = 1 << 14

    @staticmethod
    def gated(activation: str, gate_up: torch.Tensor) -> torch.Tensor:
        assert gate_up.dim() == 2 and gate_up.stride(1) == 1
        gate, up = gate_up.chunk(2, 1)
        assert activation == "silu"
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def turn(heads: torch.Tensor, first: int, angles: torch.Tensor) -> None:
        assert heads.dim() == 3 and heads.stride(2) == 1 and angles.is_contiguous()
        pairs = heads[..., first : first + 2 * angles.shape[1]]
        pairs = pairs.view(*pairs.shape[:-1], -1, 2)
        pairs.copy_((pairs[..., None] * angles[:, None]).sum(-2))

    @staticmethod
    def add_norm(
        residual: torch.Tensor,
        y: torch.Tensor,
        scale: float,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        layer: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert residual.shape == y.shape and residual.dim() == 2 and residual.stride(1) == y.stride(1) == 1
        assert not layer and bias is None
        total = residual + scale * y
        return total, torch.nn.functional.rms_norm(total, total.shape[1:], weight, eps)

    @staticmethod
    def norm(
        x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, layer: bool
    ) -> torch.Tensor:
        assert x.dim() == 2 and x.stride(1) == 1
        assert not layer and bias is None
        return torch.nn.functional.rms_norm(x, x.shape[1:], weight, eps)


@pytest.mark.parametrize("name", ["llama", "granite", "seed_oss", "ernie4_5"])
def test_kernels_get_rows_of_tokens_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Biases that a product takes in are computed with the activation when a model is loaded, and are no rows."""
    logits = []
    for kernels in (None, _Strict):
        for module in (activations, attention, parts, rotary):
            monkeypatch.setattr(module, "kernels_of", lambda _device, kernels=kernels: kernels)
        monkeypatch.setattr(rotary, "has_complex", lambda *_arguments: False)
        model = device_models.on_device(name)
        logits.append(device_logits(model, [model.create()], [9], list(range(5, 14)), list(range(9))))
    assert float((logits[1] - logits[0]).abs().max() / logits[0].abs().max()) < 1e-5
