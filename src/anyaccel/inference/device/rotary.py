# SPDX-License-Identifier: Apache-2.0
"""Rotary positions: tables of cosines and sines on the device, and turning heads in place by three operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anyaccel.inference.spec.decoder import Rope

_GROWTH = 512


def depends_on_context(rope: Rope, context: int) -> bool:
    """Whether the angles of a context of so many tokens differ from those of a short one."""
    return (bool(rope.long_inv_freq) and context > rope.long_from) or _is_dynamic(rope, context)


def changes_between(rope: Rope, tokens: int, others: int) -> bool:
    """Whether a cache of `others` tokens was computed with other angles than one of `tokens` is."""
    if rope.long_inv_freq:
        return (tokens > rope.long_from) != (others > rope.long_from)
    if rope.dynamic_base > 0 and rope.dynamic_from > 0:
        return tokens != others and max(tokens, others) > rope.dynamic_from
    return False


class Angles:
    """Cosines and sines of one Rope, [2, values] a position: as `turn` takes them."""

    def __init__(self, rope: Rope, dtype: torch.dtype, device: torch.device) -> None:
        self.rope = rope
        self._dtype, self._device = dtype, device
        self._table = torch.empty(0, 2, 2 * len(rope.inv_freq), dtype=dtype, device=device)

    def at(self, positions: torch.Tensor, most: int) -> torch.Tensor:
        """[tokens, 2, values] of positions on the device, all below `most`."""
        if most > len(self._table):
            count = max(-(-most // _GROWTH) * _GROWTH, len(self._table) * 5 // 4)
            self._table = self._rows(torch.arange(count), self.rope.inv_freq, self.rope.scale).to(self._device)
        return self._table.index_select(0, positions)

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
        if self.rope.interleaved:
            whole = cosine.repeat_interleave(2, -1), torch.stack([-sine, sine], -1).flatten(-2)
        else:
            whole = torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)
        return torch.stack(whole, 1).float().to(self._dtype)


def turn(rope: Rope, heads: torch.Tensor, first: int, angles: torch.Tensor) -> None:
    """Rotate heads [tokens, heads, values] in place; `angles` are [tokens, 2, values that turn]."""
    count = angles.shape[-1]
    part = heads if count == heads.shape[-1] else heads[..., first : first + count]
    if rope.interleaved:
        swapped = part.reshape(*part.shape[:-1], -1, 2).flip(-1).view(part.shape)
    else:
        swapped = part.roll(count // 2, -1)
    part.mul_(angles[:, :1]).addcmul_(swapped, angles[:, 1:])


def _is_dynamic(rope: Rope, context: int) -> bool:
    return rope.dynamic_base > 0 and 0 < rope.dynamic_from < context
