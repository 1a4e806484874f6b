# SPDX-License-Identifier: Apache-2.0
"""Rounds a matrix column by column, what each column is off being made up for by those that come after it.

Frantar, Ashkboos, Hoefler, Alistarh 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", https://arxiv.org/abs/2210.17323, equations 2 to 4 and algorithm 1. Added here: levels are fitted when
their columns are reached, by the errors that will count there, and groups with large inputs come first.

Two things around it. What is rounded is not the matrix itself but the one whose products with the inputs that it will
get, of a model that is quantised up to there, are nearest to the products that it should give (the aim of Li et al.
2025, "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration", https://arxiv.org/abs/2504.02692, here
as one solution of least squares before the rounding). And once all columns are rounded, each is chosen again with all
others as they are, as in Behdin et al. 2023, "QuantEase", https://arxiv.org/abs/2309.01885.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from anyaccel.inference.calibration.grids import Fitted, Grid, by_group

# Of the mean of the Hessian's diagonal, added to it: some thousands of tokens do not say enough of a thousand columns.
_DAMPING = 0.1
_AGAIN = 2  # passes in which levels are fitted and columns chosen once more
_SINGULAR = 1e-6  # determinants below it, of 1, decide nothing
_CLOSE = 0.002
_TINY = 1e-30
_BLOCK = 128  # columns after which what they change is brought to all others


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

    def divided(self, scale: Tensor) -> Rounded | None:
        """The matrix with its rows divided by `scale`; None where that could not be stored as closely."""
        fitted = [self.grid.divided(each, scale) for each in self.fitted]
        for old, new in zip(self.fitted, fitted, strict=True):
            off = (new.scale * scale - old.scale).abs() > _CLOSE * old.scale.abs()
            if bool(off.any()) or bool(((new.minimum * scale - old.minimum).abs() > _CLOSE * old.minimum.abs()).any()):
                return None
        return Rounded(self.grid, self.q, fitted)

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
        squares: X^T X [cols, cols] of the inputs X [tokens, cols]; taken over.
        width: columns that stay together.
        drift: (Y - X)^T X [cols, cols], Y being the inputs that there would be if nothing before had been rounded.
    """

    def __init__(self, squares: Tensor, width: int, drift: Tensor | None = None) -> None:
        diagonal = squares.diagonal()
        self.width = width
        self.importance = diagonal.clone()
        self.dead = diagonal == 0
        diagonal[self.dead] = 1.0
        diagonal += _DAMPING * diagonal[~self.dead].mean() if bool((~self.dead).any()) else 1.0
        self.order = _order(self.importance, width)
        self.squares = squares[self.order][:, self.order]
        # Upper triangle U with U^T U = inverse: row j has what errors of column j become in later ones.
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(self.squares))
        # The matrix W with the right products on average is W + W pull; rows and columns in `order`.
        self.pull = None if drift is None else drift[self.order][:, self.order] @ inverse
        self.upper = torch.linalg.cholesky(inverse, upper=True)

    def scaled(self, scale: Tensor) -> Inputs:
        """Those of a matrix whose columns are multiplied by `scale` [cols], and these inputs divided by it."""
        found = copy.copy(self)
        ordered = scale[self.order]
        found.squares = self.squares / ordered / ordered[:, None]
        found.upper = self.upper * ordered
        if self.pull is not None:
            found.pull = self.pull * ordered / ordered[:, None]
        return found

    def spread(self) -> Tensor:
        """How far an input goes from what the others and it say of it, on average: the root of a column's weight."""
        found = torch.empty_like(self.importance)
        found[self.order] = self.upper.diagonal().reciprocal()
        return found

    def lost(self, rounded: Rounded, aim: Tensor) -> Tensor:
        """The squared error of the products, of each row."""
        errors = rounded.values().T[self.order] - aim
        return (errors * (self.squares @ errors)).sum(0)

    def aim(self, weight: Tensor) -> Tensor:
        """What is to be rounded, [cols, rows] in `order`: a matrix [rows, cols] that makes up for the drift."""
        ordered = weight.float()[:, self.order]
        if self.pull is not None:
            ordered = torch.addmm(ordered, ordered, self.pull)
        aim = ordered.T.contiguous()
        aim[self.dead[self.order]] = 0.0
        return aim


def _order(importance: Tensor, width: int) -> Tensor:
    """Columns in the order of their groups' importance, and by their own inside."""
    windows = importance.view(-1, width)
    inside = windows.argsort(dim=1, descending=True, stable=True)
    first = torch.arange(len(windows))[:, None] * width
    return (first + inside)[windows.sum(1).argsort(dim=0, descending=True, stable=True)].flatten()


def compensated(weight: Tensor, grid: Grid, inputs: Inputs, again: int | None = None) -> Rounded:
    """A matrix [rows, cols] rounded so that its products with the inputs change least.

    Args:
        again: passes in which levels are fitted and columns chosen once more.
    """
    aim = inputs.aim(weight)
    result = _in_order(aim, grid, inputs)
    for _ in range(_AGAIN if again is None else again):
        _choose_again(result, aim, inputs)
    return result


def _in_order(aim: Tensor, grid: Grid, inputs: Inputs) -> Rounded:
    """[cols, rows] rounded column by column."""
    values = aim.clone()
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


def _choose_again(found: Rounded, aim: Tensor, inputs: Inputs) -> None:
    """The best levels of each group and the best one of each column, with all others as they are; `found` is changed.

    Args:
        aim: [cols, rows] in order.
    """
    grid, order = found.grid, inputs.order
    errors = found.values().T[order] - aim
    slopes = inputs.squares @ errors  # half the derivative of the squared error of the products
    diagonal = inputs.squares.diagonal().tolist()
    step = max(_BLOCK // grid.width, 1) * grid.width
    for first in range(0, len(order), step):
        block = slice(first, first + step)
        own, places, slope, error = inputs.squares[block, block], order[block], slopes[block], errors[block]
        before = error.clone()
        for at in range(0, len(places), grid.width):
            window = slice(at, at + grid.width)
            _fit_again(found, places[window], own[:, window], own[window, window], slope, error[window], window)
        numbers = (places // grid.width).tolist()
        scales = {number: found.fitted[number] for number in set(numbers)}
        inverses = {number: _inverse(each.scale) for number, each in scales.items()}
        groups = (places % grid.width // grid.group).tolist()
        for column, (number, group, place) in enumerate(zip(numbers, groups, places.tolist(), strict=True)):
            fitted = scales[number]
            wanted = aim[first + column] + error[column] - slope[column] / diagonal[first + column]
            level = (wanted - fitted.minimum[group]).mul_(inverses[number][group]).round_()
            level.clamp_(grid.low, grid.high)
            change = (level - found.q[place]).mul_(fitted.scale[group])
            found.q[place] = level
            error[column].add_(change)
            slope.addr_(own[column], change)
        changes = error - before
        slopes[:first].addmm_(inputs.squares[:first, block], changes)
        slopes[first + len(changes) :].addmm_(inputs.squares[first + len(changes) :, block], changes)


def _fit_again(
    found: Rounded, places: Tensor, all_own: Tensor, own: Tensor, slopes: Tensor, error: Tensor, window: slice
) -> None:
    """The best levels of the groups of one window for the whole numbers that there are, as far as they can be stored.

    Args:
        places: of its columns [width].
        all_own, own: their squares [cols, width] with all columns of `slopes`, and [width, width] among each other.
        slopes, error: of these columns; changed.
    """
    grid = found.grid
    number = int(places[0]) // grid.width
    old = found.fitted[number]
    scale, minimum = old.scale.clone(), old.minimum.clone()
    groups = places % grid.width // grid.group
    members = [(groups == group).nonzero()[:, 0] for group in range(len(scale))]
    slope = slopes[window]
    before = error.clone()
    for group, rows in enumerate(members):
        q, square, along = found.q[places[rows]].float(), own[rows][:, rows], slope[rows]
        if grid.free_minima:
            products = square @ q
            a, b, c = (q * products).sum(0), products.sum(0), square.sum()
            u, v = (q * along).sum(0), along.sum(0)
            determinant = a * c - b * b
            usable = determinant > _SINGULAR * a * c
            steeper = torch.where(usable, (b * v - c * u) / determinant, -u / a.clamp(min=_TINY))
            higher = torch.where(usable, (b * u - a * v) / determinant, torch.zeros_like(v))
        else:  # the minimum goes with the scale
            steps = q + minimum[group] * _inverse(scale[group])
            steeper = -(steps * along).sum(0) / (steps * (square @ steps)).sum(0).clamp(min=_TINY)
            higher = torch.zeros_like(steeper)
        scale[group] += steeper
        minimum[group] += higher
        tried = grid.moved(old, scale, minimum)
        change = q * (tried.scale[group] - old.scale[group]) + (tried.minimum[group] - old.minimum[group])
        better = (change * (2 * along + square @ change)).sum(0) < 0
        scale[group] = torch.where(better, scale[group], old.scale[group])
        minimum[group] = torch.where(better, minimum[group], old.minimum[group])
        change *= better
        error[rows] += change
        slope.addmm_(own[:, rows], change)
    found.fitted[number] = grid.moved(old, scale, minimum)
    changes = error - before
    slopes[: window.start].addmm_(all_own[: window.start], changes)
    slopes[window.stop :].addmm_(all_own[window.stop :], changes)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale != 0, 1.0 / scale, torch.zeros_like(scale))
