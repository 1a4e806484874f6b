# SPDX-License-Identifier: Apache-2.0
"""Matrices of a GGUF file in a type that native code cannot read, converted to a native format that can hold them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.gguf_types import BLOCK_BYTES, HELD
from anyaccel.inference.checkpoints.mapped_file import MappedFile
from anyaccel.inference.checkpoints.sources import TensorView
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.inference.spec.packed_formats import FORMATS, Format, ScaleKind

_LEAST_GROUP = 16
_SAMPLES = 4  # rows, read before the format is chosen
_LEAST, _MOST = 2.0**-14, 2.0**15  # scales in this range have full precision as halves


@functools.cache
def _index(codes: tuple[int, ...]) -> Any:
    """The first code of each value (as a byte); 0 for a value without a code."""
    import numpy

    table = numpy.zeros(256, numpy.uint8)
    for code, value in reversed(list(enumerate(codes))):
        table[value & 255] = code
    return table


@dataclass(frozen=True)
class GgufBlocks:
    """A matrix (or a stack of them) of a type in HELD."""

    where: str
    type: str
    shape: tuple[int, ...]
    file: MappedFile
    begin: int
    row_bytes: int
    transposed: bool = False
    order: Sequence[int] | None = None
    plus: float = 0.0

    @functools.cached_property
    def _fits_halves(self) -> bool:
        """Whether the scales can be halves, judged by the largest scale of a few rows."""
        import numpy

        held = HELD[self.type]
        if not held.fractions:
            return True
        count = math.prod(self.shape[:-1])
        rows = sorted({number * (count - 1) // max(_SAMPLES - 1, 1) for number in range(_SAMPLES)})
        scales, _ = held.levels(self._stored(rows).reshape(-1, BLOCK_BYTES[self.type][1]))
        most = float(numpy.abs(scales).max())
        return most == 0 or _LEAST <= most <= _MOST

    def format(self, cols: range) -> Format:
        """The native format that holds these columns; bfloat16 if scales do not fit halves or columns are unaligned."""
        kind, group, minimum = HELD[self.type].format
        while group > _LEAST_GROUP and cols.start % group:
            group //= 2
        if not self._fits_halves or cols.start % group:
            return ("bf16", 0, False)
        return (kind if group in FORMATS[kind].groups else "i8", group, minimum)

    def with_own_scales(self, cols: range) -> tuple[ScaleKind, TensorView] | None:
        """The matrix as `_llm` reads it, if these columns are whole blocks of a type that it reads."""
        values, kind = BLOCK_BYTES[self.type][0], HELD[self.type].read_as
        if kind is None or cols.start % values or len(cols) % values:
            return None
        strides = (self.row_bytes, BLOCK_BYTES[self.type][1])
        return kind, TensorView(
            self.where, self.type, self.shape, strides, self.file.address + self.begin, file=self.file
        )

    def entry(self, index: int) -> GgufBlocks:
        """One entry of a stack."""
        rows = math.prod(self.shape[1:-1])
        return replace(self, shape=self.shape[1:], begin=self.begin + index * rows * self.row_bytes)

    def will_need(self) -> None:
        self.file.will_need(self.begin, self.begin + math.prod(self.shape[:-1]) * self.row_bytes)

    def _stored(self, rows: Any) -> Any:
        """The bytes of stored rows [rows, row_bytes], copied so that the file's pages can be dropped."""
        import numpy

        count = math.prod(self.shape[:-1])
        length = count * self.row_bytes
        whole = numpy.frombuffer(self.file.bytes(self.begin, length), numpy.uint8).reshape(count, self.row_bytes)
        if isinstance(rows, range) and rows.step == 1:
            chosen = whole[rows.start : rows.stop].copy()
            self.file.drop(self.begin + rows.start * self.row_bytes, self.begin + rows.stop * self.row_bytes)
        else:
            chosen = whole[numpy.asarray(rows)]
            self.file.drop(self.begin, self.begin + length)
        return chosen

    def _dequantised(self, stored: Any) -> Any:
        """float32 [rows, all columns]."""
        try:
            from gguf import GGMLQuantizationType, dequantize
        except ImportError as error:
            raise ModelError(f"{self.where}: type {self.type} needs the package gguf: pip install gguf") from error
        try:
            return dequantize(stored, GGMLQuantizationType[self.type.upper()])
        except (NotImplementedError, KeyError) as error:
            raise Unsupported(f"GGUF type {self.type} ({self.where}: the package gguf cannot read it)") from error

    def floats(self, rows: Any, cols: range) -> Any:
        """float32 [rows, cols]."""
        import numpy

        return numpy.ascontiguousarray(self._dequantised(self._stored(rows))[:, cols.start : cols.stop], numpy.float32)

    def values(self, rows: Any, cols: range, group: int) -> tuple[Any, Any, Any]:
        """As `ConvertedTensor` has it, in the bits of `format`; `group` divides its own."""
        import numpy

        held = HELD[self.type]
        stored = self._stored(rows)
        count = len(stored)
        blocks = stored.reshape(-1, BLOCK_BYTES[self.type][1])
        scales, minima = held.levels(blocks)
        scales = scales.reshape(count, -1)
        if minima is not None:
            minima = minima.reshape(count, -1)
        held_as = FORMATS[self.format(cols)[0]]
        coded = held.codes is not None and held_as is FORMATS[held.format[0]]
        if coded:
            assert held.codes is not None
            q = held.codes(blocks).reshape(count, -1)
        else:
            steps = self._dequantised(stored).reshape(count, scales.shape[1], -1)
            if minima is not None:
                steps = steps - minima[..., None]
            # With a scale of zero all values are zero; with one of NaN all are NaN.
            with numpy.errstate(over="ignore", invalid="ignore"):
                inverse = numpy.divide(1, scales, out=numpy.zeros_like(scales), where=scales != 0)
                q = numpy.rint(steps * inverse[..., None]).reshape(count, -1).astype(numpy.int8)
        if held_as.codes is not None:
            q = _index(held_as.codes)[q.view(numpy.uint8)]
        elif held_as.bits < 8:
            if minima is None:
                q, minima = q if coded else q + numpy.int8(held_as.zero), -held_as.zero * scales
            q = q.view(numpy.uint8) & ((1 << held_as.bits) - 1)
        of = numpy.arange(cols.start, cols.stop, group) * scales.shape[1] // self.shape[-1]
        dense = numpy.ascontiguousarray
        return (
            dense(q[:, cols.start : cols.stop]),
            dense(scales[:, of], numpy.float32),
            None if minima is None else dense(minima[:, of], numpy.float32),
        )


@dataclass(frozen=True)
class TransposedBlocks:
    """The transpose of a quantised matrix: its blocks run along the columns here, and its values are rounded to 8 bits.

    Latent attention (DeepSeek) has the keys' part of kv_b so, of which a GGUF file has the transpose.
    """

    stored: GgufBlocks
    transposed: bool = True
    order: Sequence[int] | None = None
    plus: float = 0.0

    @property
    def where(self) -> str:
        return self.stored.where

    @property
    def type(self) -> str:
        return self.stored.type

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[::-1]

    def format(self, cols: range) -> Format:
        group = next((each for each in (32, 16) if cols.start % each == 0), 0)
        return ("i8", group, False) if group else ("bf16", 0, False)

    def will_need(self) -> None:
        self.stored.will_need()

    def values(self, rows: Any, cols: range, group: int) -> tuple[Any, Any, Any]:
        """As `ConvertedTensor` has it: int8, with the scale that the largest value of a group has."""
        import numpy

        floats = self.floats(rows, cols)
        padded = numpy.pad(floats, ((0, 0), (0, -len(cols) % group))).reshape(len(floats), -1, group)
        scales = (numpy.abs(padded).max(-1) / 127).astype(numpy.float16).astype(numpy.float32)
        inverse = numpy.divide(1, scales, out=numpy.zeros_like(scales), where=scales != 0)
        q = numpy.clip(numpy.rint(padded * inverse[..., None]), -127, 127).astype(numpy.int8)
        return numpy.ascontiguousarray(q.reshape(len(floats), -1)[:, : len(cols)]), scales, None

    def floats(self, rows: Any, cols: range) -> Any:
        """float32 [rows, cols]."""
        import numpy

        whole = self.stored.floats(cols, range(self.stored.shape[1]))
        return numpy.ascontiguousarray(whole[:, numpy.asarray(rows)].T)
