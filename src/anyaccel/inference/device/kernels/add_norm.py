# SPDX-License-Identifier: Apache-2.0
"""Norms, and a residual with what a block adds to it and the norm of that. `parts.Normed` has the same in torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WIDEST = 1 << 14  # values of a row, which one program has in its registers


@triton.jit
def _add_norm(
    residual,
    y,
    total,
    out,
    weight,
    bias,
    residual_stride,
    y_stride,
    scale,
    eps,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    LAYER: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    h = tl.load(residual + row * residual_stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        h += scale * tl.load(y + row * y_stride + at, mask=inside, other=0.0).to(tl.float32)
        kept = h.to(total.dtype.element_ty)  # the norm is of the residual as the next layer reads it
        tl.store(total + row * WIDTH + at, kept, mask=inside)
        h = kept.to(tl.float32)
    if LAYER:
        h = tl.where(inside, h - tl.sum(h, 0) / WIDTH, 0.0)
    x = h * tl.rsqrt(tl.sum(h * h, 0) / WIDTH + eps)
    if WEIGHT:
        x *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, x.to(out.dtype.element_ty), mask=inside)


def add_norm(
    residual: torch.Tensor,
    y: torch.Tensor,
    scale: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    layer: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + scale * y, and its norm: root mean square, or of a `layer` with its mean taken away.

    Args:
        residual, y: [tokens, width] of one dtype, the values of a token neighbours in memory; width up to WIDEST.
        weight, bias: [width].
    """
    total = residual.new_empty(residual.shape)
    return total, _run(residual, y, total, scale, weight, bias, eps, layer)


def norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, layer: bool
) -> torch.Tensor:
    """The norm of x, as `add_norm` has it."""
    return _run(x, x, None, 0.0, weight, bias, eps, layer)


def _run(
    residual: torch.Tensor,
    y: torch.Tensor,
    total: torch.Tensor | None,
    scale: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    layer: bool,
) -> torch.Tensor:
    rows, width = residual.shape
    out = residual.new_empty(rows, width)
    block = triton.next_power_of_2(width)
    if rows:
        _add_norm[(rows,)](
            residual,
            y,
            out if total is None else total,
            out,
            residual if weight is None else weight,
            residual if bias is None else bias,
            residual.stride(0),
            y.stride(0),
            scale,
            eps,
            WIDTH=width,
            ADD=total is not None,
            LAYER=layer,
            WEIGHT=weight is not None,
            BIAS=bias is not None,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),  # 16 values of a row in each thread
        )
    return out
