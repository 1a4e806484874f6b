# SPDX-License-Identifier: Apache-2.0
"""Rotary positions: tables of cosines and sines on the device, and turning heads in place.

The two values of a pair are neighbours whatever the checkpoint has: `neighbours` says which row of queries and keys
goes where when weights are loaded, which changes no product of a query and a key. So a pair is one complex number, and
turning all heads is one product where the device multiplies complex numbers of the model's precision, else two
operators.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anyaccel.inference.device.kernels.choice import kernels_of
from anyaccel.inference.spec.decoder import Attention, DecoderSpec, Rope

_GROWTH = 512


def depends_on_context(rope: Rope, context: int) -> bool:
    """Whether the angles of a context of so many tokens differ from those of a short one."""
    return (bool(rope.long_inv_freq) and context > rope.long_from) or _is_dynamic(rope, context)


def neighbours(rope: Rope, head_dim: int, heads: int, first: int) -> torch.Tensor | None:
    """Where each row of so many heads goes so that pairs are neighbours; None where they are already.

    Args:
        first: the first value of a head that turns.
    """
    if rope.interleaved:
        return None
    half = len(rope.inv_freq)
    head = torch.arange(head_dim)
    pair = 2 * torch.arange(half)
    head[first : first + 2 * half] = first + torch.cat([pair, pair + 1])
    return (head_dim * torch.arange(heads)[:, None] + head).flatten()


def has_complex(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether pairs of values in `dtype` can be turned as complex numbers there, which is tried."""
    sizes = [n for layer in spec.layers if layer.attention is not None for n in _alignments(layer.attention)]
    if dtype is not torch.float32 or any(size % 2 for size in sizes):
        return False  # torch has complex numbers of 16-bit floats on few devices, and says that they are unfinished
    try:
        pair = torch.tensor([3.0, 4.0], device=device)
        torch.view_as_complex(pair).mul_(torch.complex(torch.zeros(()), torch.ones(())).to(device))
        return pair.tolist() == [-4.0, 3.0]
    except (RuntimeError, NotImplementedError, TypeError):
        return False


def _alignments(a: Attention) -> tuple[int, ...]:
    """Numbers of values in front of or between turned ones."""
    if a.mla is not None:
        own = () if a.indexer is None else (a.indexer.head_dim,)
        return (a.head_dim, a.mla.kv_rank, a.mla.nope_dim, a.mla.rope_dim, *own)
    return a.head_dim, a.kv_heads * a.value_dim


class Angles:
    """Cosines and sines of one Rope as `turn` takes them.

    Those of a position are complex numbers [pairs], or else matrices [pairs, 2, 2] which rows of two values are
    multiplied by.
    """

    def __init__(self, rope: Rope, dtype: torch.dtype, device: torch.device, as_complex: bool) -> None:
        self.rope = rope
        self._dtype, self._device, self._complex = dtype, device, as_complex
        self._table = self._rows(torch.arange(0), rope.inv_freq, rope.scale).to(device)

    def at(self, positions: torch.Tensor, most: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Of positions [tokens] on the device, all below `most`; in `out` where that is given."""
        if most > len(self._table):
            count = max(-(-most // _GROWTH) * _GROWTH, len(self._table) * 5 // 4)
            self._table = self._rows(torch.arange(count), self.rope.inv_freq, self.rope.scale).to(self._device)
        return torch.index_select(self._table, 0, positions, out=out)

    def of_context(self, positions: Sequence[int], context: int) -> torch.Tensor:
        """The same of one sequence whose context is so long that the angles depend on it; made on the host."""
        rope = self.rope
        inv_freq, scale = rope.inv_freq, rope.scale
        if rope.long_inv_freq and context > rope.long_from:
            inv_freq, scale = rope.long_inv_freq, rope.long_scale
        elif _is_dynamic(rope, context):
            # "Dynamic NTK-aware scaling" (bloc97, emozilla, 2023), as transformers computes it.
            dim = 2 * len(rope.inv_freq)
            growth = rope.dynamic_factor * context / rope.dynamic_from - (rope.dynamic_factor - 1)
            base = rope.dynamic_base * growth ** (dim / (dim - 2))
            inv_freq = tuple(1.0 / base ** (2 * i / dim) for i in range(dim // 2))
        return self._rows(torch.tensor(positions), inv_freq, scale)

    def _rows(self, positions: torch.Tensor, inv_freq: Sequence[float], scale: float) -> torch.Tensor:
        # Factors and angles are rounded to float32, as transformers does: at large positions that is visible.
        angles = positions.float()[:, None] * torch.tensor(inv_freq, dtype=torch.float64).float()
        cosine, sine = angles.cos().double() * scale, angles.sin().double() * scale
        if self._complex:
            return torch.complex(cosine.float(), sine.float())
        return torch.stack([cosine, sine, -sine, cosine], -1).view(*angles.shape, 2, 2).float().to(self._dtype)


def turn(heads: torch.Tensor, first: int, angles: torch.Tensor) -> None:
    """Rotate heads [tokens, heads, values] in place, those from `first` on; `angles` are the tokens'."""
    kernels = None if angles.is_complex() else kernels_of(heads.device)
    if kernels is not None and heads.stride(-1) == 1:
        kernels.turn(heads, first, angles)
        return
    part = heads[..., first : first + 2 * angles.shape[1]]
    pairs = part.view(*part.shape[:-1], -1, 2)
    if angles.is_complex():
        torch.view_as_complex(pairs).mul_(angles[:, None])
    else:
        torch.sum(pairs[..., None] * angles[:, None], -2, out=pairs)


def _is_dynamic(rope: Rope, context: int) -> bool:
    return rope.dynamic_base > 0 and 0 < rope.dynamic_from < context
