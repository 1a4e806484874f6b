# SPDX-License-Identifier: Apache-2.0
"""Where weights are read from: safetensors files that are mapped, or a model in memory. Torch-free but for the latter.

Tensors are given out as addresses and strides, so that native code packs them without a copy. Whoever has read a part
of a mapped file says so (`done`), and its pages leave this process's memory again.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from anyaccel import _native
from anyaccel.errors import ModelError
from anyaccel.inference.runtimes.mapping import Unsupported

# safetensors' names -> those of `_llm` and bytes a value. The others below are no weights by themselves.
_FLOATS = {"F32": ("f32", 4), "F16": ("f16", 2), "BF16": ("bf16", 2), "F64": ("f64", 8)}
_OTHERS = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8, "C64": 8} | {
    f"F8_{kind}": 1 for kind in ("E4M3", "E5M2", "E4M3FNUZ", "E5M2FNUZ", "E8M0")
}
# Types of `_llm` -> values in a block, bytes of a block.
BLOCKS = {
    **{name: (1, size) for name, size in _FLOATS.values()},
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
}

_MAX_HEADER = 100_000_000  # what safetensors accepts
_MAX_DIMENSION = 1 << 62
_RELEASED_AT_ONCE = 16 << 20  # bytes; giving memory back takes about a millisecond


@dataclass(frozen=True)
class TensorView:
    """A tensor in memory, of a type that native code reads.

    Attributes:
        where: the file and the tensor, for messages.
        strides: bytes from one entry to the next, a dimension; the last one of a type in blocks means nothing.
        transposed: the matrix that it stands for is the transpose of this one.
        order: row i is the stored row order[i].
        plus: to be added to each value.
    """

    where: str
    type: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    transposed: bool = False
    order: Sequence[int] | None = None
    plus: float = 0.0


class ConvertedTensor(Protocol):
    """A matrix in a form that native code does not read: it is brought into another one a few rows at a time.

    Attributes:
        fallback: the (format, group, minimum) of `_llm` to use when none holds its values as they are.
    """

    where: str
    type: str
    shape: tuple[int, ...]
    transposed: bool
    order: Sequence[int] | None
    plus: float

    @property
    def fallback(self) -> tuple[str, int, bool]: ...
    def format(self, cols: range) -> tuple[str, int, bool] | None:
        """The (format, group, minimum) that holds these columns as they are; None: there is none."""

    def entry(self, index: int) -> ConvertedTensor:
        """One entry of a stack [entries, rows, cols]."""

    def floats(self, rows: Any, cols: range) -> Any:
        """float32 [rows, cols] of stored rows (a range, or their numbers), contiguous (numpy)."""

    def values(self, rows: Any, cols: range, group: int) -> tuple[Any, Any, Any]:
        """q [rows, cols] (int8 or 0..15), scales and minima [rows, groups] float32; minima None without them."""


Tensor = TensorView | ConvertedTensor


class TensorSource(Protocol):
    """Tensors under the names of a Hugging Face checkpoint."""

    def __contains__(self, name: str) -> bool: ...
    def names(self) -> Iterable[str]: ...
    def tensor(self, name: str) -> Tensor:
        """Raises ModelError, with the file, when it is not there or of no use, Unsupported for an unknown dtype."""

    def will_need(self, name: str) -> None:
        """It is read soon."""

    def done(self, begin: int, end: int) -> None:
        """What lies at these addresses has been read."""

    def release(self, name: str) -> None:
        """The tensor is not needed any more."""


class MappedFile:
    """A file of which pages are in memory only while they are needed.

    A file that somebody shortens while it is read ends the process (SIGBUS), as with every mapping.
    """

    _libc: Any = None

    def __init__(self, path: Path) -> None:
        self.path = path
        libc = self._load_libc()
        try:
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size == 0:
                    raise ModelError(f"{path}: the file is empty")
                flags = mmap.MAP_PRIVATE
                address = libc.mmap(None, self.size, mmap.PROT_READ, flags, file.fileno(), 0)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
        if address in (None, ctypes.c_void_p(-1).value):
            raise ModelError(f"{path}: cannot be mapped ({os.strerror(ctypes.get_errno())})")
        self.address: int = address
        self._close = weakref.finalize(self, libc.munmap, address, self.size)

    @classmethod
    def _load_libc(cls) -> Any:
        if cls._libc is None:
            libc: Any = ctypes.CDLL(None, use_errno=True)
            size, offset = ctypes.c_size_t, ctypes.c_int64
            libc.mmap.restype = ctypes.c_void_p
            libc.mmap.argtypes = [ctypes.c_void_p, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, offset]
            libc.munmap.argtypes = [ctypes.c_void_p, size]
            libc.madvise.argtypes = [ctypes.c_void_p, size, ctypes.c_int]
            cls._libc = libc
        return cls._libc

    def close(self) -> None:
        """Unmaps the file: addresses in it must not be used any more."""
        self._close()

    def bytes(self, begin: int, length: int) -> memoryview:
        """A part of the file; the caller has checked that it is inside."""
        return memoryview((ctypes.c_ubyte * length).from_address(self.address + begin)).cast("B").toreadonly()

    def will_need(self, begin: int, end: int) -> None:
        self._advise(begin, end, mmap.MADV_WILLNEED)

    def drop(self, begin: int, end: int) -> None:
        """The pages that lie between leave this process's memory; they stay in the system's cache of the file."""
        page = mmap.PAGESIZE
        if end >= self.size:
            end += -end % page
        self._advise(-(-begin // page) * page, end // page * page, mmap.MADV_DONTNEED)

    def drop_address(self, begin: int, end: int) -> None:
        """`drop` for addresses; those of other files are passed over."""
        if self.address <= begin < self.address + self.size:
            self.drop(begin - self.address, min(end - self.address, self.size))

    def _advise(self, begin: int, end: int, advice: int) -> None:
        begin = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin and self._close.alive:
            self._libc.madvise(self.address + begin, end - begin, advice)


@dataclass(frozen=True)
class Entry:
    """A tensor of a safetensors file: bytes [begin, end) of it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_DIMENSION


def safetensors_entries(read: Any, size: int, path: Path | str) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors and the metadata of a safetensors file of `size` bytes, all of it checked against the file.

    Args:
        read: read(begin, length) gives bytes of the file.

    Raises:
        ModelError: it is no safetensors file, damaged or cut off.
    """
    if size < 8:
        raise ModelError(f"{path}: {size} bytes are too few for a safetensors file; is the download complete?")
    length = int.from_bytes(read(0, 8), "little")
    if length > _MAX_HEADER:
        raise ModelError(f"{path}: the header would have {length} bytes: this is no safetensors file")
    begin = 8 + length
    if begin > size:
        raise ModelError(f"{path}: truncated within its header ({size} of {begin} bytes)")
    try:
        parsed = json.loads(bytes(read(8, length)).decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: damaged: the header is not JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{path}: damaged: the header is not a JSON object")
    metadata = parsed.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise ModelError(f"{path}: damaged: __metadata__ is not an object")
    entries = {name: _entry(path, name, value, begin) for name, value in parsed.items()}
    at = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            raise ModelError(f"{path}: damaged: tensor {name!r} begins at byte {entry.begin}, not at {at}")
        at = entry.end
    if at > size:
        raise ModelError(f"{path}: truncated: {size} bytes of {at}")
    if at < size:
        raise ModelError(f"{path}: damaged: {size} bytes, but its tensors end at {at}")
    return entries, {str(key): str(value) for key, value in metadata.items()}


def _entry(path: Path | str, name: str, value: object, begin: int) -> Entry:
    def wrong(why: str) -> ModelError:
        return ModelError(f"{path}: tensor {name!r}: {why}")

    if not isinstance(value, dict):
        raise wrong("damaged: its entry in the header is not an object")
    dtype, shape, offsets = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or (dtype not in _FLOATS and dtype not in _OTHERS):
        raise wrong(f"its dtype {dtype!r} is unknown")
    size = _FLOATS[dtype][1] if dtype in _FLOATS else _OTHERS[dtype]
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise wrong(f"damaged: its shape {shape!r} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise wrong(f"damaged: data_offsets {offsets!r} are not two offsets")
    wanted = size
    for extent in shape:
        wanted *= extent
    if offsets[1] - offsets[0] != wanted:
        raise wrong(f"damaged: {offsets[1] - offsets[0]} bytes do not fit {dtype} of shape {shape}")
    return Entry(dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


def dense_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Of a contiguous array, in bytes."""
    strides = [itemsize] * len(shape)
    for dimension in range(len(shape) - 2, -1, -1):
        strides[dimension] = strides[dimension + 1] * shape[dimension + 1]
    return tuple(strides)


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder.

    Raises:
        ModelError: there are none, the index is damaged or names a file that is not there.
        Unsupported: the weights are in .bin files, which torch has to read.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(_weight_map(index).values()))]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if (folder / "pytorch_model.bin").is_file() or (folder / "pytorch_model.bin.index.json").is_file():
        raise Unsupported("reader for pytorch_model.bin (torch reads it)")
    raise ModelError(f"{folder}: no weights found; expected model.safetensors or model.safetensors.index.json")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index}: not a checkpoint index ({error})") from error
    if not files:
        raise ModelError(f"{index}: the index names no tensors")
    for file in sorted(set(files.values())):
        if Path(file).name != file:
            raise ModelError(f"{index}: names a file outside the folder: {file!r}")
        if not (index.parent / file).is_file():
            raise ModelError(f"{index.parent / file}: missing, but named by {index.name}")
    return files


class SafetensorsSource:
    """The tensors of a folder's safetensors files, mapped.

    Raises:
        ModelError: see `checkpoint_files` and `safetensors_entries`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        index = folder / "model.safetensors.index.json"
        named = _weight_map(index) if index.is_file() else None
        self._tensors: dict[str, tuple[MappedFile, Entry]] = {}
        self._files = [MappedFile(path) for path in checkpoint_files(folder)]
        for file in self._files:
            path = file.path
            entries, _ = safetensors_entries(file.bytes, file.size, path)
            for name, entry in entries.items():
                if named is None or named.get(name) == path.name:
                    self._tensors[name] = (file, entry)
        for name, file_name in (named or {}).items():
            if name not in self._tensors:
                raise ModelError(f"{folder / file_name}: has no tensor {name!r}, which {index.name} says it has")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def entry(self, name: str) -> tuple[MappedFile, Entry]:
        """Its file and its place in it: for dtypes that are no weights by themselves."""
        found = self._tensors.get(name)
        if found is None:
            raise ModelError(f"{self._folder}: the checkpoint has no tensor {name!r}")
        return found

    def tensor(self, name: str) -> TensorView:
        file, entry = self.entry(name)
        where = f"{file.path}: tensor {name!r}"
        if entry.dtype not in _FLOATS:
            raise Unsupported(f"weights of dtype {entry.dtype} ({where})")
        kind, size = _FLOATS[entry.dtype]
        return TensorView(where, kind, entry.shape, dense_strides(entry.shape, size), file.address + entry.begin)

    def will_need(self, name: str) -> None:
        file, entry = self.entry(name)
        file.will_need(entry.begin, entry.end)

    def done(self, begin: int, end: int) -> None:
        for file in self._files:
            file.drop_address(begin, end)

    def release(self, name: str) -> None:
        file, entry = self.entry(name)
        file.drop(entry.begin, entry.end)


class ModuleSource:
    """The weights of a Hugging Face model in memory (`state_dict` names).

    Args:
        release: each parameter's memory is given up once it is packed; the module is of no use by itself afterwards.

    Raises:
        Unsupported: a tensor is on another device than the CPU.
    """

    def __init__(self, module: Any, release: bool = False) -> None:
        self._tensors: dict[str, Any] = dict(module.state_dict(keep_vars=True))
        self._release = release
        self._released = 0  # bytes that the heap may hold still
        for name, tensor in self._tensors.items():
            if not tensor.is_cpu:
                raise Unsupported(f"weights on device {tensor.device} (tensor {name!r})")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def tensor(self, name: str) -> TensorView:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"the model has no tensor {name!r}")
        kind = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16", "torch.float64": "f64"}.get(
            str(tensor.dtype)
        )
        if kind is None or str(tensor.layout) != "torch.strided":
            raise Unsupported(f"weights of dtype {tensor.dtype} (tensor {name!r})")
        size = tensor.element_size()
        strides = tuple(stride * size for stride in tensor.stride())
        return TensorView(f"tensor {name!r}", kind, tuple(tensor.shape), strides, tensor.data_ptr())

    def will_need(self, name: str) -> None:
        pass

    def done(self, begin: int, end: int) -> None:
        pass

    def release(self, name: str) -> None:
        if self._release:
            tensor = self._tensors[name]
            self._released += tensor.nbytes
            tensor.data = tensor.data.new_empty(0)
            if self._released >= _RELEASED_AT_ONCE:
                _native.release_free_memory()
                self._released = 0


class RenamedSource:
    """A source under other names.

    Args:
        names: name here -> (name there, changes: fields of TensorView to replace, entry of a stacked tensor or None).
    """

    def __init__(self, source: TensorSource, names: Mapping[str, tuple[str, dict[str, Any], int | None]]) -> None:
        self._source = source
        self._names = {name: there for name, there in names.items() if there[0] in source}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self) -> Iterator[str]:
        return iter(self._names)

    def tensor(self, name: str) -> Tensor:
        if name not in self._names:
            raise ModelError(f"the file has no tensor for {name!r}")
        there, changes, index = self._names[name]
        tensor: Any = self._source.tensor(there)
        if index is not None:
            tensor = entry_of(tensor, index)
        return replace(tensor, **changes) if changes else tensor  # type: ignore[no-any-return]

    def will_need(self, name: str) -> None:
        if self._names[name][2] is None:
            self._source.will_need(self._names[name][0])

    def done(self, begin: int, end: int) -> None:
        self._source.done(begin, end)

    def release(self, name: str) -> None:
        pass  # `done` has given its pages back; another name may be of the same tensor


def entry_of(tensor: Any, index: int) -> Any:
    """One entry of a stacked tensor [entries, ...]."""
    if len(tensor.shape) < 2 or not 0 <= index < tensor.shape[0]:
        raise ModelError(f"{tensor.where}: shape {tensor.shape} has no entry {index}")
    if isinstance(tensor, TensorView):
        return replace(
            tensor,
            shape=tensor.shape[1:],
            strides=tensor.strides[1:],
            address=tensor.address + index * tensor.strides[0],
        )
    return tensor.entry(index)
