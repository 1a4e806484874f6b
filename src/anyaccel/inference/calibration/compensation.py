# SPDX-License-Identifier: Apache-2.0
"""Rounds a matrix column by column, what each column is off being made up for by those that come after it.

Frantar, Ashkboos, Hoefler, Alistarh 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", https://arxiv.org/abs/2210.17323, equations 2 to 4 and algorithm 1. Added here: levels are fitted when
their columns are reached, by the errors that will count there, and groups with large inputs come first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anyaccel.inference.calibration.grids import Fitted, Grid, by_group

_DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it


@dataclass(frozen=True)
class Rounded:
    """A quantised matrix [rows, cols].

    Attributes:
        q: [cols, rows] uint8 (int8 for a grid whose least number is negative).
        fitted: of each `grid.width` columns.
    """

    grid: Grid
    q: Tensor
    fitted: list[Fitted]

    def values(self) -> Tensor:
        """[rows, cols], float32."""
        scale = torch.cat([each.scale for each in self.fitted])
        minimum = torch.cat([each.minimum for each in self.fitted])
        grouped = by_group(self.q.float(), self.grid.group)
        return (grouped * scale[:, None] + minimum[:, None]).view(self.q.shape).T.contiguous()

    def codes(self, name: str) -> Tensor:
        """[groups or windows, rows] of all columns."""
        return torch.cat([each.codes[name] for each in self.fitted])


def nearest(weight: Tensor, grid: Grid, importance: Tensor | None = None) -> Rounded:
    """A matrix [rows, cols] rounded to the nearest levels; `importance` [cols] of the columns' errors."""
    values = weight.float().T.contiguous()
    if importance is None:
        importance = torch.ones(len(values))
    q = torch.empty(values.shape, dtype=torch.int8 if grid.low < 0 else torch.uint8)
    fitted = []
    for first in range(0, len(values), grid.width):
        window = slice(first, first + grid.width)
        fitted.append(grid.fit(values[window], importance[window]))
        grouped = by_group(values[window], grid.group)
        inverse, minimum = _inverse(fitted[-1].scale), fitted[-1].minimum
        levels = ((grouped - minimum[:, None]) * inverse[:, None]).round_().clamp_(grid.low, grid.high)
        q[window] = levels.view(-1, values.shape[1]).to(q.dtype)
    return Rounded(grid, q, fitted)


class Inputs:
    """What the inputs of a matrix say about its columns: made once, used by all matrices with these inputs.

    Args:
        squares: X^T X [cols, cols] of the inputs; taken over.
        width: columns that stay together.
    """

    def __init__(self, squares: Tensor, width: int) -> None:
        diagonal = squares.diagonal()
        self.width = width
        self.importance = diagonal.clone()
        self.dead = diagonal == 0
        diagonal[self.dead] = 1.0
        diagonal += _DAMPING * diagonal[~self.dead].mean() if bool((~self.dead).any()) else 1.0
        self.order = _order(self.importance, width)
        squares = squares[self.order][:, self.order]
        # Upper triangle U with U^T U = inverse: row j has what errors of column j become in later ones.
        factor = torch.linalg.cholesky(squares)
        inverse = torch.cholesky_inverse(factor)
        del squares, factor
        self.upper = torch.linalg.cholesky(inverse, upper=True)


def _order(importance: Tensor, width: int) -> Tensor:
    """Columns in the order of their groups' importance, and by their own inside."""
    windows = importance.view(-1, width)
    inside = windows.argsort(dim=1, descending=True, stable=True)
    first = torch.arange(len(windows))[:, None] * width
    return (first + inside)[windows.sum(1).argsort(dim=0, descending=True, stable=True)].flatten()


def compensated(weight: Tensor, grid: Grid, inputs: Inputs) -> Rounded:
    """A matrix [rows, cols] rounded so that its products with the inputs change least."""
    values = weight.float().T[inputs.order].contiguous()
    values[inputs.dead[inputs.order]] = 0.0
    cols, rows = values.shape
    upper, width = inputs.upper, grid.width
    counts = upper.diagonal().square().reciprocal()  # the squared errors' weights once earlier columns are fixed
    q = torch.empty((cols, rows), dtype=torch.int8 if grid.low < 0 else torch.uint8)
    fitted: list[Fitted | None] = [None] * (cols // width)
    for first in range(0, cols, width):
        window = values[first : first + width]
        own = inputs.order[first : first + width]
        number = int(own.min()) // width
        places = own - number * width
        back = torch.empty_like(places)
        back[places] = torch.arange(width)
        found = fitted[number] = grid.fit(window[back], counts[first : first + width][back])
        group = places // grid.group
        scale, minimum = found.scale, found.minimum
        inverse = _inverse(scale)
        errors = torch.empty_like(window)
        block = upper[first : first + width, first : first + width]
        diagonal = block.diagonal().tolist()
        for column, (of, place) in enumerate(zip(group.tolist(), own.tolist(), strict=True)):
            value = window[column]
            level = (value - minimum[of]).mul_(inverse[of]).round_().clamp_(grid.low, grid.high)
            q[place] = level
            error = errors[column]
            torch.sub(value, level.mul_(scale[of]).add_(minimum[of]), out=error)
            error.div_(diagonal[column])
            if column + 1 < width:
                window[column + 1 :].addr_(block[column, column + 1 :], error, alpha=-1.0)
        if first + width < cols:
            values[first + width :].addmm_(upper[first : first + width, first + width :].T, errors, alpha=-1.0)
    return Rounded(grid, q, [each for each in fitted if each is not None])


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale != 0, 1.0 / scale, torch.zeros_like(scale))
