# SPDX-License-Identifier: Apache-2.0
"""One step of each optimizer in float64, element by element, and tensors to try it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from anyaccel.ops.adagrad import CPUAdagrad
from anyaccel.ops.adam import CPUAdam
from anyaccel.ops.lion import CPULion

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# About the vectors and groups of each variant; together enough for several chunks and threads.
SIZES = (1, 15, 17, 31, 33, 63, 64, 65, 1000, 9001)
DTYPES = [(param, state) for param in (F32, BF16, F16) for state in (F32, BF16)]


@dataclass(frozen=True)
class Case:
    """An optimizer with settings, and its formula."""

    name: str
    kind: type[torch.optim.Optimizer]
    settings: dict[str, object]
    formula: Callable[..., tuple[torch.Tensor, ...]]

    def __str__(self) -> str:
        return self.name


def adam(
    p, g, m, v, *, step, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adamw_mode=True, bias_correction=True
):
    if adamw_mode:
        p = p * (1 - lr * weight_decay)
    else:
        g = g + weight_decay * p
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    one, two = (1 - betas[0] ** step, 1 - betas[1] ** step) if bias_correction else (1.0, 1.0)
    return p - lr * (m / one) / ((v / two).sqrt() + eps), m, v


def adagrad(p, g, total, *, step, lr, eps=1e-10, weight_decay=0.0, lr_decay=0.0):
    g = g + weight_decay * p
    total = total + g * g
    return p - lr / (1 + (step - 1) * lr_decay) * g / (total.sqrt() + eps), total


def lion(p, g, m, *, step, lr, betas=(0.9, 0.999), weight_decay=0.0):
    direction = betas[0] * m + (1 - betas[0]) * g
    return p * (1 - lr * weight_decay) - lr * direction.sign(), betas[1] * m + (1 - betas[1]) * g


CASES = [
    Case("adamw", CPUAdam, {"lr": 1e-2, "weight_decay": 0.1}, adam),
    Case("adam", CPUAdam, {"lr": 1e-2, "weight_decay": 0.1, "adamw_mode": False}, adam),
    Case("adam-plain", CPUAdam, {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-6, "bias_correction": False}, adam),
    Case("adagrad", CPUAdagrad, {"lr": 1e-2, "weight_decay": 0.1, "lr_decay": 0.1}, adagrad),
    Case("lion", CPULion, {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.99)}, lion),
]


def parameters(sizes=SIZES, dtype=F32, seed=0) -> list[torch.nn.Parameter]:
    """With gradients."""
    generator = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]
    new_gradients(params, seed)
    return params


def new_gradients(params, seed: int) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        size = torch.randint(-12, 3, param.shape, generator=generator)
        param.grad = (torch.randn(param.shape, generator=generator) * 2.0**size).to(param.dtype)


def moments(optimizer, param) -> list[torch.Tensor]:
    return [optimizer.state[param][name] for name in optimizer.MOMENTS]
