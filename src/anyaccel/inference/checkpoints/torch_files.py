# SPDX-License-Identifier: Apache-2.0
"""Reads weights out of a Hugging Face model folder, tensor by tensor or slice by slice."""

from __future__ import annotations

import math
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.safetensors_file import read_index
from anyaccel.inference.checkpoints.slices import Slice, take
from anyaccel.outside import line, shown, told

_COMPARED = 1 << 20  # values of a tensor that are compared at a time

# What readers raise for files that are not what their name says; unpickling damaged bytes may raise almost anything.
_DAMAGE = (
    SafetensorError,
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
    """Tensor name -> file, of a sharded checkpoint; empty when there is no index file."""
    index = folder / f"{stem}{suffix}.index.json"
    if not index.is_file():
        return {}
    return {tensor: folder / file for tensor, file in read_index(index).items()}


def _refusal(file: Path, error: pickle.UnpicklingError) -> ModelError:
    """What torch says at length, in a line: what the file would run, or that it is damaged."""
    found = re.search(r"(?:GLOBAL|Unsupported class) ([\w.]+)", str(error))
    if found is None:
        why = line(str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0])
        return ModelError(f"{file}: cannot be read, truncated or damaged ({why or 'it holds no tensors by name'})")
    return ModelError(
        f"{file}: not read, as that would run {shown(found[1])} of the file's choice; convert it to safetensors where "
        "you trust it"
    )


class Checkpoint:
    """The weights of one model folder: safetensors, or `pytorch_model*.bin` without pickled code.

    Raises:
        ModelError: no weights in the folder, or a file is damaged; the message names it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open_files: dict[Path, Any] = {}
        self._files = _index_of(folder, "model", ".safetensors") or _index_of(folder, "pytorch_model", ".bin")
        if not self._files:
            for name in ("model.safetensors", "pytorch_model.bin"):
                if (folder / name).is_file():
                    self._files = dict.fromkeys(self._names(folder / name), folder / name)
                    break
        if not self._files:
            raise ModelError(
                f"{folder}: no weights found; expected model.safetensors, pytorch_model.bin or their .index.json"
            )

    def _open(self, file: Path) -> Any:
        if file not in self._open_files:
            try:
                if file.suffix == ".bin":
                    # Files from before torch 1.6 are no zip archives and cannot be mapped.
                    mapped = zipfile.is_zipfile(file)
                    with warnings.catch_warnings():  # that the pickle is of another protocol, before an error
                        warnings.filterwarnings("ignore", "Detected pickle protocol")
                        data = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
                    if not isinstance(data, dict):
                        raise ModelError(f"{file}: has a {type(data).__name__}, not tensors by name")
                    self._open_files[file] = data
                else:
                    self._open_files[file] = safe_open(file, framework="pt")
            except ModelError:
                raise
            except pickle.UnpicklingError as error:
                raise _refusal(file, error) from error
            except _DAMAGE as error:
                raise ModelError(f"{file}: cannot be read, truncated or damaged ({told(error)})") from error
        return self._open_files[file]

    def _names(self, file: Path) -> list[str]:
        return list(self._open(file).keys())

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shapes(self) -> list[tuple[int, ...]]:
        """Of all tensors.

        Raises:
            ModelError: a file is damaged, or lacks a tensor that the index says it has.
        """
        found = []
        for name, file in self._files.items():
            data = self._open(file)
            try:
                shape = data[name].shape if isinstance(data, dict) else data.get_slice(name).get_shape()
                found.append(tuple(shape))
            except (SafetensorError, LookupError, AttributeError) as error:
                raise ModelError(f"{file}: tensor {shown(name)} cannot be read ({told(error)})") from error
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of `.bin` files, mapped where the files can be.

        Raises:
            ModelError: a file is damaged, or has something else under a tensor's name, or not what the index says.
        """
        found = {}
        for name, file in self._files.items():
            data = self._open(file)
            tensor = data.get(name) if isinstance(data, dict) else None
            if not isinstance(tensor, torch.Tensor):
                raise ModelError(f"{file}: has no tensor {name!r}")
            found[name] = tensor
        return found

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors have the same type, shape and values; they are read a few rows at a time.

        Raises:
            ModelError: a file is damaged.
        """
        views = [self._view(name) for name in (one, other)]
        shapes = [tuple(each.shape if isinstance(each, torch.Tensor) else each.get_shape()) for each in views]
        if shapes[0] != shapes[1]:
            return False
        if all(isinstance(each, torch.Tensor) for each in views) and views[0].is_set_to(views[1]):
            return True  # torch's files have a shared tensor once, under both names
        step = max(_COMPARED // max(math.prod(shapes[0][1:]), 1), 1)
        for first in range(0, shapes[0][0] if shapes[0] else 1, step):
            a, b = (each[first : first + step] if shapes[0] else each[...] for each in views)
            if a.dtype != b.dtype or not torch.equal(a, b):
                return False
        return True

    def _view(self, name: str) -> Any:
        file = self._files[name]
        data = self._open(file)
        try:
            return data[name] if isinstance(data, dict) else data.get_slice(name)
        except (SafetensorError, LookupError) as error:
            raise ModelError(f"{file}: tensor {shown(name)} cannot be read ({told(error)})") from error

    def read(self, name: str, shape: torch.Size, part: Slice | None) -> torch.Tensor:
        """The tensor `name` of `shape`, or only `part` of it: a view of the mapped file where it is in one piece.

        Raises:
            ModelError: it is not there, has another shape, or the file is damaged.
        """
        if name not in self._files:
            raise ModelError(f"{self._folder}: has no tensor {name!r}")
        file = self._files[name]
        data = self._open(file)
        try:
            view = data[name] if isinstance(data, dict) else data.get_slice(name)
            stored = tuple(view.shape if isinstance(data, dict) else view.get_shape())
            if stored != tuple(shape):
                raise ModelError(f"{file}: tensor {name!r} is {stored}, the model's configuration needs {tuple(shape)}")
            if isinstance(data, dict):
                return view if part is None else take(view, part)
            if part is None:
                return data.get_tensor(name)  # type: ignore[no-any-return]
            pieces = [view[(slice(None),) * part.dim + (slice(piece.start, piece.stop),)] for piece in part.ranges]
        except (SafetensorError, KeyError, RuntimeError) as error:
            raise ModelError(f"{file}: tensor {name!r} cannot be read ({told(error)})") from error
        return torch.cat(pieces, part.dim) if len(pieces) > 1 else pieces[0]
