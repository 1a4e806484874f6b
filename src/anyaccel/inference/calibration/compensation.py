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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
_ROWS = 1024  # of a matrix that are rounded together: their part of a block of columns stays in the cache
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

    def split(self, rows: Sequence[int]) -> list[Rounded]:
        """Matrices of so many rows each."""
        if len(rows) == 1:
            return [self]
        found, first = [], 0
        for count in rows:
            part = slice(first, first + count)
            fitted = [each.of_rows(part) for each in self.fitted]
            found.append(Rounded(self.grid, self.q[:, part].contiguous(), fitted))
            first += count
        return found

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
        # Upper triangle M with M M^T = squares: what rounding has added to column j is made up for in a later column k
        # by -M_jk / M_kk times as much, and M_kk^2 is what counts of column k once all columns before it are fixed.
        self.factor = torch.linalg.cholesky(self.squares.flip(0, 1)).flip(0, 1)
        self._plain, self._scale = self.factor, torch.ones(len(squares))
        self._drift = None if drift is None else drift[self.order][:, self.order]

    def scaled(self, scale: Tensor) -> Inputs:
        """Those of a matrix whose columns are multiplied by `scale` [cols], and these inputs divided by it."""
        found = copy.copy(self)
        found._scale = scale[self.order]
        found.squares = self.squares / found._scale / found._scale[:, None]
        found.factor = self.factor / found._scale[:, None]
        return found

    def spread(self) -> Tensor:
        """How far an input goes from what the others and it say of it, on average: the root of a column's weight."""
        found = torch.empty_like(self.importance)
        found[self.order] = self.factor.diagonal()
        return found

    def lost(self, rounded: Rounded, aim: Tensor) -> Tensor:
        """The squared error of the products, of each row."""
        errors = rounded.values().T[self.order] - aim
        return (errors * (self.squares @ errors)).sum(0)

    def aimed(self, weight: Tensor) -> Tensor:
        """As `aim`, [rows, cols] in the columns' own order and not scaled."""
        found = torch.empty_like(weight, dtype=torch.float32)
        found[:, self.order] = (self.aim(weight) / self._scale[:, None]).T
        return found

    def aim(self, weight: Tensor) -> Tensor:
        """What is to be rounded, [cols, rows] in `order`: a matrix [rows, cols] that makes up for the drift, scaled."""
        ordered = weight.float()[:, self.order]
        if self._drift is not None:  # W + W drift squares^-1 has the right products on average
            pulled = torch.linalg.solve_triangular(self._plain.T, ordered @ self._drift, upper=False, left=False)
            ordered = ordered + torch.linalg.solve_triangular(self._plain, pulled, upper=True, left=False)
        aim = (ordered * self._scale).T.contiguous()
        aim[self.dead[self.order]] = 0.0
        return aim


def _order(importance: Tensor, width: int) -> Tensor:
    """Columns in the order of their groups' importance, and by their own inside."""
    windows = importance.view(-1, width)
    inside = windows.argsort(dim=1, descending=True, stable=True)
    first = torch.arange(len(windows))[:, None] * width
    return (first + inside)[windows.sum(1).argsort(dim=0, descending=True, stable=True)].flatten()


def compensated(weight: Tensor, grid: Grid, inputs: Inputs, again: int | None = None) -> Rounded:
    """A matrix [rows, cols], times the inputs' scale, rounded so that its products with the inputs change least.

    Args:
        again: passes in which levels are fitted and columns chosen once more.
    """

    def of_part(part: Tensor) -> Rounded:
        return rounded_to(inputs.aim(part), grid, inputs, _AGAIN if again is None else again)

    return _joined(in_parallel(of_part, [weight[first : first + _ROWS] for first in range(0, len(weight), _ROWS)]))


def rounded_to(aim: Tensor, grid: Grid, inputs: Inputs, again: int) -> Rounded:
    """As `compensated`, to what `inputs.aim` has found."""
    result, errors = _in_order(aim, grid, inputs)
    if again:
        slopes = inputs.squares @ errors  # half the derivative of the squared error of the products
        for _ in range(again):
            _choose_again(result, aim, errors, slopes, inputs)
    return result


def in_parallel(work: Callable[[Tensor], Rounded], parts: Sequence[Tensor]) -> list[Rounded]:
    """What `work` makes of each part, in as many threads as torch has, of which each computes alone.

    Threads that share each of thousands of short steps would wait for all of them to get a core.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if min(threads, len(parts)) == 1:
            return [work(part) for part in parts]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(work, parts))
    finally:
        torch.set_num_threads(threads)


def _joined(parts: list[Rounded]) -> Rounded:
    """One matrix of the rows of all parts."""
    if len(parts) == 1:
        return parts[0]
    fitted = []
    for each in zip(*(part.fitted for part in parts), strict=True):
        codes = {name: torch.cat([one.codes[name] for one in each], 1) for name in each[0].codes}
        fitted.append(Fitted(torch.cat([o.scale for o in each], 1), torch.cat([o.minimum for o in each], 1), codes))
    return Rounded(parts[0].grid, torch.cat([part.q for part in parts], 1), fitted)


def _in_order(aim: Tensor, grid: Grid, inputs: Inputs) -> tuple[Rounded, Tensor]:
    """[cols, rows] rounded column by column, and what that has added to each, in order."""
    cols, rows = aim.shape
    width, factor, diagonal = grid.width, inputs.factor, inputs.factor.diagonal()
    counts = diagonal.square()  # the squared errors' weights once earlier columns are fixed
    q = torch.empty((cols, rows), dtype=torch.int8 if grid.low < 0 else torch.uint8)
    fitted: list[Fitted | None] = [None] * (cols // width)
    errors = torch.empty_like(aim)
    step = max(_BLOCK // width, 1) * width
    for begin in range(0, cols, step):
        end = min(begin + step, cols)
        values = aim[begin:end].clone()
        if begin:
            values.sub_((factor[:begin, begin:end] / diagonal[begin:end]).T @ errors[:begin])
        parts = factor[begin:end, begin:end] / diagonal[begin:end]
        for first in range(0, end - begin, width):
            window, here = slice(first, first + width), slice(begin + first, begin + first + width)
            value = values[window]
            if first:
                value.addmm_(parts[:first, window].T, errors[begin : begin + first], alpha=-1.0)
            own = inputs.order[here]
            number = int(own.min()) // width
            places = own - number * width
            back = torch.empty_like(places)
            back[places] = torch.arange(width)
            expected = aim[here] + _made_up(value - aim[here], factor[here, here])
            found = fitted[number] = grid.fit(expected[back], counts[here][back])
            scale, minimum, inverse = found.scale, found.minimum, _inverse(found.scale)
            later, added = parts[window, window], errors[here]
            torch.neg(aim[here], out=added)
            for column, (group, place) in enumerate(zip((places // grid.group).tolist(), own.tolist(), strict=True)):
                level = (value[column] - minimum[group]).mul_(inverse[group]).round_().clamp_(grid.low, grid.high)
                q[place] = level
                added[column].add_(level.mul_(scale[group]).add_(minimum[group]))
                if column + 1 < width:
                    value[column + 1 :].addr_(later[column, column + 1 :], added[column], alpha=-1.0)
    return Rounded(grid, q, [each for each in fitted if each is not None]), errors


def _made_up(shares: Tensor, factor: Tensor) -> Tensor:
    """What columns would have added to them if they were not rounded, of the shares [cols, rows] that each takes of
    what columns before them have added."""
    found: Tensor = torch.linalg.solve_triangular(factor.T, shares.mul_(factor.diagonal()[:, None]), upper=False)
    return found


def _choose_again(found: Rounded, aim: Tensor, errors: Tensor, slopes: Tensor, inputs: Inputs) -> None:
    """The best levels of each group and the best one of each column, with all others as they are.

    Args:
        found, errors, slopes: changed.
        aim, errors: [cols, rows] in order, what is to be rounded and what that has added. slopes: squares @ errors.
    """
    grid, order = found.grid, inputs.order
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
            wanted = error[column] - slope[column] / diagonal[first + column]
            wanted.add_(aim[first + column]).sub_(fitted.minimum[group])
            level = wanted.mul_(inverses[number][group]).round_().clamp_(grid.low, grid.high)
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
