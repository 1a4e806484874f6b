# SPDX-License-Identifier: Apache-2.0
"""Rotary positions, in place and rounded once. `inference/device/rotary.py` is the same in torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _turn(heads, angles, row_stride, head_stride, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    inside = pair < PAIRS
    at = heads + token * row_stride + tl.program_id(1) * head_stride + 2 * pair
    of = angles + token * (4 * PAIRS) + 4 * pair
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(of, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(of + 1, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (a * cosine - b * sine).to(heads.dtype.element_ty), mask=inside)
    tl.store(at + 1, (a * sine + b * cosine).to(heads.dtype.element_ty), mask=inside)


def turn(heads: torch.Tensor, first: int, angles: torch.Tensor) -> None:
    """Rotate heads [tokens, heads, values] in place, those from `first` on.

    Args:
        heads: the values of a head are neighbours in memory.
        angles: [tokens, pairs, 2, 2], dense.
    """
    tokens, count, _ = heads.shape
    if tokens and count:
        pairs = angles.shape[1]
        _turn[(tokens, count)](
            heads[..., first:],
            angles,
            heads.stride(0),
            heads.stride(1),
            PAIRS=pairs,
            BLOCK=triton.next_power_of_2(pairs),
        )
