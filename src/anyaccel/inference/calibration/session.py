# SPDX-License-Identifier: Apache-2.0
"""One calibrated quantisation: its text, the blocks, and the matrices in the order in which they are written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anyaccel.errors import ModelError
from anyaccel.inference.calibration.blocks import Blocks
from anyaccel.inference.calibration.compensation import Inputs, Rounded, compensated, nearest
from anyaccel.inference.calibration.folds import folds_of
from anyaccel.inference.calibration.grids import Grid
from anyaccel.inference.calibration.layers import ENOUGH_BITS, Matrix, Progress, QuantisedBlock, quantised_blocks
from anyaccel.inference.calibration.mixed import Outside, mixed
from anyaccel.inference.calibration.text import TOKENS, calibration_windows
from anyaccel.inference.checkpoints.stored_values import floats_of
from anyaccel.inference.families.registry import family_of


class Calibration:
    """The matrices of a checkpoint's blocks, calibrated on a text.

    Args:
        source: tensors under Hugging Face's names.
        text: a file, or "builtin".
        tokens: of it that are used; None: what is enough.

    Raises:
        UsageError: the text. Unsupported, ModelError: the model.
    """

    def __init__(
        self,
        model: Path,
        source: Any,
        config: dict[str, Any],
        text: str,
        tokens: int | None,
        announce: Callable[[str], object] | None,
        progress: Progress | None,
    ) -> None:
        windows = calibration_windows(model, text, TOKENS if tokens is None else tokens, announce)
        self.told = {"text": text, "tokens": windows.numel()}
        self._progress = progress or (lambda done, total: None)
        self._blocks = Blocks(source, config, windows, str(model))
        self._source = source
        self._grids: dict[str, Grid] = {}
        self._squares: dict[str, Tensor] = {}  # of embedding and head
        self._inputs: dict[str, Inputs] = {}  # made of them
        family = family_of(config)
        self._folds = folds_of(family.spec(config), family.names, source)
        self._plus = {fold.norm: fold.plus for fold in self._folds.values() if fold.norm}
        self._found: dict[str, Matrix] = {}
        self._divisors: dict[str, Tensor] = {}
        self._done = 0  # blocks
        self._each: Iterator[QuantisedBlock] = iter(())

    def linears(self) -> dict[str, int]:
        """The matrices that can be calibrated, and how many weights each has."""
        return self._blocks.linears()

    def choose(
        self, menus: Mapping[str, Sequence[Grid]], bits: float | None = None, outside: Outside | None = None
    ) -> dict[str, Grid]:
        """Take the matrices of the blocks among these, each in one of its grids (by `bits`; else the first).

        Returns the grid of each that was taken; with `outside` those of embedding and head too.
        """
        linears = self._blocks.linears()
        beside = {} if outside is None else {name: menus[name] for name in (outside.embedding, outside.head)}
        menus = {name: menu for name, menu in menus.items() if name in linears}
        if not menus:
            raise ModelError(f"{self._blocks.where}: its blocks have no nn.Linear that could be calibrated")
        if bits is None:
            self._grids = {name: menu[0] for name, menu in menus.items()}
        else:
            self._grids = mixed(self._blocks, {**menus, **beside}, bits, outside, self._squares)
        embedded = None if outside is None else self._embedded(outside.embedding)
        self._each = quantised_blocks(self._blocks, self._grids, self._folds, self._progress, embedded)
        return self._grids

    def _embedded(self, name: str) -> list[Tensor]:
        """The hidden states before the first block with the embedding as it is rounded."""
        used = sorted(set(self._blocks.windows.flatten().tolist()))
        places = torch.searchsorted(torch.tensor(used), self._blocks.windows)
        tensor = self._source.tensor(name)
        rows = torch.cat([torch.from_numpy(floats_of(tensor, range(i, i + 1))) for i in used])
        self._source.release(name)
        added = (self.rounded(name, rows).values() - rows)[places]
        hidden = torch.cat(self._blocks.hidden)
        plain = rows[places]
        factor = float((hidden * plain).sum() / plain.square().sum())  # some models multiply what they look up
        return [each[None] for each in hidden + factor * added]

    def rounded(self, name: str, rows: Tensor) -> Rounded:
        """Rows of embedding or head in the grid that was chosen, errors made up for."""
        if name not in self._inputs:
            self._inputs[name] = Inputs(self._squares.pop(name), self._grids[name].width)
        grid = self._grids[name]
        if grid.bits >= ENOUGH_BITS:
            return nearest(rows, grid, self._inputs[name].importance)
        return compensated(rows, grid, self._inputs[name])

    def keep(self, vectors: Collection[str]) -> None:
        """Divide no vectors but these: others cannot be written changed."""
        self._folds = {name: fold for name, fold in self._folds.items() if not fold.norm or fold.norm in vectors}

    def place(self, name: str) -> int:
        """Where in the order of computation a tensor stands; 0 before all blocks."""
        return self._blocks.place(name)

    def has(self, name: str) -> bool:
        return name in self._grids and self.place(name) > 0

    def matrix(self, name: str) -> Matrix:
        """The next one in the order of `place`; blocks are computed as they are needed."""
        self._reach(name)
        return self._found.pop(name)

    def divided(self, name: str) -> tuple[Any, float] | None:
        """What a vector of a block is to be divided by [values] (numpy), once this is added to it; None: nothing."""
        if name not in self._plus:
            return None
        self._reach(name)
        found = self._divisors.pop(name, None)
        return None if found is None else (found.numpy(), self._plus[name])

    def _reach(self, name: str) -> None:
        while self._done < self.place(name):
            block = next(self._each)
            self._found |= block.matrices
            self._divisors |= block.divisors
            self._done += 1


def as_rows(rounded: Rounded) -> tuple[Any, Any, Any]:
    """q [rows, cols] of whole numbers, their scales and zero points [rows, groups] (numpy)."""
    scales, zeros = (rounded.codes(name).T.contiguous().numpy() for name in ("scale", "zero"))
    return rounded.q.T.contiguous().numpy(), scales, zeros
