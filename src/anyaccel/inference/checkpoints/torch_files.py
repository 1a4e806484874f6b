# SPDX-License-Identifier: Apache-2.0
"""Reads weights from a Hugging Face model folder, tensor by tensor or slice by slice."""

from __future__ import annotations

import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.folder_files import read_index
from anyaccel.inference.checkpoints.slices import Slice, view
from anyaccel.safetensors.tensors import map_file, to_tensor
from anyaccel.validation import error_text, one_line, short_repr

_COMPARED = 1 << 20  # values of a tensor that are compared at a time

# Errors of readers for damaged files; unpickling damaged bytes may raise almost anything.
_DAMAGE = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    RuntimeError,
    OSError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    MemoryError,
)


def _index_of(folder: Path, stem: str, suffix: str) -> dict[str, Path]:
    """Tensor name -> file of a sharded checkpoint; empty if there is no index file."""
    index = folder / f"{stem}{suffix}.index.json"
    if not index.is_file():
        return {}
    return {tensor: folder / file for tensor, file in read_index(index).items()}


def _refusal(file: Path, error: pickle.UnpicklingError) -> ModelError:
    """torch's long message in one line: which code the file would run, or that it is damaged."""
    found = re.search(r"(?:GLOBAL|Unsupported class) ([\w.]+)", str(error))
    if found is None:
        why = one_line(str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0])
        return ModelError(f"{file}: cannot be read, truncated or damaged ({why or 'it holds no tensors by name'})")
    how = "convert it to safetensors where you trust it"
    if found[1].startswith("torchao"):  # which transformers wrote in this way only, until version 5
        how = "save the model as safetensors with model.save_pretrained of transformers 5 where you trust it"
    return ModelError(f"{file}: not read, as that would run {short_repr(found[1])} of the file's choice; {how}")


class _Safetensors(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file, as views of the mapped file that are made on demand."""

    def __init__(self, path: Path) -> None:
        self._path = path
        header, self._memory = map_file(path)
        self._entries = {entry.name: entry for entry in header.entries}

    def __getitem__(self, name: str) -> torch.Tensor:
        return to_tensor(self._path, self._entries[name], self._memory)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Checkpoint:
    """The weights of one model folder: safetensors, or `pytorch_model*.bin` without pickled code.

    Raises:
        ModelError: no weights in the folder, or a file is damaged; the message names it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open_files: dict[Path, Mapping[str, Any]] = {}
        self._files = _index_of(folder, "model", ".safetensors") or _index_of(folder, "pytorch_model", ".bin")
        if not self._files:
            for name in ("model.safetensors", "pytorch_model.bin"):
                if (folder / name).is_file():
                    self._files = dict.fromkeys(self._open(folder / name), folder / name)
                    break
        if not self._files:
            raise ModelError(
                f"{folder}: no weights found; expected model.safetensors, pytorch_model.bin or their .index.json"
            )

    def _open(self, file: Path) -> Mapping[str, Any]:
        if file not in self._open_files:
            try:
                self._open_files[file] = _unpickle(file) if file.suffix == ".bin" else _Safetensors(file)
            except ModelError:
                raise
            except pickle.UnpicklingError as error:
                raise _refusal(file, error) from error
            except _DAMAGE as error:
                raise ModelError(f"{file}: cannot be read, truncated or damaged ({error_text(error)})") from error
        return self._open_files[file]

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def _tensor(self, name: str) -> torch.Tensor:
        file = self._files[name]
        tensor = self._open(file).get(name)
        if not isinstance(tensor, torch.Tensor):
            raise ModelError(f"{file}: has no tensor {short_repr(name)}")
        return tensor

    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of all tensors.

        Raises:
            ModelError: a file is damaged, or lacks a tensor that the index says it has.
        """
        return [tuple(self._tensor(name).shape) for name in self._files]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, mapped if the files can be.

        Raises:
            ModelError: a file is damaged, lacks a tensor of the index, or has something else under its name.
        """
        return {name: self._tensor(name) for name in self._files}

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors have the same dtype, shape and values, compared a few rows at a time.

        Raises:
            ModelError: a file is damaged.
        """
        a, b = self._tensor(one), self._tensor(other)
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.is_set_to(b):
            return True  # torch's files store a shared tensor once, under both names
        step = max(_COMPARED // max(math.prod(a.shape[1:]), 1), 1)
        if not a.dim():
            return torch.equal(a, b)
        return all(torch.equal(a[i : i + step], b[i : i + step]) for i in range(0, len(a), step))

    def read(self, name: str, shape: torch.Size, part: Slice | None) -> torch.Tensor:
        """The tensor `name` of `shape`, or only `part` of it; a view of the mapped file if it is one range.

        Raises:
            ModelError: it is missing, has another shape, or the file is damaged.
        """
        if name not in self._files:
            raise ModelError(f"{self._folder}: has no tensor {name!r}")
        tensor = self._tensor(name)
        if tensor.shape != shape:
            raise ModelError(
                f"{self._files[name]}: tensor {name!r} is {tuple(tensor.shape)}, the model's configuration needs "
                f"{tuple(shape)}"
            )
        return tensor if part is None else view(tensor, part)


def _unpickle(file: Path) -> dict[str, Any]:
    # Files from before torch 1.6 are not zip archives, and cannot be mapped.
    mappable = zipfile.is_zipfile(file)
    with warnings.catch_warnings():  # torch warns of another pickle protocol before it raises an error
        warnings.filterwarnings("ignore", "Detected pickle protocol")
        data = torch.load(file, map_location="cpu", weights_only=True, mmap=mappable)
    if not isinstance(data, dict):
        raise ModelError(f"{file}: has a {type(data).__name__}, not tensors by name")
    return data
