# SPDX-License-Identifier: Apache-2.0
"""Quantises a model's blocks one after another, each on the inputs that the quantised ones before it give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anyaccel.errors import ModelError
from anyaccel.inference.calibration.blocks import Block, Blocks, Replay, Watch
from anyaccel.inference.calibration.compensation import Inputs, Rounded, compensated, nearest, rounded_to
from anyaccel.inference.calibration.folds import Fold, storable
from anyaccel.inference.calibration.grids import Grid

Progress = Callable[[int, int], object]
ENOUGH_BITS = 7.0  # rounding to so many costs nothing that could be made up for
_STEPS = 1000  # of progress, a block
_STRIPS = 8  # in which the half of a symmetric matrix is computed
_POWERS = (0.0, 0.15, 0.3, 0.45)  # of how much columns count, that their scales can be
_TRIED_ROWS = 48  # of a matrix, on which scales are compared
_MOST_SCALED = 8.0
_WORTH_IT = 0.99  # of the error without scales, that one with them may have at most


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix.

    Attributes:
        errors: the squared sums of error and values.
    """

    rounded: Rounded
    errors: tuple[float, float]


@dataclass(frozen=True)
class QuantisedBlock:
    """What has become of a block, by the names of the checkpoint.

    Attributes:
        matrices: that were quantised.
        divisors: of vectors, whose values (plus one, where they are multiplied with one more) are to be divided.
    """

    matrices: dict[str, Matrix]
    divisors: dict[str, Tensor]


def quantised_blocks(
    blocks: Blocks,
    grids: Mapping[str, Grid],
    folds: Mapping[str, Fold],
    progress: Progress,
    embedded: list[Tensor] | None = None,
) -> Iterator[QuantisedBlock]:
    """Each block, the matrices that `grids` names quantised.

    Args:
        folds: by the first of the matrices that are scaled.
        progress: called with (steps done, steps in all).
        embedded: the hidden states before the first block, where rounding of the embedding has changed them.
    """
    exact = blocks.hidden  # as they would be if nothing were rounded
    hidden = [each.clone() for each in exact] if embedded is None else embedded
    for number, block in enumerate(blocks):

        def part(share: float, number: int = number) -> None:
            progress(round((number + share) * _STEPS), blocks.count * _STEPS)

        yield _quantised_block(block, grids, folds, exact, hidden, part)


def _quantised_block(
    block: Block,
    grids: Mapping[str, Grid],
    folds: Mapping[str, Fold],
    exact: list[Tensor],
    hidden: list[Tensor],
    part: Callable[[float], object],
) -> QuantisedBlock:
    """One block's matrices, those that are computed first before the others; hidden states become its outputs."""
    count = len(hidden)
    wanted = Watch(block.linears, keep=True)
    try:
        for index, each in enumerate(exact):
            exact[index] = block.run(each)
            wanted.next_window()
            part(0.3 * (index + 1) / count)
    finally:
        wanted.close()
    found: dict[str, Matrix] = {}
    divisors: dict[str, Tensor] = {}
    replay = Replay(block.linears)
    try:
        for place, names in enumerate(wanted.sets):
            taken = [name for name in names if name in grids]
            if taken:
                squares, drift = _moments(block, names[0], wanted.kept[place], hidden, replay)
                fold = next((folds[name] for name in taken if name in folds), None)
                _quantised_set(block, taken, grids, squares, drift, fold, found, divisors)
            replay.final.update(names)
            wanted.kept[place].clear()
            part(0.3 + 0.5 * (place + 1) / len(wanted.sets))
        for index, each in enumerate(hidden):
            replay.window = index
            hidden[index] = block.run(each)
            part(0.8 + 0.2 * (index + 1) / count)
    finally:
        replay.close()
    return QuantisedBlock(found, divisors)


def _moments(
    block: Block, name: str, exact: list[Tensor], hidden: list[Tensor], replay: Replay
) -> tuple[Tensor, Tensor]:
    """X^T X and (Y - X)^T X of the inputs X of a linear layer; Y as they would be if nothing were rounded."""
    cols = exact[0].shape[-1]
    squares, both = torch.zeros(cols, cols), torch.zeros(cols, cols)
    step = -(-cols // _STRIPS)
    for index, each in enumerate(hidden):
        replay.window = index
        given = block.inputs(name, each)
        for first in range(0, cols, step):  # the upper triangle, as strips
            squares[first : first + step, first:].addmm_(given[:, first : first + step].T, given[:, first:])
        both.addmm_(exact[index].float().T, given)
    for first in range(step, cols, step):
        squares[first:, first - step : first] = squares[first - step : first, first:].T
    return squares, both.sub_(squares)


def watched(block: Block, hidden: list[Tensor]) -> Watch:
    """What the block's linear layers are given when hidden states go through it."""
    watch = Watch(block.linears)
    try:
        for each in hidden:
            block.run(each)
            watch.next_window()
    finally:
        watch.close()
    return watch


def _quantised_set(
    block: Block,
    names: list[str],
    grids: Mapping[str, Grid],
    squares: Tensor,
    drift: Tensor,
    fold: Fold | None,
    found: dict[str, Matrix],
    divisors: dict[str, Tensor],
) -> None:
    """Matrices with the same inputs, and hence with one width; the block goes on with their values.

    Args:
        fold: where their columns' scales can go.
        found, divisors: take the matrices, and what vectors are to be divided by.
    """
    if not bool(torch.isfinite(squares).all()):
        raise ModelError(f"{names[0]}: its inputs are infinite or not numbers on the calibration text")
    inputs: Inputs | None = None
    scale: Tensor | None = None
    if fold is not None and set(fold.readers) == set(names):
        grid = grids[names[0]]
        if all(grids[name] == grid and grid.bits < ENOUGH_BITS for name in names):
            inputs = Inputs(squares.clone(), grid.width, drift)
            scale = _scale(block, fold, grid, inputs, found, divisors)
    by_grid: dict[Grid, list[str]] = {}
    for name in names:
        by_grid.setdefault(grids[name], []).append(name)
    for grid, alike in by_grid.items():
        weights = [block.linears[name].weight.detach() for name in alike]
        together = torch.cat(weights)
        width = grid.width if grid.bits < ENOUGH_BITS else 1
        if inputs is None or inputs.width != width:
            inputs = Inputs(squares.clone(), width, drift)
        if grid.bits >= ENOUGH_BITS:  # what rounding adds needs no making up for, drift does
            rounded = nearest(inputs.aimed(together), grid, inputs.importance)
        else:
            rounded = compensated(together, grid, inputs if scale is None else inputs.scaled(scale))
        for name, weight, part in zip(alike, weights, rounded.split([len(each) for each in weights]), strict=True):
            values = part.values() if scale is None else part.values() / scale
            difference = float((values - weight).double().square().sum())
            found[name] = Matrix(part, (difference, float(weight.double().square().sum())))
            block.linears[name].weight.data = values


def _scale(
    block: Block, fold: Fold, grid: Grid, inputs: Inputs, found: dict[str, Matrix], divisors: dict[str, Tensor]
) -> Tensor | None:
    """The scales of columns that lose least, of some rows; None when none are better by enough.

    What they are divided out of is divided.
    """
    some = torch.cat([w[:: max(len(w) // _TRIED_ROWS, 1)] for w in (block.linears[n].weight for n in fold.readers)])
    if fold.rows and fold.rows not in found:
        return None
    # A column counts by how far its inputs go; large weights would become larger than their groups have levels for.
    ratio = inputs.spread() / some.square().mean(0).sqrt().clamp(min=1e-12)
    ratio = torch.where(inputs.dead | ~(ratio > 0), torch.ones_like(ratio), ratio)
    norm = block.vector(fold.norm).float() + fold.plus if fold.norm else None
    plain = inputs.aim(some)
    best: Tensor | None = None
    least = 0.0
    for power in _POWERS:
        scale = (ratio / ratio.log().mean().exp()).pow(power).clamp(1 / _MOST_SCALED, _MOST_SCALED)
        scale = fold.alike(scale) if norm is None else storable(scale, norm)
        scaled = inputs.scaled(scale)
        aim = plain * scale[inputs.order, None]
        lost = float(scaled.lost(rounded_to(aim, grid, scaled, again=0), aim).double().sum())
        if power == 0:
            least = lost * _WORTH_IT
        elif lost < least:
            best, least = scale, lost
    if best is None:
        return None
    if fold.rows:
        before = found[fold.rows]
        divided = before.rounded.divided(fold.of_rows(best))
        if divided is None:
            return None
        found[fold.rows] = Matrix(divided, before.errors)
    else:
        divisors[fold.norm] = best
    return best
