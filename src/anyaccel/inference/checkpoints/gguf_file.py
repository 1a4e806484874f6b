# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF files: metadata and tensors, by the format's own names. Every size is checked against the file.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.gguf_blocks import GgufBlocks
from anyaccel.inference.checkpoints.gguf_types import BLOCK_BYTES, GGML_TYPES, UNREAD
from anyaccel.inference.checkpoints.mapped_file import MappedFile
from anyaccel.inference.checkpoints.sources import BLOCKS, TensorView
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.safetensors.header import require_little_endian
from anyaccel.validation import Fields, error_text, short_repr

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Far more than any file has; they bound the cost of a damaged count.
_MAX_TENSORS = 1 << 20
_MAX_PAIRS = 1 << 16
_MAX_ARRAY = 1 << 22  # entries: a vocabulary has some hundred thousand
_MAX_NAME = 1 << 16  # bytes of a key or a tensor's name
_MAX_DIMENSIONS = 4
_MAX_SPLITS = 99999  # the names have five digits
# The least bytes of a metadata value and of a tensor's entry, which bound their numbers by the file's size.
_LEAST_PAIR, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8


@dataclass(frozen=True)
class Info:
    """One tensor of a file; `shape` has the slowest dimension first, as everywhere but in GGUF."""

    type: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _Reader:
    """Reads one value after another; reading past the end of the file is an error."""

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

    def name(self) -> str:
        """A key, or the name of a tensor."""
        at = self.at
        length = self.scalar("Q")
        if length > _MAX_NAME:
            raise ModelError(f"{self.path}: truncated or damaged: a name of {length} bytes, at byte {at}")
        self.at = at
        return self.string()

    def string(self) -> str:
        length = self.scalar("Q")
        end = self._end(length)
        text = bytes(self.data[self.at : end]).decode("utf-8", "replace")
        self.at = end
        return text

    def skip_strings(self, count: int) -> None:
        """Skip an array of strings, such as a vocabulary with hundreds of thousands, which only a tokenizer needs."""
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
        if count > _MAX_ARRAY:
            raise ModelError(f"{self.path}: truncated or damaged: a metadata array of {count} entries")
        if of in _SCALARS:
            code = _SCALARS[of]
            end = self._end(count * struct.calcsize(code))
            values = list(struct.unpack_from(f"<{count}{code}", self.data, self.at))
            self.at = end
            return values
        if of == _STRING:
            self._end(count * 8)  # each string has at least its length
            begin = self.at
            self.skip_strings(count)
            return StringArray(count, begin, self.at)
        raise ModelError(f"{self.path}: damaged: a metadata array of unknown type {of}")


@dataclass(frozen=True)
class StringArray:
    """The position of an array of strings, which `GgufFile.strings` reads."""

    count: int
    begin: int
    end: int

    def __repr__(self) -> str:
        return f"an array of {self.count} texts"


class GgufFile:
    """One mapped GGUF file.

    Attributes:
        metadata: its key-value pairs, with a StringArray for each array of strings.
        infos: its tensors by name.

    Raises:
        ModelError: it is not a GGUF file, truncated or damaged.
        Unsupported: a tensor's type is known, and cannot be read here.
    """

    def __init__(self, path: Path) -> None:
        require_little_endian(path)
        self.path = path
        self.file = MappedFile(path)
        reader = _Reader(self.file.bytes(0, self.file.size), path)
        if bytes(reader.data[:4]) != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file (it does not start with 'GGUF')")
        reader.at = 4
        version = reader.scalar("I")
        if version not in (2, 3):
            raise ModelError(
                f"{path}: GGUF of version {version}, and 2 and 3 are known: it is damaged, or too old or new"
            )
        tensors, pairs = reader.scalar("Q"), reader.scalar("Q")
        size = self.file.size
        if tensors > min(_MAX_TENSORS, size // _LEAST_TENSOR) or pairs > min(_MAX_PAIRS, size // _LEAST_PAIR):
            raise ModelError(
                f"{path}: truncated or damaged: {tensors} tensors and {pairs} metadata values in {size} bytes"
            )
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = reader.name()
            if key in self.metadata:
                raise ModelError(f"{path}: damaged: it has metadata {short_repr(key)} twice")
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
            raise ModelError(
                f"{self.path}: damaged: a string of its metadata is not UTF-8 ({error_text(error)})"
            ) from None
        return found

    def _read_infos(self, reader: _Reader, count: int) -> dict[str, Info]:
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = reader.name()
            if name in found:
                raise ModelError(f"{self.path}: damaged: it has tensor {short_repr(name)} twice")
            dimensions = reader.scalar("I")
            if not 0 <= dimensions <= _MAX_DIMENSIONS:
                raise ModelError(f"{self.path}: tensor {short_repr(name)}: damaged: {dimensions} dimensions")
            shape = tuple(reversed([reader.scalar("Q") for _ in range(dimensions)]))
            found[name] = (shape, reader.scalar("I"), reader.scalar("Q"))
        alignment = Fields(self.metadata, f"{self.path}: damaged: ").get_int("general.alignment", 32, 1)
        if alignment & (alignment - 1):
            raise ModelError(f"{self.path}: damaged: general.alignment={alignment} is not a power of two")
        begin = reader.at + -reader.at % alignment
        # As in llama.cpp, tensors must follow each other in the file's order, so that none overlaps another.
        infos: dict[str, Info] = {}
        expected = 0
        for name, (shape, kind, offset) in found.items():
            if offset != expected:
                raise ModelError(
                    f"{self.path}: tensor {short_repr(name)}: damaged: its data begin at offset {offset}, not at "
                    f"{expected}"
                )
            infos[name] = self._info(name, shape, kind, begin + offset)
            expected = infos[name].end - begin
            expected += -expected % alignment
        return infos

    def _info(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> Info:
        where = f"{self.path}: tensor {short_repr(name)}"
        if kind in UNREAD:
            raise Unsupported(f"tensor type {UNREAD[kind]} of GGUF ({where})")
        if kind not in GGML_TYPES:
            raise ModelError(f"{where}: of type {kind}, which is not known: it is damaged, or too old or new")
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
        """The tensor of this name: a TensorView, or a GgufBlocks for types that native code cannot read."""
        info = self.infos.get(name)
        if info is None:
            raise ModelError(f"{self.path}: the file has no tensor {name!r}")
        where = f"{self.path}: tensor {name!r}"
        values, size = BLOCK_BYTES[info.type]
        row_bytes = info.shape[-1] // values * size if info.shape else size
        if info.type not in BLOCKS:
            return GgufBlocks(where, info.type, info.shape, self.file, info.begin, row_bytes)
        strides = [size] * len(info.shape)
        for dimension in range(len(info.shape) - 2, -1, -1):
            strides[dimension] = row_bytes if dimension == len(info.shape) - 2 else 0
        for dimension in range(len(info.shape) - 3, -1, -1):
            strides[dimension] = strides[dimension + 1] * info.shape[dimension + 1]
        return TensorView(where, info.type, info.shape, tuple(strides), self.file.address + info.begin, file=self.file)

    def floats(self, name: str, shape: tuple[int, ...]) -> list[float]:
        """All values of a small float32 tensor of this shape.

        Raises:
            ModelError: it is something else.
        """
        info = self.infos[name]
        if info.type != "f32" or info.shape != shape:
            raise ModelError(f"{self.path}: tensor {name!r} is {info.type} of shape {info.shape}, not f32 of {shape}")
        data = self.file.bytes(info.begin, info.end - info.begin)
        return list(struct.unpack_from(f"<{(info.end - info.begin) // 4}f", data))


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
                    raise ModelError(
                        f"{file.path}: has tensor {short_repr(name)}, and so has {self._of[name].path.name}"
                    )
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


def _siblings(first: GgufFile) -> Iterator[Path]:
    """The other files of a model that was split (`name-00001-of-00003.gguf`)."""
    count = Fields(first.metadata, f"{first.path}: damaged: ").get_int("split.count", 1, maximum=_MAX_SPLITS)
    if count <= 1:
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
