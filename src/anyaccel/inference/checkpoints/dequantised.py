# SPDX-License-Identifier: Apache-2.0
"""Reads quantised model folders as torch's floats, for models that run with their own code."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from anyaccel import _llm
from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.folder_files import has_safetensors
from anyaccel.inference.checkpoints.quantised import folder_config, quantisation_of, quantised_source
from anyaccel.inference.checkpoints.quantised_layout import (
    Dequantised,
    QuantisedSource,
    QuantisedTensor,
    StoredMatrix,
    cost_of,
)
from anyaccel.inference.checkpoints.slices import Slice
from anyaccel.inference.checkpoints.sources import entry_of, folder_source
from anyaccel.inference.checkpoints.torch_files import Checkpoint
from anyaccel.inference.spec.packed_formats import QUANTISED

_ROWS_AT_ONCE = 256  # that are unpacked: a few megabytes


class DequantisedCheckpoint(Checkpoint):
    """A folder whose quantised matrices are read as float32 under the names of plain ones; others are as they are."""

    def __init__(self, folder: Path, source: QuantisedSource) -> None:
        super().__init__(folder)
        self._folder = folder
        self._source = source

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def names(self) -> set[str]:
        return set(self._source.names())

    def is_quantised(self, name: str) -> bool:
        return self._source.is_quantised(name)

    def same(self, one: str, other: str) -> bool:
        if self._source.is_quantised(one) or self._source.is_quantised(other):
            return one == other  # not compared: nobody stores one quantised matrix under two names
        return super().same(one, other)

    def plain_tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All tensors, the quantised ones in `dtype`."""
        found = {}
        for name in self._source.names():
            if self._source.is_quantised(name):
                found[name] = self.read(name, torch.Size(_shape(self._source.tensor(name))), None).to(dtype)
            else:
                found[name] = self._tensor(name)
        return found

    def read(self, name: str, shape: torch.Size, part: Slice | None) -> torch.Tensor:
        if not self._source.is_quantised(name):
            return super().read(name, shape, part)
        matrix = self._source.tensor(name)
        if _shape(matrix) != tuple(shape):
            raise ModelError(
                f"{matrix.where} stands for {_shape(matrix)}, the model's configuration needs {tuple(shape)}"
            )
        wanted = [list(range(size)) for size in shape]
        if part is not None:
            wanted[part.dim] = [index for piece in part.ranges for index in piece]
        if len(shape) == 2:
            return _floats(matrix, wanted[0], wanted[1])
        return torch.stack([_floats(entry_of(matrix, index), *wanted[1:]) for index in wanted[0]])

    def held(self, name: str, part: Slice | None) -> HeldRows | None:
        """`part` of a quantised matrix for a packed format; None if none holds it."""
        matrix = self._source.tensor(name) if self._source.is_quantised(name) else None
        if matrix is None or len(matrix.shape) != 2 or matrix.transposed:
            return None
        wanted: list[list[int] | range] = [range(size) for size in matrix.shape]
        if part is not None:
            chosen = [index for piece in part.ranges for index in piece]
            wanted[part.dim] = _range(chosen) or chosen
        rows, cols = wanted
        if not isinstance(cols, range) or matrix.format(cols)[0] not in QUANTISED:
            return None
        return HeldRows(matrix, rows, cols)

    def cost(self, floats: Collection[str]) -> str:
        """What it costs that floats are made of these quantised matrices, in one line."""
        found = []
        for name in filter(self._source.is_quantised, floats):
            matrix = self._source.tensor(name)
            found.append(Dequantised(matrix.type, True, matrix.stored_bytes, 2 * math.prod(matrix.shape), "bf16"))
        return cost_of(found, "the model's own code multiplies floats, and dtype int8 rounds them")


@dataclass(frozen=True)
class HeldRows:
    """Some rows and columns of a quantised matrix that a packed format holds."""

    matrix: StoredMatrix
    rows: Sequence[int]
    cols: range

    def pack(self) -> _llm.Linear:
        """The packed matrix: no value is rounded."""
        form, group, minimum = self.matrix.format(self.cols)
        packed = _llm.Linear(len(self.rows), len(self.cols), form, group, minimum)
        assert isinstance(self.matrix, QuantisedTensor)
        for first in range(0, len(self.rows), _ROWS_AT_ONCE):
            chosen = self.rows[first : first + _ROWS_AT_ONCE]
            q, scales, minima = self.matrix.values(chosen, self.cols, group)
            added = minima.ctypes.data if minimum else 0
            packed.set_quantised_rows(first, len(chosen), q.ctypes.data, scales.ctypes.data, added)
        return packed


def _shape(matrix: StoredMatrix) -> tuple[int, ...]:
    """Of the plain matrix or stack."""
    *more, rows, cols = matrix.shape
    return (*more, cols, rows) if matrix.transposed else (*more, rows, cols)


def _floats(matrix: StoredMatrix, rows: list[int], cols: list[int]) -> torch.Tensor:
    """float32 [rows, cols] of the plain matrix."""
    if matrix.transposed:
        rows, cols = cols, rows
    values = torch.from_numpy(matrix.floats(_range(rows) or rows, _range(cols) or range(matrix.shape[-1])))
    values = values if _range(cols) else values[:, torch.tensor(cols)]
    return values.T if matrix.transposed else values


def _range(indices: list[int]) -> range | None:
    """The same as a range, if they are consecutive."""
    found = range(indices[0], indices[-1] + 1) if indices else range(0)
    return found if len(found) == len(indices) and indices == list(found) else None


def checkpoint_in(folder: Path) -> Checkpoint:
    """The weights of a model folder, quantised or not.

    Raises:
        ModelError: they cannot be read; the message says why.
    """
    config = folder_config(folder)
    if has_safetensors(folder) or quantisation_of(config).known():
        source = quantised_source(folder_source(folder), config)
        if isinstance(source, QuantisedSource):
            return DequantisedCheckpoint(folder, source)
    return Checkpoint(folder)
