# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels beside torch's operators: case -> largest error, and what it may be.

As a script it prints them for the CPU, where Triton needs TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json

import torch

from anyaccel.inference.device import activations, parts, rotary
from anyaccel.inference.device.kernels.choice import Kernels, load
from anyaccel.inference.device.parts import Normed
from anyaccel.inference.spec.decoder import Mlp, Norm

# Relative to the largest value. In 16 bits the reference rounds more often than a kernel does.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 0.01, torch.float16: 1.2e-3}


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(device)


def gated(kernels: Kernels, device: torch.device) -> dict[str, tuple[float, float]]:
    found = {}
    for activation in ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "swiglu_oai"):
        for dtype, bound in BOUNDS.items():
            whole = 3 * _random(3, 2500, dtype=dtype, device=device)
            mine = whole[:, 100:2304]  # rows that are parts of longer ones, in two blocks
            expected = activations.activated(Mlp(features=1102, gated=True, activation=activation), mine.clone())
            made = kernels.gated(activation, mine)
            found[f"gated {activation} {dtype}"] = _error(made, expected), bound
    return found


def turn(kernels: Kernels, device: torch.device) -> dict[str, tuple[float, float]]:
    found = {}
    for dtype, bound in BOUNDS.items():
        for width, first, pairs in ((16, 0, 8), (20, 4, 6), (96, 0, 48)):
            rows = _random(5, 7 * width, dtype=dtype, device=device)
            angles = _random(5, pairs, dtype=torch.float32, device=torch.device("cpu"))
            cosine, sine = angles.cos(), angles.sin()
            matrices = torch.stack([cosine, sine, -sine, cosine], -1).view(5, pairs, 2, 2).to(dtype).to(device)
            expected = rows.clone()
            rotary.turn(expected[:, width : 6 * width].view(5, 5, width), first, matrices)
            kernels.turn(rows[:, width : 6 * width].view(5, 5, width), first, matrices)
            found[f"turn {width} {first} {dtype}"] = _error(rows, expected), bound
    return found


def add_norm(kernels: Kernels, device: torch.device) -> dict[str, tuple[float, float]]:
    found = {}
    for dtype, bound in BOUNDS.items():
        for kind, weight, bias in (("rms", True, False), ("layer", True, True), ("layer", False, False)):
            norm = Normed.__new__(Normed)
            norm.norm = Norm(kind, 1e-5, weight, bias)
            norm.weight = _random(300, dtype=dtype, device=device) if weight else None
            norm.bias = _random(300, dtype=dtype, device=device) if bias else None
            residual, y = _random(4, 600, dtype=dtype, device=device).split(300, 1)
            expected = norm.of_sum(residual, y, 0.7)
            made = kernels.add_norm(residual, y, 0.7, norm.weight, norm.bias, 1e-5, kind == "layer")
            found[f"add_norm {kind} {weight} {dtype}"] = max(map(_error, made, expected)), bound
    return found


def models(kernels: Kernels) -> dict[str, tuple[float, float]]:
    """Logits of whole decoders on the CPU, with torch's operators and with the kernels."""
    from device_models import on_device

    found = {}
    for name in ("llama", "gemma2", "gpt_neox", "olmo2", "phi3-longrope", "gpt_oss"):
        logits = []
        for each in (None, kernels):
            for module in (activations, parts, rotary):
                module.kernels_of = lambda _device, each=each: each  # type: ignore[attr-defined]
            rotary.has_complex = lambda *_arguments: False
            model = on_device(name)
            logits.append(model.logits([model.create()], [9], list(range(5, 14)), list(range(9))))
        found[f"model {name}"] = _error(logits[1], logits[0]), 1e-5
    return found


def _error(made: torch.Tensor, expected: torch.Tensor) -> float:
    return float((made.float() - expected.float()).abs().max() / expected.float().abs().max())


def main() -> None:
    kernels, host = load(), torch.device("cpu")
    found = {**gated(kernels, host), **turn(kernels, host), **add_norm(kernels, host), **models(kernels)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
