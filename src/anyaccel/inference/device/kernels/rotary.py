# SPDX-License-Identifier: Apache-2.0
"""Rotary positions, in place and rounded once. `inference/device/rotary.py` is the same in torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HEADS = 8  # of a program: enough bytes that starting it is not what it costs


@triton.jit
def _turn(
    heads, angles, row_stride, head_stride, COUNT: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    value = tl.arange(0, 2 * BLOCK)
    inside = (head < COUNT)[:, None] & (value < 2 * PAIRS)[None, :]
    at = heads + token * row_stride + head[:, None] * head_stride + value[None, :]
    pair = tl.arange(0, BLOCK)
    of = angles + token * (4 * PAIRS) + 4 * pair
    cosine = tl.load(of, mask=pair < PAIRS, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(of + 1, mask=pair < PAIRS, other=0.0).to(tl.float32)[None, :]
    # Neighbours are read and written together: values that are read alone are half of what memory gives.
    a, b = tl.split(tl.reshape(tl.load(at, mask=inside, other=0.0).to(tl.float32), (HEADS, BLOCK, 2)))
    turned = tl.reshape(tl.join(a * cosine - b * sine, a * sine + b * cosine), (HEADS, 2 * BLOCK))
    tl.store(at, turned.to(heads.dtype.element_ty), mask=inside)


def turn(heads: torch.Tensor, first: int, angles: torch.Tensor) -> None:
    """Rotate heads [tokens, heads, values] in place, those from `first` on.

    Args:
        heads: the values of a head are neighbours in memory.
        angles: [tokens, pairs, 2, 2], dense.
    """
    tokens, count, _ = heads.shape
    if tokens and count:
        pairs = angles.shape[1]
        _turn[(tokens, triton.cdiv(count, _HEADS))](
            heads[..., first:],
            angles,
            heads.stride(0),
            heads.stride(1),
            COUNT=count,
            PAIRS=pairs,
            HEADS=_HEADS,
            BLOCK=triton.next_power_of_2(pairs),
        )
