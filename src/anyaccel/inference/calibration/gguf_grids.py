# SPDX-License-Identifier: Apache-2.0
"""The types of GGUF as grids, and their blocks as bytes.

The blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, and ggml-quants.c (`dequantize_row_*`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyaccel.inference.calibration.compensation import Rounded
from anyaccel.inference.calibration.grids import Fitted, by_group, half, symmetric, with_minima
from anyaccel.inference.checkpoints.gguf_types import BLOCK_BYTES


@dataclass(frozen=True)
class GgufGrid:
    """A type of GGUF.

    Attributes:
        group: columns that share a scale. low, high: the whole numbers. minima: groups have one.
        largest: of the whole numbers that the scales of a block are; 0: each group has a half of its own.
    """

    name: str
    group: int
    low: int
    high: int
    minima: bool = False
    largest: int = 0

    @property
    def width(self) -> int:
        return BLOCK_BYTES[self.name][0]

    @property
    def bits(self) -> float:
        values, size = BLOCK_BYTES[self.name]
        return size * 8 / values

    def fit(self, values: Tensor, importance: Tensor) -> Fitted:
        grouped = by_group(values, self.group)
        weight = importance.view(-1, self.group, 1)
        if self.minima:
            scale, minimum = (each[:, 0] for each in with_minima(grouped, weight, self.high))
            scale, scales, of_scales = self._levels(scale)
            below, minima, of_minima = self._levels(-minimum)
            return Fitted(
                scale, -below, {"scale": scales, "minimum": minima, "of_scales": of_scales, "of_minima": of_minima}
            )
        scale = symmetric(grouped, weight, self.low, self.high)[:, 0]
        scale, scales, of_scales = self._levels(scale)
        return Fitted(scale, torch.zeros_like(scale), {"scale": scales, "of_scales": of_scales})

    @property
    def free_minima(self) -> bool:
        return self.minima

    def moved(self, fitted: Fitted, scale: Tensor, minimum: Tensor) -> Fitted:
        scale, scales = self._moved(scale, fitted.codes["of_scales"])
        codes = {**fitted.codes, "scale": scales}
        if not self.minima:
            return Fitted(scale, minimum, codes if self.largest else {**codes, "of_scales": scales[:1]})
        below, minima = self._moved(-minimum, fitted.codes["of_minima"])
        return Fitted(scale, -below, {**codes, "minimum": minima})

    def divided(self, fitted: Fitted, scale: Tensor) -> Fitted:
        codes = dict(fitted.codes)
        for name in {"of_scales", "of_minima"} & codes.keys():
            codes[name] = half(codes[name] / scale)
        return self.moved(Fitted(fitted.scale, fitted.minimum, codes), fitted.scale / scale, fitted.minimum / scale)

    def _moved(self, each: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
        """Scales as they can be stored when the half of their block stays."""
        if not self.largest:
            stored = half(each)
            return stored, stored
        least, most = (0, self.largest) if self.minima else (-self.largest, self.largest - 1)
        inverse = torch.where(unit != 0, 1.0 / unit, torch.zeros_like(unit))
        whole = (each * inverse).round_().clamp_(least, most)
        return unit * whole, whole

    def _levels(self, each: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scales [groups, rows] as they can be stored: their values, their whole numbers, and the half of a block."""
        if not self.largest:
            stored = half(each)
            return stored, stored, stored[:1]
        top = each.gather(0, each.abs().argmax(0, keepdim=True))
        # int8 scales reach -128: the largest one is that, whatever its sign.
        unit = half(top / (self.largest if self.minima else -self.largest))
        inverse = torch.where(unit != 0, 1.0 / unit, torch.zeros_like(unit))
        least, most = (0, self.largest) if self.minima else (-self.largest, self.largest - 1)
        whole = (each * inverse).round_().clamp_(least, most)
        return unit * whole, whole, unit


GRIDS = {
    grid.name: grid
    for grid in (
        GgufGrid("q4_0", 32, -8, 7),
        GgufGrid("q4_1", 32, 0, 15, minima=True),
        GgufGrid("q4_k", 32, 0, 15, minima=True, largest=63),
        GgufGrid("q5_0", 32, -16, 15),
        GgufGrid("q5_1", 32, 0, 31, minima=True),
        GgufGrid("q5_k", 32, 0, 31, minima=True, largest=63),
        GgufGrid("q6_k", 16, -32, 31, largest=128),
        GgufGrid("q8_0", 32, -127, 127),
    )
}
# For matrices whose columns are no multiple of 256.
SMALL = {"q4_k": "q4_1", "q6_k": "q8_0"}


def packed(rounded: Rounded) -> Any:
    """The bytes of a matrix, uint8 [rows, bytes of a row] (numpy)."""
    grid = rounded.grid
    rows = rounded.q.shape[1]
    q = (rounded.q.to(torch.int16) - (grid.low if grid.name != "q8_0" else 0)).to(torch.int16)
    blocks = q.T.reshape(rows * (len(q) // grid.width), grid.width)

    def codes(name: str) -> Tensor:
        """[blocks, codes of a block]"""
        found = rounded.codes(name)
        each = len(found) // (len(q) // grid.width)
        return found.T.reshape(len(blocks), each)

    done = _PACKED[grid.name](blocks, codes)
    return done.view(rows, -1).contiguous().numpy()


def _halves(values: Tensor) -> Tensor:
    """[blocks, n] -> bytes [blocks, 2 n]"""
    return torch.empty(values.shape, dtype=torch.float16).copy_(values).view(torch.uint8)


def _octets(values: Tensor) -> Tensor:
    return values.to(torch.uint8)


def _legacy(blocks: Tensor, codes: Callable[[str], Tensor], high: bool, minima: bool = True) -> Tensor:
    head = [_halves(codes("scale"))]
    if minima:
        head.append(_halves(-codes("minimum")))
    if high:
        bits = (blocks.to(torch.int64) >> 4) << torch.arange(32)
        head.append(bits.sum(1, keepdim=True).to(torch.int32).view(torch.uint8))
    low = blocks & 15
    return torch.cat([*head, _octets(low[:, :16] | (low[:, 16:] << 4))], 1)


def _scales_of_6_bits(codes: Callable[[str], Tensor]) -> list[Tensor]:
    s, m = codes("scale").to(torch.int16), codes("minimum").to(torch.int16)
    packed_scales = [
        s[:, :4] | (s[:, 4:] >> 4 << 6),
        m[:, :4] | (m[:, 4:] >> 4 << 6),
        (s[:, 4:] & 15) | ((m[:, 4:] & 15) << 4),
    ]
    return [_halves(codes("of_scales")), _halves(codes("of_minima")), *(_octets(each) for each in packed_scales)]


def _nibbles(blocks: Tensor) -> Tensor:
    """Of each 64 values the first 32 in the low bits of 32 bytes, the others in the high ones."""
    parts = (blocks & 15).view(-1, 4, 2, 32)
    return _octets(parts[:, :, 0] | (parts[:, :, 1] << 4)).view(len(blocks), 128)


def _q4_k(blocks: Tensor, codes: Callable[[str], Tensor]) -> Tensor:
    return torch.cat([*_scales_of_6_bits(codes), _nibbles(blocks)], 1)


def _q5_k(blocks: Tensor, codes: Callable[[str], Tensor]) -> Tensor:
    high = ((blocks >> 4).view(-1, 8, 32) << torch.arange(8, dtype=torch.int16)[:, None]).sum(1)
    return torch.cat([*_scales_of_6_bits(codes), _octets(high), _nibbles(blocks)], 1)


def _q6_k(blocks: Tensor, codes: Callable[[str], Tensor]) -> Tensor:
    parts = blocks.view(-1, 2, 4, 32)
    low = parts & 15
    lows = torch.stack([low[:, :, 0] | (low[:, :, 2] << 4), low[:, :, 1] | (low[:, :, 3] << 4)], 2)
    high = ((parts >> 4) << torch.tensor([0, 2, 4, 6], dtype=torch.int16)[:, None]).sum(2)
    scales = codes("scale").to(torch.int8).view(torch.uint8)
    count = len(blocks)
    return torch.cat(
        [_octets(lows).view(count, 128), _octets(high).view(count, 64), scales, _halves(codes("of_scales"))], 1
    )


def _q8_0(blocks: Tensor, codes: Callable[[str], Tensor]) -> Tensor:
    return torch.cat([_halves(codes("scale")), blocks.to(torch.int8).view(torch.uint8)], 1)


_PACKED: dict[str, Callable[[Tensor, Callable[[str], Tensor]], Tensor]] = {
    "q4_0": lambda blocks, codes: _legacy(blocks, codes, high=False, minima=False),
    "q4_1": lambda blocks, codes: _legacy(blocks, codes, high=False),
    "q5_0": lambda blocks, codes: _legacy(blocks, codes, high=True, minima=False),
    "q5_1": lambda blocks, codes: _legacy(blocks, codes, high=True),
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "q8_0": _q8_0,
}
