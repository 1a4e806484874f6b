# SPDX-License-Identifier: Apache-2.0
"""One calibrated quantisation: its text, the blocks, and the matrices in the order in which they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.calibration.blocks import Blocks
from anyaccel.inference.calibration.compensation import Rounded
from anyaccel.inference.calibration.grids import Grid
from anyaccel.inference.calibration.layers import Matrix, Progress, quantised_blocks
from anyaccel.inference.calibration.mixed import mixed
from anyaccel.inference.calibration.text import TOKENS, calibration_windows


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
        self._grids: dict[str, Grid] = {}
        self._found: dict[str, Matrix] = {}
        self._each: Iterator[dict[str, Matrix]] = iter(())

    def choose(self, menus: Mapping[str, Sequence[Grid]], bits: float | None = None) -> dict[str, Grid]:
        """Take the matrices of the blocks among these, each in one of its grids (by `bits`; else the first).

        Returns the grid of each that was taken.
        """
        linears = self._blocks.linears()
        menus = {name: menu for name, menu in menus.items() if name in linears}
        if not menus:
            raise ModelError(f"{self._blocks.where}: its blocks have no nn.Linear that could be calibrated")
        if bits is None:
            self._grids = {name: menu[0] for name, menu in menus.items()}
        else:
            self._grids = mixed(self._blocks, menus, bits)
        self._each = quantised_blocks(self._blocks, self._grids, self._progress)
        return self._grids

    def place(self, name: str) -> int:
        """Where in the order of computation a tensor stands; 0 before all blocks."""
        return self._blocks.place(name)

    def has(self, name: str) -> bool:
        return name in self._grids

    def matrix(self, name: str) -> Matrix:
        """The next one in the order of `place`; blocks are computed as they are needed."""
        while name not in self._found:
            self._found |= next(self._each)
        return self._found.pop(name)


def as_rows(rounded: Rounded) -> tuple[Any, Any, Any]:
    """q [rows, cols] of whole numbers, their scales and zero points [rows, groups] (numpy)."""
    scales, zeros = (rounded.codes(name).T.contiguous().numpy() for name in ("scale", "zero"))
    return rounded.q.T.contiguous().numpy(), scales, zeros
