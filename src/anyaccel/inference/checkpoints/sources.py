# SPDX-License-Identifier: Apache-2.0
"""Sources of weights: mapped safetensors files, or a model in memory. Torch-free except for the latter.

Tensors are addresses with strides, so that native code packs them without a copy. After rows of one have been read,
`TensorView.done` drops their pages from this process's memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from anyaccel import _native
from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.folder_files import checkpoint_files, has_bin, has_safetensors, read_index
from anyaccel.inference.checkpoints.gguf_types import BLOCK_BYTES
from anyaccel.inference.checkpoints.mapped_file import MappedFile
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.safetensors.header import TensorEntry, read_header
from anyaccel.validation import short_repr

# Floating-point dtypes of safetensors -> their names in `_llm`, and bytes of a value.
FLOATS = {"F32": ("f32", 4), "F16": ("f16", 2), "BF16": ("bf16", 2), "F64": ("f64", 8)}

# Types of `_llm` -> values in a block, bytes of a block.
BLOCKS = {name: BLOCK_BYTES[name] for name in ("f32", "f16", "bf16", "f64", "q8_0", "q4_0", "q4_1")}

_INTEGERS = {"I64": "q", "I32": "i"}
_MAX_DIMENSIONS = 32  # more than any weight has, and the most that native code and numpy support
_RELEASED_AT_ONCE = 16 << 20  # bytes; releasing memory to the system takes about a millisecond


@dataclass(frozen=True)
class TensorView:
    """A tensor in memory, of a type that native code can read.

    Attributes:
        where: the file and the tensor, for messages.
        strides: bytes from one entry to the next of each dimension; the last one is not used for types with blocks.
        transposed: whether the weight is the transpose of the stored matrix.
        order: row i of the weight is the stored row order[i].
        plus: a number to add to each value.
        file: the mapped file that it is in; None for a tensor of a model in memory.
    """

    where: str
    type: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    transposed: bool = False
    order: Sequence[int] | None = None
    plus: float = 0.0
    file: MappedFile | None = None

    def will_need(self) -> None:
        """Let the system read it ahead."""
        if self.file is not None and self.shape:
            begin, end = self._offsets(range(self.shape[0]))
            self.file.will_need(begin, end)

    def done(self, rows: range | Sequence[int]) -> None:
        """Drop the pages of these stored rows, which have been read, from this process's memory."""
        if self.file is not None:
            self.file.drop(*self._offsets(rows))

    @property
    def is_by_rows(self) -> bool:
        """Whether the values of a row are contiguous; otherwise all rows share their pages."""
        return len(self.strides) < 2 or self.strides[0] >= self.strides[1]

    def _offsets(self, rows: range | Sequence[int]) -> tuple[int, int]:
        """Begin and end of the rows in the file; those of the whole tensor if they are not one range."""
        assert self.file is not None
        begin = self.address - self.file.address
        if not self.is_by_rows:
            return begin, begin + self.shape[1] * self.strides[1]
        if not isinstance(rows, range):
            rows = range(self.shape[0])
        return begin + rows.start * self.strides[0], begin + rows.stop * self.strides[0]


class ConvertedTensor(Protocol):
    """A matrix in a form that native code cannot read, which is converted a few rows at a time."""

    where: str
    type: str
    shape: tuple[int, ...]
    transposed: bool
    order: Sequence[int] | None
    plus: float

    def format(self, cols: range) -> tuple[str, int, bool]:
        """The smallest (format, group, minimum) of `_llm` that holds these columns; bf16 if no other does."""

    def entry(self, index: int) -> ConvertedTensor:
        """One entry of a stack [entries, rows, cols]."""

    def will_need(self) -> None:
        """Let the system read it ahead; pages that have been read are dropped automatically."""

    def floats(self, rows: Any, cols: range) -> Any:
        """float32 [rows, cols] of stored rows (a range, or their numbers), contiguous (numpy)."""

    def values(self, rows: Any, cols: range, group: int) -> tuple[Any, Any, Any]:
        """q [rows, cols] (int8 or 0..15), scales and minima [rows, groups] float32: value = scale * q + minimum.

        Minima are None without them, which 4 bits always have.
        """


Tensor = TensorView | ConvertedTensor


class TensorSource(Protocol):
    """Tensors under the names of a Hugging Face checkpoint."""

    def __contains__(self, name: str) -> bool: ...
    def names(self) -> Iterable[str]: ...
    def tensor(self, name: str) -> Tensor:
        """The tensor of this name.

        Raises:
            ModelError: it is missing or unusable; the message names the file.
            Unsupported: its dtype is unknown.
        """

    def release(self, name: str) -> None:
        """Release the memory of a tensor that is not needed any more."""


def dense_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides of a contiguous array, in bytes."""
    strides = [itemsize] * len(shape)
    for dimension in range(len(shape) - 2, -1, -1):
        strides[dimension] = strides[dimension + 1] * shape[dimension + 1]
    return tuple(strides)


class SafetensorsSource:
    """The tensors of a folder's safetensors files, mapped.

    Args:
        files: those that are read; None: the model's.

    Attributes:
        metadata: what the files say beside their tensors.

    Raises:
        ModelError: see `checkpoint_files` and `read_header`.
    """

    def __init__(self, folder: Path, files: Sequence[Path] | None = None) -> None:
        self._folder = folder
        index = folder / "model.safetensors.index.json"
        named = read_index(index) if index.is_file() else None
        self._tensors: dict[str, tuple[MappedFile, TensorEntry]] = {}
        self.metadata: dict[str, str] = {}
        for path in checkpoint_files(folder) if files is None else files:
            file = MappedFile(path)
            header = read_header(file.bytes, path, file.size)
            self.metadata |= header.metadata
            for entry in header.entries:
                if len(entry.shape) > _MAX_DIMENSIONS:
                    raise ModelError(f"{path}: tensor {short_repr(entry.name)}: damaged: {len(entry.shape)} dimensions")
                if named is None or folder / named.get(entry.name, "") == path:
                    self._tensors[entry.name] = (file, entry)
        for name, file_name in (named or {}).items():
            if name not in self._tensors:
                raise ModelError(
                    f"{folder / file_name}: has no tensor {short_repr(name)}, which {index.name} says it has"
                )

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def entry(self, name: str) -> tuple[MappedFile, TensorEntry]:
        """The file of a tensor and its entry there, also for dtypes that `tensor` does not support."""
        found = self._tensors.get(name)
        if found is None:
            raise ModelError(f"{self._folder}: the checkpoint has no tensor {name!r}")
        return found

    def tensor(self, name: str) -> TensorView:
        file, entry = self.entry(name)
        where = f"{file.path}: tensor {name!r}"
        if entry.dtype not in FLOATS:
            raise Unsupported(f"weights of dtype {entry.dtype} ({where})")
        kind, size = FLOATS[entry.dtype]
        strides = dense_strides(entry.shape, size)
        return TensorView(where, kind, entry.shape, strides, file.address + entry.begin, file=file)

    def integers(self, name: str) -> list[int]:
        """A vector of whole numbers."""
        file, entry = self.entry(name)
        if entry.dtype not in _INTEGERS or len(entry.shape) != 1:
            raise ModelError(f"{file.path}: tensor {name!r} is {entry.dtype} of shape {entry.shape}, not whole numbers")
        layout = f"<{entry.shape[0]}{_INTEGERS[entry.dtype]}"
        return list(struct.unpack(layout, file.bytes(entry.begin, entry.end - entry.begin)))

    def release(self, name: str) -> None:
        file, entry = self.entry(name)
        file.drop(entry.begin, entry.end)


class TorchSource:
    """Torch's tensors by name.

    Args:
        where: the prefix of a tensor's name in messages.
        release: whether to free each tensor's memory after it is packed.

    Raises:
        Unsupported: a tensor is on another device than the CPU.
    """

    def __init__(self, tensors: Mapping[str, Any], where: str = "", release: bool = False) -> None:
        self._tensors = dict(tensors)
        self._where = where
        self._release = release
        self._released = 0  # bytes that are freed, but which the heap may still hold
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
            raise ModelError(f"{self._where or 'the model'}: has no tensor {name!r}")
        kind = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16", "torch.float64": "f64"}.get(
            str(tensor.dtype)
        )
        if kind is None or str(tensor.layout) != "torch.strided":
            raise Unsupported(f"weights of dtype {tensor.dtype} (tensor {name!r})")
        if 0 in tensor.stride():  # an expanded one: to the packing, a stride of 0 is that of dense rows
            tensor = self._tensors[name] = tensor.contiguous()
        size = tensor.element_size()
        strides = tuple(stride * size for stride in tensor.stride())
        where = f"{self._where}: tensor {name!r}" if self._where else f"tensor {name!r}"
        return TensorView(where, kind, tuple(tensor.shape), strides, tensor.data_ptr())

    def integers(self, name: str) -> list[int]:
        """A vector of whole numbers."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.dim() != 1 or tensor.is_floating_point():
            raise ModelError(f"{self._where or 'the model'}: has no vector {name!r} of whole numbers")
        return [int(each) for each in tensor.tolist()]

    def release(self, name: str) -> None:
        if self._release:
            tensor = self._tensors[name]
            self._released += tensor.nbytes
            tensor.data = tensor.data.new_empty(0)
            if self._released >= _RELEASED_AT_ONCE:
                _native.release_free_memory()
                self._released = 0


class ModuleSource(TorchSource):
    """The weights of a Hugging Face model in memory (`state_dict` names).

    Args:
        release: whether to free each parameter's memory after it is packed, which makes the module unusable.

    Raises:
        Unsupported: a tensor is on another device than the CPU.
    """

    def __init__(self, module: Any, release: bool = False) -> None:
        super().__init__(module.state_dict(keep_vars=True), release=release)


def folder_source(folder: Path) -> SafetensorsSource | TorchSource:
    """The weights of a model folder: its safetensors files, or else `pytorch_model*.bin`, which torch reads.

    Raises:
        ModelError: there are none, or a file is damaged.
    """
    if has_safetensors(folder) or not has_bin(folder):
        return SafetensorsSource(folder)
    from anyaccel.inference.checkpoints.torch_files import Checkpoint

    return TorchSource(
        {name: _contiguous(folder, name, each) for name, each in Checkpoint(folder).tensors().items()}, str(folder)
    )


def _contiguous(folder: Path, name: str, tensor: Any) -> Any:
    """The tensor as a contiguous one, as in a safetensors file: torch's files may have views of larger tensors."""
    if tensor.is_contiguous():
        return tensor
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise ModelError(f"{folder}: tensor {name!r} has {tensor.nbytes} bytes and its file fewer for it")
    return tensor.contiguous()


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
