# SPDX-License-Identifier: Apache-2.0
"""Finds the files of a model folder that have its weights, by their names and indices. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from anyaccel.errors import ModelError
from anyaccel.validation import Fields, check_mapping, check_text, read_json, short_repr


def has_safetensors(folder: Path) -> bool:
    """Whether a folder's weights are in safetensors files."""
    return any((folder / f"model.safetensors{end}").is_file() for end in (".index.json", ""))


def has_bin(folder: Path) -> bool:
    """Whether a folder has weights in torch's files."""
    return any((folder / f"pytorch_model.bin{end}").is_file() for end in (".index.json", ""))


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder.

    Raises:
        ModelError: there are none, the index is damaged or names a file that is not there.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(read_index(index).values()))]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise ModelError(f"{folder}: no weights found; expected model.safetensors, pytorch_model.bin or their .index.json")


def is_inside(name: str) -> bool:
    """Whether an index names a file of its folder, or of a folder in it."""
    path = PurePosixPath(name)
    return path.name not in ("", "..") and not path.is_absolute() and ".." not in path.parts


def read_index(index: Path) -> dict[str, str]:
    """Read an index file: tensor -> the file that has it.

    Raises:
        ModelError: it is damaged, or names a file that is not there or outside the folder.
    """
    given = check_mapping(Fields(read_json(index), f"{index}: ").required("weight_map"), f"{index}: weight_map")
    files = {tensor: check_text(file, f"{index}: {short_repr(tensor)}") for tensor, file in given.items()}
    if not files:
        raise ModelError(f"{index}: the index names no tensors")
    for file in sorted(set(files.values())):
        if not is_inside(file):
            raise ModelError(f"{index}: names a file outside the folder: {short_repr(file)}")
        if not os.path.isfile(index.parent / file):  # noqa: PTH113  also of a name that is too long
            raise ModelError(f"{index.parent / short_repr(file)[1:-1]}: missing, but named by {index.name}")
    return files
