# SPDX-License-Identifier: Apache-2.0
"""The values that a quantised matrix can have: per group of columns, value = scale * q + minimum.

A grid is fitted to `width` columns at a time. Matrices are transposed here, [cols, rows]: error compensation goes by
columns, and a column's values are neighbours that way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

_SHRUNK = tuple(1.0 - 0.06 * step for step in range(7))  # how much of a group's range the levels cover
_FITS = 2


@dataclass(frozen=True)
class Fitted:
    """Levels of some columns.

    Attributes:
        scale, minimum: [groups, rows], exactly as a reader of the file computes them.
        codes: what the file stores for them, by the grid's own names.
    """

    scale: Tensor
    minimum: Tensor
    codes: dict[str, Tensor]

    def of_rows(self, rows: slice) -> Fitted:
        codes = {name: each[:, rows] for name, each in self.codes.items()}
        return Fitted(self.scale[:, rows], self.minimum[:, rows], codes)


class Grid(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def width(self) -> int:
        """Columns that are fitted together."""

    @property
    def group(self) -> int:
        """Columns that share a scale."""

    @property
    def low(self) -> int:
        """The least of the whole numbers."""

    @property
    def high(self) -> int:
        """The largest of the whole numbers."""

    @property
    def bits(self) -> float:
        """Stored for each weight, scales included."""

    def fit(self, values: Tensor, importance: Tensor) -> Fitted:
        """The levels of values [width, rows], whose squared errors count by `importance` [width]."""

    @property
    def free_minima(self) -> bool:
        """Whether a group's minimum is stored beside its scale; else it is a whole number of scales."""

    def moved(self, fitted: Fitted, scale: Tensor, minimum: Tensor) -> Fitted:
        """The levels nearest to these that can be stored when all else stays: zero points, units of scales."""

    def divided(self, fitted: Fitted, scale: Tensor) -> Fitted:
        """The levels of rows that are divided by `scale` [rows], as they can be stored."""


def half(values: Tensor) -> Tensor:
    return values.to(torch.float16).float()


def rounded(values: Tensor, scale: Tensor, minimum: Tensor, low: int, high: int) -> Tensor:
    """Whole numbers for values; a scale of 0 gives q = 0 (or the nearest there is)."""
    inverse = torch.where(scale != 0, 1.0 / scale, torch.zeros_like(scale))
    return ((values - minimum) * inverse).round_().clamp_(low, high)


def by_group(values: Tensor, group: int) -> Tensor:
    """[cols, rows] -> [groups, group, rows]."""
    return values.view(-1, group, values.shape[1])


def _least(values: Tensor, weight: Tensor, candidates: Any) -> tuple[Tensor, Tensor]:
    """Of the (scale, minimum, q) of each candidate, what has the least weighted squared error, group by group."""
    best: Tensor | None = None
    scale = minimum = torch.empty(0)
    for tried, base, q in candidates:
        off = q.mul_(tried).add_(base).sub_(values)
        error = off.mul_(off).mul_(weight).sum(1, keepdim=True)
        if best is None:
            best, scale, minimum = error, tried.clone(), base.clone()
            continue
        better = error < best
        best = torch.where(better, error, best)
        scale, minimum = torch.where(better, tried, scale), torch.where(better, base, minimum)
    return scale, minimum


def with_minima(values: Tensor, weight: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Scales >= 0 and minima <= 0 [groups, 1, rows] for q to `levels`: the best of several ranges, fitted to its q."""
    top = values.amax(1, keepdim=True).clamp_(min=0)
    bottom = values.amin(1, keepdim=True).clamp_(max=0)

    def ranges() -> Any:
        for share in _SHRUNK:
            scale, minimum = (top - bottom) * (share / levels), bottom * share
            yield scale, minimum, rounded(values, scale, minimum, 0, levels)

    scale, minimum = _least(values, weight, ranges())
    for _ in range(_FITS):
        q = rounded(values, scale, minimum, 0, levels)
        slope, offset = _line(values, weight, q)
        usable = slope > 0
        slope, offset = torch.where(usable, slope, scale), torch.where(usable, offset, minimum)
        again = rounded(values, slope, offset, 0, levels)
        scale, minimum = _least(values, weight, ((scale, minimum, q), (slope, offset, again)))
    return scale, minimum


def _line(values: Tensor, weight: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The straight line through (q, value) with the least weighted squares, and no offset above 0; slope 0 for none."""
    weighted = weight * q
    total, first = weight.sum(1, keepdim=True), weighted.sum(1, keepdim=True)
    mean, product = (weight * values).sum(1, keepdim=True), (weighted * values).sum(1, keepdim=True)
    square = weighted.mul_(q).sum(1, keepdim=True)
    determinant = total * square - first * first
    usable = determinant > 1e-12 * total * square
    slope = torch.where(usable, (total * product - first * mean) / determinant, torch.zeros_like(first))
    offset = (square * mean - first * product) / determinant
    positive = offset > 0  # formats hold minima of one sign
    slope = torch.where(usable & positive, product / square.clamp(min=1e-30), slope)
    return slope, torch.where(usable, offset.clamp(max=0), torch.zeros_like(offset))


def symmetric(values: Tensor, weight: Tensor, low: int, high: int) -> Tensor:
    """Scales [groups, 1, rows] for q from `low` to `high`, of either sign: the larger side takes the longer range."""
    largest = values.gather(1, values.abs().argmax(1, keepdim=True))

    zero = torch.zeros_like(largest)

    def ranges() -> Any:
        for share in _SHRUNK:
            scale = largest * (share / low)
            yield scale, zero, rounded(values, scale, zero, low, high)

    scale = _least(values, weight, ranges())[0]
    for _ in range(_FITS):
        q = rounded(values, scale, zero, low, high)
        squares = (weight * q * q).sum(1, keepdim=True)
        fitted = torch.where(squares > 0, (weight * q * values).sum(1, keepdim=True) / squares, scale)
        again = rounded(values, fitted, zero, low, high)
        scale = _least(values, weight, ((scale, zero, q), (fitted, zero, again)))[0]
    return scale


@dataclass(frozen=True)
class IntGrid:
    """Whole numbers of compressed-tensors: scale * (q - zero), the scale a half for 4 bits.

    Attributes: q_bits: 4 or 8; group: 0 means all columns of a matrix (then `cols` has their count).
    """

    q_bits: int
    group: int
    asymmetric: bool

    @property
    def name(self) -> str:
        return f"int{self.q_bits} in groups of {self.group}" + (" with zero points" if self.asymmetric else "")

    @property
    def width(self) -> int:
        return self.group

    @property
    def low(self) -> int:
        return 0 if self.q_bits == 4 else 1  # 8 bits are from -127

    @property
    def high(self) -> int:
        return (1 << self.q_bits) - 1

    @property
    def bits(self) -> float:
        return self.q_bits + ((16 if self.q_bits == 4 else 32) + self.q_bits * self.asymmetric) / self.group

    def fit(self, values: Tensor, importance: Tensor) -> Fitted:
        grouped = by_group(values, self.group)
        weight = importance.view(-1, self.group, 1)
        middle = 1 << (self.q_bits - 1)
        if not self.asymmetric:
            low = -middle if self.q_bits == 4 else 1 - middle
            scale = symmetric(grouped, weight, low, middle - 1)[:, 0]
            scale = half(scale) if self.q_bits == 4 else scale
            zero = torch.full_like(scale, middle)
        else:
            scale, minimum = with_minima(grouped, weight, self.high)
            scale = half(scale)
            zero = rounded(-minimum, scale, torch.zeros_like(scale), 0, self.high)
            # The scale once more: a whole zero point has moved the levels.
            steps = rounded(grouped, scale, -zero * scale, 0, self.high) - zero
            squares = (weight * steps * steps).sum(1, keepdim=True)
            refitted = (weight * steps * grouped).sum(1, keepdim=True) / squares
            scale = half(torch.where((squares > 0) & (refitted > 0), refitted, scale))[:, 0]
            zero = zero[:, 0]
        return Fitted(scale, -scale * zero, {"scale": scale, "zero": zero.to(torch.uint8)})

    @property
    def free_minima(self) -> bool:
        return False

    def moved(self, fitted: Fitted, scale: Tensor, minimum: Tensor) -> Fitted:
        scale = half(scale) if self.q_bits == 4 else scale
        zero = fitted.codes["zero"].float()
        return Fitted(scale, -scale * zero, {"scale": scale, "zero": fitted.codes["zero"]})

    def divided(self, fitted: Fitted, scale: Tensor) -> Fitted:
        return self.moved(fitted, fitted.scale / scale, fitted.minimum)
