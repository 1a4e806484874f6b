# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF files: metadata and tensors, by the format's own names. Every size is checked against the file.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.runtimes.mapping import Unsupported
from anyaccel.inference.runtimes.sources import BLOCKS, MappedFile, TensorView

# Number in the file -> name, values in a block, bytes of a block.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    10: ("q2_k", 256, 84),
    11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
}
# What holds the values of a type that native code does not read closely enough: (format, group, minimum) of `_llm`.
_EIGHT_BITS = {"q5_0", "q5_1", "q5_k", "q6_k"}

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_COUNT = 1 << 24  # of tensors and of metadata: far more than any file has
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class Info:
    """One tensor of a file; `shape` has the slowest dimension first, as everywhere but in GGUF."""

    type: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _Reader:
    """Reads one value after another; whatever would lie outside the file is an error."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def _end(self, length: int) -> int:
        end = self.at + length
        if length < 0 or end > len(self.data):
            raise ModelError(f"{self.path}: truncated or damaged: its metadata go on past the end of the file")
        return end

    def scalar(self, code: str) -> Any:
        size = struct.calcsize(code)
        end = self._end(size)
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at = end
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        end = self._end(length)
        text = bytes(self.data[self.at : end]).decode("utf-8", "replace")
        self.at = end
        return text

    def skip_strings(self, count: int) -> None:
        """Over an array of strings: vocabularies have hundreds of thousands, which only a tokenizer needs."""
        data, at, size, unpack = self.data, self.at, len(self.data), struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > size:
                break
            at += 8 + unpack(data, at)[0]
        self.at = at
        self._end(0)

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ModelError(f"{self.path}: damaged: a metadata value of unknown type {kind}")
        of, count = self.scalar("I"), self.scalar("Q")
        if of in _SCALARS:
            code = _SCALARS[of]
            end = self._end(count * struct.calcsize(code))
            values = list(struct.unpack_from(f"<{count}{code}", self.data, self.at))
            self.at = end
            return values
        if of == _STRING:
            self._end(count * 8)  # each has a length at least
            begin = self.at
            self.skip_strings(count)
            return StringArray(count, begin, self.at)
        raise ModelError(f"{self.path}: damaged: a metadata array of unknown type {of}")


@dataclass(frozen=True)
class StringArray:
    """An array of strings that was passed over: `GgufFile.strings` reads it."""

    count: int
    begin: int
    end: int


class GgufFile:
    """One GGUF file, mapped.

    Attributes:
        metadata: its key-value pairs; arrays of strings are only found (`strings` reads them).
        infos: its tensors by name.

    Raises:
        ModelError: it is no GGUF file, truncated or damaged.
        Unsupported: a version of the format, or a tensor type, that is not known here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = MappedFile(path)
        reader = _Reader(self.file.bytes(0, self.file.size), path)
        if bytes(reader.data[:4]) != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file (it does not start with 'GGUF')")
        reader.at = 4
        version = reader.scalar("I")
        if version not in (2, 3):
            raise Unsupported(f"reader for version {version} of GGUF, 2 and 3 are known ({path})")
        tensors, pairs = reader.scalar("Q"), reader.scalar("Q")
        if max(tensors, pairs) > _MAX_COUNT:
            raise ModelError(f"{path}: damaged: it would have {tensors} tensors and {pairs} metadata values")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = reader.string()
            self.metadata[key] = reader.value(reader.scalar("I"))
        self.infos = self._read_infos(reader, tensors)
        self.file.drop(0, reader.at)

    def strings(self, array: StringArray) -> list[str]:
        """The strings of an array in the metadata.

        Raises:
            ModelError: one is not UTF-8.
        """
        data = bytes(self.file.bytes(array.begin, array.end - array.begin))
        self.file.drop(array.begin, array.end)
        at, unpack = 0, struct.Struct("<Q").unpack_from
        found = []
        try:
            for _ in range(array.count):
                end = at + 8 + unpack(data, at)[0]
                found.append(data[at + 8 : end].decode())
                at = end
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: damaged: its metadata have a string that is not UTF-8 ({error})") from None
        return found

    def _read_infos(self, reader: _Reader, count: int) -> dict[str, Info]:
        found = []
        for _ in range(count):
            name = reader.string()
            dimensions = reader.scalar("I")
            if not 0 <= dimensions <= _MAX_DIMENSIONS:
                raise ModelError(f"{self.path}: tensor {name!r}: damaged: {dimensions} dimensions")
            shape = tuple(reversed([reader.scalar("Q") for _ in range(dimensions)]))
            found.append((name, shape, reader.scalar("I"), reader.scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(f"{self.path}: damaged: general.alignment is {alignment!r}, not a power of two")
        begin = reader.at + -reader.at % alignment
        infos: dict[str, Info] = {}
        for name, shape, kind, offset in found:
            if name in infos:
                raise ModelError(f"{self.path}: damaged: it has tensor {name!r} twice")
            infos[name] = self._info(name, shape, kind, begin + offset)
        return infos

    def _info(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> Info:
        where = f"{self.path}: tensor {name!r}"
        if kind not in GGML_TYPES:
            raise Unsupported(f"tensor type {kind} of GGUF ({where})")
        type_name, values, size = GGML_TYPES[kind]
        count = 1
        for extent in shape:
            count *= extent
        if count == 0 or (shape and shape[-1] % values):
            raise ModelError(f"{where}: damaged: shape {shape} does not fit {type_name}, in blocks of {values}")
        end = begin + count // values * size
        if end > self.file.size:
            raise ModelError(f"{where}: truncated: it ends at byte {end}, the file at {self.file.size}")
        return Info(type_name, shape, begin, end)

    def tensor(self, name: str) -> Any:
        """The tensor under its own name: a TensorView, or a GgufBlocks for types that native code does not read."""
        info = self.infos.get(name)
        if info is None:
            raise ModelError(f"{self.path}: the file has no tensor {name!r}")
        where = f"{self.path}: tensor {name!r}"
        _, values, size = next(each for each in GGML_TYPES.values() if each[0] == info.type)
        row_bytes = info.shape[-1] // values * size if info.shape else size
        if info.type not in BLOCKS:
            return GgufBlocks(where, info.type, info.shape, self.file, info.begin, row_bytes)
        strides = [size] * len(info.shape)
        for dimension in range(len(info.shape) - 2, -1, -1):
            strides[dimension] = row_bytes if dimension == len(info.shape) - 2 else 0
        for dimension in range(len(info.shape) - 3, -1, -1):
            strides[dimension] = strides[dimension + 1] * info.shape[dimension + 1]
        return TensorView(where, info.type, info.shape, tuple(strides), self.file.address + info.begin)

    def floats(self, name: str) -> list[float]:
        """All values of a small float32 tensor."""
        info = self.infos[name]
        if info.type != "f32":
            raise ModelError(f"{self.path}: tensor {name!r} is {info.type}, not f32")
        data = self.file.bytes(info.begin, info.end - info.begin)
        return list(struct.unpack_from(f"<{(info.end - info.begin) // 4}f", data))


@dataclass(frozen=True)
class GgufBlocks:
    """A matrix (or a stack of them) of a type that is brought into another one: K-quants and the like."""

    where: str
    type: str
    shape: tuple[int, ...]
    file: MappedFile
    begin: int
    row_bytes: int
    transposed: bool = False
    order: Sequence[int] | None = None
    plus: float = 0.0

    def format(self, cols: range) -> tuple[str, int, bool] | None:
        """The native format that holds these columns as they are."""
        return ("i4", 32, True) if self.type == "q4_k" and cols.start % 32 == 0 else None

    @property
    def fallback(self) -> tuple[str, int, bool]:
        return ("i8", 32, False) if self.type in _EIGHT_BITS else ("i4", 32, True)

    def entry(self, index: int) -> GgufBlocks:
        """One entry of a stack."""
        rows = 1
        for extent in self.shape[1:-1]:
            rows *= extent
        return replace(self, shape=self.shape[1:], begin=self.begin + index * rows * self.row_bytes)

    def _stored(self, rows: Any) -> Any:
        """The bytes of stored rows [rows, row_bytes]: a copy, so that their pages can go."""
        import numpy

        count = 1
        for extent in self.shape[:-1]:
            count *= extent
        length = count * self.row_bytes
        whole = numpy.frombuffer(self.file.bytes(self.begin, length), numpy.uint8).reshape(count, self.row_bytes)
        if isinstance(rows, range) and rows.step == 1:
            chosen = whole[rows.start : rows.stop].copy()
            self.file.drop(self.begin + rows.start * self.row_bytes, self.begin + rows.stop * self.row_bytes)
        else:
            chosen = whole[numpy.asarray(rows)]
            self.file.drop(self.begin, self.begin + length)
        return chosen

    def floats(self, rows: Any, cols: range) -> Any:
        """float32 [rows, cols]."""
        import numpy

        try:
            from gguf import GGMLQuantizationType, dequantize
        except ImportError as error:
            raise ModelError(f"{self.where}: type {self.type} needs the package gguf: pip install gguf") from error
        try:
            values = dequantize(self._stored(rows), GGMLQuantizationType[self.type.upper()])
        except (NotImplementedError, KeyError) as error:
            raise Unsupported(f"GGUF type {self.type} ({self.where}: the package gguf cannot read it)") from error
        chosen = values[:, cols.start : cols.stop]
        return numpy.ascontiguousarray(chosen, numpy.float32)

    def values(self, rows: Any, cols: range, group: int) -> tuple[Any, Any, Any]:
        """Q4_K as it is: 4 bits in groups of 32, value = (d * scale) * q - (dmin * minimum)."""
        import numpy

        stored = self._stored(rows)
        count = stored.shape[0]
        blocks = stored.reshape(-1, 144)
        d = blocks[:, 0:2].copy().view(numpy.float16).astype(numpy.float32)
        dmin = blocks[:, 2:4].copy().view(numpy.float16).astype(numpy.float32)
        packed = blocks[:, 4:16]  # eight scales and eight minima of six bits
        scale = numpy.empty((len(blocks), 8), numpy.float32)
        minimum = numpy.empty((len(blocks), 8), numpy.float32)
        scale[:, :4] = packed[:, 0:4] & 63
        minimum[:, :4] = packed[:, 4:8] & 63
        scale[:, 4:] = (packed[:, 8:12] & 15) | ((packed[:, 0:4] >> 6) << 4)
        minimum[:, 4:] = (packed[:, 8:12] >> 4) | ((packed[:, 4:8] >> 6) << 4)
        nibbles = blocks[:, 16:].reshape(-1, 4, 1, 32)
        q = numpy.concatenate([nibbles & 15, nibbles >> 4], axis=2).reshape(count, -1)
        first, last = cols.start // 32, -(-cols.stop // 32)
        return (
            numpy.ascontiguousarray(q[:, cols.start : cols.stop]),
            numpy.ascontiguousarray((d * scale).reshape(count, -1)[:, first:last]),
            numpy.ascontiguousarray((-dmin * minimum).reshape(count, -1)[:, first:last]),
        )


class GgufSource:
    """The tensors of a GGUF file, or of the files of a split one, by their own names."""

    def __init__(self, path: Path) -> None:
        first = GgufFile(path)
        self.files = [first, *(GgufFile(other) for other in _siblings(first))]
        self.metadata = first.metadata
        self._of: dict[str, GgufFile] = {}
        for file in self.files:
            for name in file.infos:
                if name in self._of:
                    raise ModelError(f"{file.path}: has tensor {name!r}, and so has {self._of[name].path.name}")
                self._of[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def names(self) -> Iterator[str]:
        return iter(self._of)

    def file_of(self, name: str) -> GgufFile:
        """The file that has the tensor."""
        if name not in self._of:
            raise ModelError(f"{self.files[0].path}: the file has no tensor {name!r}")
        return self._of[name]

    def tensor(self, name: str) -> Any:
        return self.file_of(name).tensor(name)

    def will_need(self, name: str) -> None:
        file = self.file_of(name)
        file.file.will_need(file.infos[name].begin, file.infos[name].end)

    def done(self, begin: int, end: int) -> None:
        for file in self.files:
            file.file.drop_address(begin, end)

    def release(self, name: str) -> None:
        pass


def _siblings(first: GgufFile) -> Iterator[Path]:
    """The other files of a model that was split (`name-00001-of-00003.gguf`)."""
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})", first.path.stem)
    if match is None or int(match[3]) != count:
        raise ModelError(f"{first.path}: one of {count} files, but not called NAME-00001-of-{count:05}.gguf")
    for number in range(1, count + 1):
        other = first.path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf")
        if number == int(match[2]):
            continue
        if not other.is_file():
            raise ModelError(f"{other}: missing; {first.path.name} is one of {count} files")
        yield other
