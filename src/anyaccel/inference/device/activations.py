# SPDX-License-Identifier: Apache-2.0
"""Activations of MLPs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from anyaccel.inference.device.kernels.choice import kernels_of
from anyaccel.inference.spec.decoder import Mlp


def _swiglu_oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=7.0)
    return (up.clamp(-7.0, 7.0) + 1) * (gate * torch.sigmoid(1.702 * gate))


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def xielu(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Apertus' activation, with a layer's learned values: alpha_p, alpha_n, beta, eps."""
    alpha_p, alpha_n, beta, eps = values.to(x.dtype)
    below = (torch.expm1(torch.minimum(x, eps)) - x) * (beta + F.softplus(alpha_n))
    y: torch.Tensor = torch.where(x > 0, F.softplus(alpha_p) * x * x, below) + beta * x
    return y


def activated(mlp: Mlp, gate_up: torch.Tensor) -> torch.Tensor:
    """The features of a simple MLP, of rows of gates and ups."""
    if not mlp.gated:
        return ACTIVATIONS[mlp.activation](gate_up)
    kernels = kernels_of(gate_up.device)
    if kernels is not None and gate_up.stride(-1) == 1:
        return kernels.gated(mlp.activation, gate_up)
    gate, up = gate_up.chunk(2, -1)
    if mlp.activation == "swiglu_oai":
        return _swiglu_oai(gate, up)
    return ACTIVATIONS[mlp.activation](gate).mul_(up)
