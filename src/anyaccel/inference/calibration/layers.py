# SPDX-License-Identifier: Apache-2.0
"""Quantises a model's blocks one after another, each on the inputs that the quantised ones before it give."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anyaccel.errors import ModelError
from anyaccel.inference.calibration.blocks import Block, Blocks, Watch
from anyaccel.inference.calibration.compensation import Inputs, Rounded, compensated, nearest
from anyaccel.inference.calibration.grids import Grid

Progress = Callable[[int, int], object]
_ENOUGH_BITS = 7.0  # rounding to so many costs nothing that could be made up for
_STEPS = 1000  # of progress, a block
_MANY_COLUMNS = 2048  # up to which one thread rounds a matrix: it takes thousands of short steps


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix.

    Attributes:
        errors: the squared sums of error and values.
    """

    rounded: Rounded
    errors: tuple[float, float]


def quantised_blocks(blocks: Blocks, grids: Mapping[str, Grid], progress: Progress) -> Iterator[dict[str, Matrix]]:
    """The matrices of each block by their names in the checkpoint; those that `grids` names.

    Args:
        progress: called with (steps done, steps in all).
    """
    hidden = blocks.hidden
    exact = [each.clone() for each in hidden]  # as they would be if nothing were rounded
    for number, block in enumerate(blocks):

        def part(share: float, number: int = number) -> None:
            progress(round((number + share) * _STEPS), blocks.count * _STEPS)

        yield _quantised_block(block, grids, exact, hidden, part)


def _quantised_block(
    block: Block, grids: Mapping[str, Grid], exact: list[Tensor], hidden: list[Tensor], part: Callable[[float], object]
) -> dict[str, Matrix]:
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
    for place, names in enumerate(wanted.sets):
        taken = [name for name in names if name in grids]
        if taken:
            squares, drift = _moments(block, names[0], wanted.kept[place], hidden)
            with _threads(1 if len(squares) <= _MANY_COLUMNS else torch.get_num_threads()):
                found |= _quantised_set(block, taken, grids, squares, drift)
        wanted.kept[place].clear()
        part(0.3 + 0.5 * (place + 1) / len(wanted.sets))
    for index, each in enumerate(hidden):
        hidden[index] = block.run(each)
        part(0.8 + 0.2 * (index + 1) / count)
    return found


def _moments(block: Block, name: str, exact: list[Tensor], hidden: list[Tensor]) -> tuple[Tensor, Tensor]:
    """X^T X and (Y - X)^T X of the inputs X of a linear layer; Y as they would be if nothing were rounded."""
    cols = exact[0].shape[-1]
    squares, drift = torch.zeros(cols, cols), torch.zeros(cols, cols)
    for wanted, each in zip(exact, hidden, strict=True):
        given = block.inputs(name, each)
        squares.addmm_(given.T, given)
        drift.addmm_((wanted.float() - given).T, given)
    return squares, drift


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


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """That many threads of torch: where cores are shared, each short step would wait for all of them to get one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _quantised_set(
    block: Block, names: list[str], grids: Mapping[str, Grid], squares: Tensor, drift: Tensor
) -> dict[str, Matrix]:
    """Matrices with the same inputs, and hence with one width; the block goes on with their values."""
    if not bool(torch.isfinite(squares).all()):
        raise ModelError(f"{names[0]}: its inputs are infinite or not numbers on the calibration text")
    inputs: Inputs | None = None
    found = {}
    for name in names:
        grid = grids[name]
        weight = block.linears[name].weight
        if grid.bits >= _ENOUGH_BITS:
            rounded = nearest(weight.detach(), grid, squares.diagonal() if inputs is None else inputs.importance)
        else:
            if inputs is None or inputs.width != grid.width:
                inputs = Inputs(squares.clone(), grid.width, drift)
            rounded = compensated(weight.detach(), grid, inputs)
        values = rounded.values()
        difference = float((values - weight).double().square().sum())
        found[name] = Matrix(rounded, (difference, float(weight.double().square().sum())))
        weight.data = values
    return found
