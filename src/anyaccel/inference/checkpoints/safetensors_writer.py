# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint of safetensors files one tensor at a time, after all sizes are known. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from anyaccel.safetensors.header import BITS, make_header

_MAX_FILE_BYTES = 4 << 30


@dataclass(frozen=True)
class Planned:
    """A tensor that will be written."""

    name: str
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


class SafetensorsWriter:
    """The files of one checkpoint in `folder`; tensors are written in the order of `planned`."""

    def __init__(self, folder: Path, planned: Sequence[Planned], metadata: dict[str, str]) -> None:
        self._folder = folder
        self._metadata = metadata
        self._files = _divided(planned)
        self.total = sum(each.bytes for each in planned)
        self._names = [self._name(number) for number in range(len(self._files))]
        self._file: BinaryIO | None = None
        self._number = -1
        self._left: list[Planned] = []

    def _name(self, number: int) -> str:
        if len(self._files) == 1:
            return "model.safetensors"
        return f"model-{number + 1:05}-of-{len(self._files):05}.safetensors"

    def write(self, name: str, parts: Iterable[Any]) -> int:
        """Write the next tensor from contiguous arrays, in order; returns its size."""
        if not self._left:
            self._open_next()
        assert self._file is not None
        expected = self._left.pop(0)
        size = 0
        for part in parts:
            size += self._file.write(memoryview(part).cast("B"))
        assert (expected.name, expected.bytes) == (name, size), (expected, name, size)
        return size

    def _open_next(self) -> None:
        self.close()
        self._number += 1
        self._left = list(self._files[self._number])
        header, _ = make_header([(each.name, each.dtype, each.shape) for each in self._left], self._metadata)
        self._file = (self._folder / self._names[self._number]).open("wb")
        self._file.write(header)

    def finish(self) -> None:
        """Close the last file and write the index of several."""
        self.close()
        assert self._number == len(self._files) - 1 and not self._left
        if len(self._files) > 1:
            weight_map = {each.name: name for name, file in zip(self._names, self._files, strict=True) for each in file}
            index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _divided(planned: Sequence[Planned]) -> list[list[Planned]]:
    files: list[list[Planned]] = [[]]
    size = 0
    for each in planned:
        if files[-1] and size + each.bytes > _MAX_FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(each)
        size += each.bytes
    return files
