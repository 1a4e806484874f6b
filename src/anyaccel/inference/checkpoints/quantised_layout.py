# SPDX-License-Identifier: Apache-2.0
"""The base class of quantised checkpoints, which offer stored tensors under the names of plain ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.sources import SafetensorsSource
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.outside import Values

_GROUPS = (128, 64, 32)
_GROUPS_OF_8_BITS = (32, 16)
_NUMPY = {"I32": "<i4", "I64": "<i8", "I8": "i1", "F16": "<f2", "F32": "<f4", "BF16": "<u2", "F8_E4M3": "u1"}


@dataclass(frozen=True)
class QuantisedTensor:
    """One quantised matrix [out, in], whose values are unpacked on demand.

    Attributes:
        bits: 4 or 8.
        group: number of columns that share a scale; 0: all.
        zero: the zero point of all groups if they have the same one, else None.
        group_of: the group of each column if groups are not consecutive (activation order).
    """

    where: str
    shape: tuple[int, ...]
    bits: int
    group: int
    zero: int | None
    layout: Layout
    stem: str
    type: str = "quantised"
    transposed: bool = False
    order: Sequence[int] | None = None
    plus: float = 0.0
    group_of: Any = None

    @property
    def _symmetric(self) -> bool:
        return self.zero == 1 << (self.bits - 1)

    def format(self, cols: range) -> tuple[str, int, bool]:
        """The native format that holds these columns; bfloat16 if groups are not consecutive or not aligned."""
        if self.bits == 8 and self.group == 0 and self.group_of is None and self._symmetric:
            return ("i8", 0, False)
        groups = _GROUPS_OF_8_BITS if self.bits == 8 else _GROUPS
        aligned = [each for each in groups if self.group % each == 0 and (not self.group or cols.start % each == 0)]
        if self.group_of is not None or not aligned:
            return ("bf16", 0, False)
        return ("i8" if self.bits == 8 else "i4", aligned[0], not self._symmetric)

    def will_need(self) -> None:
        for name in self.layout.stored_as(self.stem):
            file, entry = self.layout.source.entry(name)
            file.will_need(entry.begin, entry.end)

    def entry(self, index: int) -> QuantisedTensor:
        raise Unsupported(f"stacked quantised matrices ({self.where})")

    def floats(self, rows: Any, cols: range) -> Any:
        """float32 [rows, cols]."""
        import numpy

        q, scales, zeros = self.layout.unpack(self, rows)
        q = q[:, cols.start : cols.stop].astype(numpy.float32)
        if self.group_of is not None:
            of = self.group_of[cols.start : cols.stop]
        else:
            of = numpy.arange(cols.start, cols.stop) // (self.group or self.shape[1])
        return numpy.ascontiguousarray(scales[:, of] * (q - zeros[:, of]), numpy.float32)

    def values(self, rows: Any, cols: range, group: int) -> tuple[Any, Any, Any]:
        """Values, scales and minima for groups of `group` columns (0: whole rows), which divide the stored groups."""
        import numpy

        q, scales, zeros = self.layout.unpack(self, rows)
        q = q[:, cols.start : cols.stop]
        of = numpy.arange(cols.start, cols.stop, group or len(cols)) // (self.group or self.shape[1])
        scales, zeros = scales[:, of], zeros[:, of]
        dense = numpy.ascontiguousarray
        if self.bits == 8:
            minima = None if self._symmetric else dense(scales * (128 - zeros), numpy.float32)
            return dense((q.astype(numpy.int16) - 128).astype(numpy.int8)), dense(scales, numpy.float32), minima
        return dense(q), dense(scales, numpy.float32), dense(-scales * zeros, numpy.float32)


def row_index(rows: Any) -> Any:
    """An index of numpy for rows; a slice, which copies nothing, if they are consecutive."""
    return slice(rows.start, rows.stop) if isinstance(rows, range) and rows.step == 1 else list(rows)


class Layout:
    """A checkpoint of one method of quantisation; `tensor` returns a QuantisedTensor for each quantised matrix."""

    suffixes: tuple[str, ...] = ()  # suffixes of the tensors with the quantised values

    def __init__(self, source: SafetensorsSource, settings: Values) -> None:
        self.source = source
        self.settings = settings
        self.stems = {
            f"{name.removesuffix(suffix)}.weight": name.removesuffix(suffix)
            for name in source.names()
            for suffix in self.suffixes
            if name.endswith(suffix) and self.is_quantised(name)
        }
        self._made: dict[str, Any] = {}

    def is_quantised(self, name: str) -> bool:
        return True

    def __contains__(self, name: str) -> bool:
        return name in self.stems or name in self.source

    def names(self) -> Iterator[str]:
        yield from self.stems
        yield from (name for name in self.source.names() if name not in self.stems)

    def tensor(self, name: str) -> Any:
        stem = self.stems.get(name)
        if stem is None:
            return self.source.tensor(name)
        if name not in self._made:
            self._made[name] = self.make(stem)
        return self._made[name]

    def release(self, name: str) -> None:
        stem = self.stems.get(name)
        for each in [name] if stem is None else self.stored_as(stem):
            self.source.release(each)

    def stored_as(self, stem: str) -> list[str]:
        """The tensors with the values and the scales of a quantised matrix."""
        kinds = (".qweight", ".weight_packed", ".weight", ".scales", ".weight_scale", ".weight_scale_inv")
        return [stem + kind for kind in kinds if stem + kind in self.source]

    def make(self, stem: str) -> Any:
        raise NotImplementedError

    def unpack(self, tensor: QuantisedTensor, rows: Any) -> tuple[Any, Any, Any]:
        """Unsigned q [rows, in], scales and zero points float32 [rows, groups]."""
        raise NotImplementedError

    def array(self, name: str, dtypes: Sequence[str], dimensions: int = 2) -> Any:
        """A tensor as numpy's; bfloat16 becomes float32."""
        import numpy

        file, entry = self.source.entry(name)
        if entry.dtype not in dtypes or len(entry.shape) != dimensions:
            raise Unsupported(
                f"layout with {entry.dtype} of shape {list(entry.shape)} for a quantised matrix "
                f"({file.path}: tensor {name!r})"
            )
        kind = _NUMPY[entry.dtype]
        data = numpy.frombuffer(file.bytes(entry.begin, entry.end - entry.begin), kind).reshape(entry.shape)
        if entry.dtype == "BF16":
            return (data.astype(numpy.uint32) << 16).view(numpy.float32)
        return data

    def scales(self, name: str) -> Any:
        return self.array(name, ("F16", "BF16", "F32"))

    def where(self, name: str) -> str:
        return f"{self.source.entry(name)[0].path}: tensor {name!r}"

    def check(self, condition: bool, name: str, what: str) -> None:
        if not condition:
            raise ModelError(f"{self.where(name)}: {what}")
