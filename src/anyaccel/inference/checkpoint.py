# SPDX-License-Identifier: Apache-2.0
"""Reads weights out of a Hugging Face model folder, tensor by tensor or slice by slice."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from anyaccel.errors import ModelError
from anyaccel.inference.tp.apply import take
from anyaccel.inference.tp.plan import Slice

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
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not a checkpoint index ({error})") from error
    for file in set(files.values()):
        if Path(file).name != file:
            raise ModelError(f"{index}: names a file outside the folder: {file!r}")
        if not (folder / file).is_file():
            raise ModelError(f"{folder / file}: missing, but named by {index.name}")
    return {tensor: folder / file for tensor, file in files.items()}


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
                    data = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
                    if not isinstance(data, dict):
                        raise ModelError(f"{file}: has a {type(data).__name__}, not tensors by name")
                    self._open_files[file] = data
                else:
                    self._open_files[file] = safe_open(file, framework="pt")
            except ModelError:
                raise
            except _DAMAGE as error:
                raise ModelError(f"{file}: cannot be read, truncated or damaged ({error})") from error
        return self._open_files[file]

    def _names(self, file: Path) -> list[str]:
        return list(self._open(file).keys())

    def __contains__(self, name: str) -> bool:
        return name in self._files

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
            raise ModelError(f"{file}: tensor {name!r} cannot be read ({error})") from error
        return torch.cat(pieces, part.dim) if len(pieces) > 1 else pieces[0]
