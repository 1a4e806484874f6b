# SPDX-License-Identifier: Apache-2.0
"""The base classes of quantised checkpoints, which offer stored tensors under the names of plain ones.

A `Layout` is one way to store a matrix: it says which tensors it reads, and what they stand for, either as whole
numbers with scales (`QuantisedTensor`, which packed formats may hold) or as floats (`DecodedTensor`). A
`QuantisedSource` is a checkpoint whose tensors are read by the layouts of its method. Torch-free.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.sources import SafetensorsSource
from anyaccel.inference.spec.packed_formats import FORMATS, Format, ScaleKind, smallest_format
from anyaccel.validation import Fields

_NUMPY = {
    "I32": "<i4",
    "I64": "<i8",
    "I8": "i1",
    "U8": "u1",
    "F16": "<f2",
    "F32": "<f4",
    "BF16": "<u2",
    "F8_E4M3": "u1",
    "F8_E8M0": "u1",
}
FLOATS = ("F16", "BF16", "F32")
_LEAST, _MOST = 2.0**-14, 2.0**15  # scales in this range have full precision as halves
_AS_FLOATS: Format = ("bf16", 0, False)


class Unreadable(ModelError):
    """A quantised checkpoint that no runtime reads.

    Args:
        lack: what there is not, with the value that asks for it.
    """

    def __init__(self, lack: str) -> None:
        super().__init__(f"there is no {lack}; take the model in bf16, as a GGUF file, or quantised in another way")


_Stored = TypeVar("_Stored", bound="StoredMatrix")


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [out, in], or a stack of them [entries, out, in], whose values are unpacked on demand.

    Attributes:
        type: what users are told that it is stored as.
        transposed: whether the weight is the transpose of the stored matrix.
        index: of an entry of a stack of so many entries.
    """

    where: str
    shape: tuple[int, ...]
    layout: Layout
    stem: str
    type: str = "quantised"
    transposed: bool = False
    order: Sequence[int] | None = None
    plus: float = 0.0
    index: int | None = None
    entries: int = 1

    def format(self, cols: range) -> Format:
        """The native format that holds these columns; bfloat16 if no quantised one does."""
        return _AS_FLOATS

    @property
    def stored_bytes(self) -> float:
        """What the file has for it."""
        found = [self.layout.source.entry(name)[1] for name in self.layout.stored_as(self.stem)]
        return sum(entry.end - entry.begin for entry in found) / self.entries

    def will_need(self) -> None:
        for name in self.layout.stored_as(self.stem):
            file, entry = self.layout.source.entry(name)
            file.will_need(entry.begin, entry.end)

    def entry(self: _Stored, index: int) -> _Stored:
        """One entry of a stack."""
        return replace(self, shape=self.shape[1:], index=index, entries=self.shape[0])

    def floats(self, rows: Any, cols: range) -> Any:
        """float32 [rows, cols] of stored rows (a range, or their numbers), contiguous."""
        raise NotImplementedError


@dataclass(frozen=True)
class DecodedTensor(StoredMatrix):
    """A matrix whose values no packed format holds: the layout's `decode` makes floats of them.

    Attributes:
        made: what `make` has found out for `decode`.
    """

    made: Any = None

    def floats(self, rows: Any, cols: range) -> Any:
        import numpy

        return numpy.ascontiguousarray(self.layout.decode(self, rows)[:, cols.start : cols.stop], numpy.float32)


@dataclass(frozen=True)
class QuantisedTensor(StoredMatrix):
    """A matrix of whole numbers with scales: W = scale * (q - zero), or scale * codes[q].

    Attributes:
        bits: of q.
        group: number of columns that share a scale; 0: all.
        zero: the zero point of all groups if they have the same one, else None.
        group_of: the group of each column if groups are not consecutive (activation order).
        most_scale: the largest scale where scales are stored as something else than halves.
        codes: what each q stands for; zero is 0.
    """

    bits: int = 4
    group: int = 0
    zero: int | None = None
    group_of: Any = None
    most_scale: float = 1.0
    codes: tuple[int, ...] | None = None

    @property
    def _has_minimum(self) -> bool:
        """Whether it is a product and a minimum for the packed formats, whose zero point is in the middle."""
        return self.codes is None and self.zero != 1 << (self.bits - 1)

    def format(self, cols: range) -> Format:
        """Floats if groups are not consecutive or not aligned, or scales too small for halves."""
        if self.group_of is not None:
            return _AS_FLOATS
        if self.codes is not None:
            low, high = min(self.codes), max(self.codes)
        else:
            low = 0 if self._has_minimum else -1 << (self.bits - 1)
            high = low + (1 << self.bits) - 1
        found = smallest_format(low, high, self.group, cols, self._has_minimum, self.codes)
        if found is None or (found[1] > 0 and self.most_scale and not _LEAST <= self.most_scale <= _MOST):
            return _AS_FLOATS
        return found

    def with_own_scales(self, cols: range) -> tuple[ScaleKind, QuantisedTensor] | None:
        """Itself, where scales are of a kind that `_llm` keeps: not where a rank begins within a group."""
        return ("powers", self) if self.type == "mxfp4" and self.format(cols)[0] == "fp4" else None

    def floats(self, rows: Any, cols: range) -> Any:
        import numpy

        q, scales, zeros = self.layout.unpack(self, rows)
        q = q[:, cols.start : cols.stop]
        values = q.astype(numpy.float32) if self.codes is None else numpy.array(self.codes, numpy.float32)[q]
        if self.group_of is not None:
            of = self.group_of[cols.start : cols.stop]
        else:
            of = numpy.arange(cols.start, cols.stop) // (self.group or self.shape[-1])
        if zeros is not None:
            values -= zeros[:, of]
        return numpy.ascontiguousarray(scales[:, of] * values, numpy.float32)

    def values(self, rows: Any, cols: range, group: int) -> tuple[Any, Any, Any]:
        """Values, scales and minima for groups of `group` columns (0: whole rows), which divide the stored groups.

        The values are those of the format of `cols`.
        """
        import numpy

        held = FORMATS[self.format(cols)[0]]
        q, scales, zeros = self.layout.unpack(self, rows)
        q = q[:, cols.start : cols.stop]
        of = numpy.arange(cols.start, cols.stop, group or len(cols)) // (self.group or self.shape[-1])
        scales = numpy.ascontiguousarray(scales[:, of], numpy.float32)
        minima = None if held.bits == 8 else scales * numpy.float32(-held.zero)
        if self.codes is not None and self.codes == held.codes:
            pass  # as they are
        elif self.codes is not None:
            own = [code + held.zero if held.codes is None else held.codes.index(code) for code in self.codes]
            q = numpy.array(own, numpy.int16)[q]
        elif self._has_minimum:
            shift = 128 if held.bits == self.bits == 8 else 0  # whole numbers of 8 bits have a sign
            q = q.astype(numpy.int16) - shift
            minima = scales * (shift - zeros[:, of])
        elif held.zero != 1 << (self.bits - 1):
            q = q.astype(numpy.int16) + (held.zero - (1 << (self.bits - 1)))
        q = numpy.ascontiguousarray(q, numpy.int8 if held.bits == 8 else numpy.uint8)
        return q, scales, None if minima is None else numpy.ascontiguousarray(minima, numpy.float32)


@dataclass(frozen=True)
class Dequantised:
    """A quantised matrix that runs as floats.

    Attributes:
        type: what it is stored as.
        held: whether a packed format holds it, and floats were asked for.
        stored: bytes in the file; `running`: of the floats.
        format: of the floats.
    """

    type: str
    held: bool
    stored: float
    running: float
    format: str


def cost_of(matrices: Sequence[Dequantised], advice: str = "") -> str:
    """One line about what running these as floats costs, and what costs less; "" where there are none."""
    if not matrices:
        return ""
    types, formats = (sorted({getattr(each, name) for each in matrices}) for name in ("type", "format"))
    words = " or ".join(FORMATS[name].words for name in formats)
    running, stored = (sum(getattr(each, name) for each in matrices) for name in ("running", "stored"))
    size, unit = (1 << 30, "GiB") if running >= 1 << 30 else (1 << 20, "MiB")
    if not advice and all(each.held for each in matrices):
        advice = "dtype auto keeps them as they are"
    elif not advice:
        advice = "no packed format holds them; dtype int8 or int4 takes less memory, and rounds them again"
    return (
        f"weights that are stored as {', '.join(types)} become {words}: {running / size:.1f} {unit} instead of "
        f"{stored / size:.1f} {unit}; {advice}"
    )


def row_index(rows: Any) -> Any:
    """An index of numpy for rows; a slice, which copies nothing, if they are consecutive."""
    return slice(rows.start, rows.stop) if isinstance(rows, range) and rows.step == 1 else list(rows)


def scaled(values: Any, scales: Any, group: int) -> Any:
    """float32 values [rows, cols] times the scales [rows, groups] of `group` columns each; the last may have fewer."""
    import numpy

    rows, cols = values.shape
    if cols == scales.shape[1] * group:
        return (values.reshape(rows, -1, group) * scales[:, :, None]).reshape(rows, cols)
    return values * numpy.repeat(scales, group, axis=1)[:, :cols]


@functools.cache
def float8_values() -> Any:
    """The value of each byte of float8 (e4m3fn), float32 [256]: a sign, 4 bits of exponent, 3 of fraction."""
    import numpy

    octets = numpy.arange(256)
    exponent, fraction = octets >> 3 & 15, (octets & 7) / 8
    magnitude = numpy.where(exponent > 0, numpy.ldexp(1 + fraction, exponent - 7), numpy.ldexp(fraction, -6))
    magnitude[octets & 127 == 127] = numpy.nan
    return numpy.where(octets < 128, magnitude, -magnitude).astype(numpy.float32)


@functools.cache
def power_values() -> Any:
    """The value of each byte of e8m0, the exponent of a power of two, float32 [256]."""
    import numpy

    return numpy.append(numpy.ldexp(numpy.float32(1), numpy.arange(255) - 127), numpy.float32(numpy.nan))


class Layout:
    """One way to store a matrix; `make` returns a StoredMatrix of it.

    Attributes:
        mains: endings of the tensors with the values.
        plain: what the name of a plain tensor has instead.
        companions: endings of the names of tensors that belong to them, with scales and the like.
        skipped: of those that nothing is read from.
        refused: of those that change what a matrix is multiplied by, and for which there is no code.
    """

    mains: ClassVar[Sequence[str]] = ()
    plain: ClassVar[str] = ".weight"
    companions: ClassVar[Sequence[str]] = ()
    skipped: ClassVar[Sequence[str]] = ()
    refused: ClassVar[Sequence[str]] = ()

    def __init__(self, source: SafetensorsSource, settings: Fields) -> None:
        self.source = source
        self.settings = settings

    def is_quantised(self, name: str, stem: str) -> bool:
        """Whether a tensor of such a name is one."""
        return True

    def stored_as(self, stem: str) -> list[str]:
        """The tensors that a matrix is stored in."""
        return [stem + end for end in (*self.mains, *self.companions, *self.skipped) if stem + end in self.source]

    def make(self, stem: str) -> StoredMatrix:
        """What the file has, after checks of all that `unpack` or `decode` rely on."""
        raise NotImplementedError

    def unpack(self, tensor: QuantisedTensor, rows: Any) -> tuple[Any, Any, Any]:
        """Unsigned q [rows, in], scales and zero points float32 [rows, groups]; None without zero points."""
        raise NotImplementedError

    def decode(self, tensor: DecodedTensor, rows: Any) -> Any:
        """float32 [rows, in]."""
        raise NotImplementedError

    def array(self, name: str, dtypes: Sequence[str], dimensions: int = 2, index: int | None = None) -> Any:
        """A tensor as numpy's, or an entry of it; bfloat16 becomes float32."""
        import numpy

        file, entry = self.source.entry(name)
        if entry.dtype not in dtypes or len(entry.shape) != dimensions:
            raise Unreadable(
                f"layout with {entry.dtype} of shape {list(entry.shape)} for a quantised matrix "
                f"({file.path}: tensor {name!r})"
            )
        kind = _NUMPY[entry.dtype]
        data = numpy.frombuffer(file.bytes(entry.begin, entry.end - entry.begin), kind).reshape(entry.shape)
        if index is not None:
            data = data[index]
        if entry.dtype == "BF16":
            return (data.astype(numpy.uint32) << 16).view(numpy.float32)
        return data

    def scales(self, name: str) -> Any:
        return self.array(name, FLOATS)

    def dtype(self, name: str) -> str:
        """Of a tensor; "" of one that is not there."""
        return self.source.entry(name)[1].dtype if name in self.source else ""

    def rank(self, name: str) -> int:
        return len(self.source.entry(name)[1].shape)

    def most(self, name: str, scales: Any) -> float:
        """The largest of a tensor's scales, as `QuantisedTensor` has it."""
        import numpy

        return 1.0 if self.dtype(name) == "F16" or not scales.size else float(numpy.abs(scales).max())

    def where(self, name: str) -> str:
        return f"{self.source.entry(name)[0].path}: tensor {name!r}"

    def check(self, condition: bool, name: str, what: str) -> None:
        if not condition:
            raise ModelError(f"{self.where(name)}: {what}")


class QuantisedSource:
    """A checkpoint with tensors that `layouts` read, under the names of plain ones; the others are as they are."""

    def __init__(self, source: SafetensorsSource, layouts: Sequence[Layout]) -> None:
        self.source = source
        self._found: dict[str, tuple[Layout, str]] = {}
        self._made: dict[str, StoredMatrix] = {}
        for name in source.names():
            for layout, end in [(each, end) for each in layouts for end in each.mains if name.endswith(end)]:
                stem = name.removesuffix(end)
                if layout.is_quantised(name, stem):
                    self._found[stem + layout.plain] = (layout, stem)
                    break
        if not self._found:
            self._refuse_unknown()
        self._parts = {part for layout, stem in self._found.values() for part in layout.stored_as(stem)}

    def _refuse_unknown(self) -> None:
        """Raise for a checkpoint that is quantised, in a way that none of the layouts knows."""
        for name in self.source.names():
            file, entry = self.source.entry(name)
            if len(entry.shape) > 1 and entry.dtype in _NUMPY and entry.dtype not in FLOATS:
                raise Unreadable(f"reader for weights that are stored as {entry.dtype} {name} ({file.path})")

    def __contains__(self, name: str) -> bool:
        return name in self._found or (name in self.source and name not in self._parts)

    def names(self) -> Iterator[str]:
        yield from self._found
        yield from (name for name in self.source.names() if name not in self._parts)

    def is_quantised(self, name: str) -> bool:
        return name in self._found

    def tensor(self, name: str) -> Any:
        if name not in self._found:
            return self.source.tensor(name)
        if name not in self._made:
            layout, stem = self._found[name]
            for end in layout.refused:
                if stem + end in self.source:
                    raise Unreadable(f"reader for quantised weights with {end[1:]} ({layout.where(stem + end)})")
            self._made[name] = layout.make(stem)
        return self._made[name]

    def release(self, name: str) -> None:
        if name in self._found:
            layout, stem = self._found[name]
            for each in layout.stored_as(stem):
                self.source.release(each)
        else:
            self.source.release(name)
