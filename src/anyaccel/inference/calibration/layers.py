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
    steps = 2 * len(hidden) + 4
    done = 0

    def step(count: int = 1) -> None:
        nonlocal done
        done += count
        progress(done, steps * blocks.count)

    for number, block in enumerate(blocks):
        watch = watched(block, hidden, step)
        found: dict[str, Matrix] = {}
        for names, squares in zip(watch.sets, watch.squares, strict=True):
            with _threads(1 if len(squares) <= _MANY_COLUMNS else torch.get_num_threads()):
                found |= _quantised_set(block, [name for name in names if name in grids], grids, squares)
        watch.squares.clear()
        done = number * steps + len(hidden) + 4
        step(0)
        for index, each in enumerate(hidden):
            hidden[index] = block.run(each)
            step()
        yield found


def watched(block: Block, hidden: list[Tensor], step: Callable[[], object] | None = None) -> Watch:
    """What the block's linear layers are given when hidden states go through it."""
    watch = Watch(block.linears)
    try:
        for each in hidden:
            block.run(each)
            watch.next_window()
            if step is not None:
                step()
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


def _quantised_set(block: Block, names: list[str], grids: Mapping[str, Grid], squares: Tensor) -> dict[str, Matrix]:
    """Matrices with the same inputs, and hence with one width; the block goes on with their values."""
    if not names:
        return {}
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
                inputs = Inputs(squares.clone(), grid.width)
            rounded = compensated(weight.detach(), grid, inputs)
        values = rounded.values()
        difference = float((values - weight).double().square().sum())
        found[name] = Matrix(rounded, (difference, float(weight.double().square().sum())))
        weight.data = values
    return found
