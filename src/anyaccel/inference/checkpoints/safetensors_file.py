# SPDX-License-Identifier: Apache-2.0
"""What a safetensors file says about itself, checked against the file; and which files a checkpoint has."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.outside import Values, mapping, read_json, shown, text, told

# safetensors' names -> those of `_llm` and bytes a value. The others below, in bits, are no weights by themselves.
FLOATS = {"F32": ("f32", 4), "F16": ("f16", 2), "BF16": ("bf16", 2), "F64": ("f64", 8)}
_OTHERS = {"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "C64": 64} | {
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4
}  # fmt: skip
_MAX_HEADER = 100_000_000  # what safetensors accepts
_MAX_DIMENSION = 1 << 62
_MAX_DIMENSIONS = 32


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
        raise ModelError(f"{path}: damaged: the header is not JSON ({told(error)})") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{path}: damaged: the header is not a JSON object")
    metadata = parsed.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise ModelError(f"{path}: damaged: __metadata__ is not an object")
    entries = {name: _entry(path, name, value, begin) for name, value in parsed.items()}
    at = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            raise ModelError(f"{path}: damaged: tensor {shown(name)} begins at byte {entry.begin}, not at {at}")
        at = entry.end
    if at > size:
        raise ModelError(f"{path}: truncated: {size} bytes of {at}")
    if at < size:
        raise ModelError(f"{path}: damaged: {size} bytes, but its tensors end at {at}")
    return entries, {str(key): str(value) for key, value in metadata.items()}


def _entry(path: Path | str, name: str, value: object, begin: int) -> Entry:
    def wrong(why: str) -> ModelError:
        return ModelError(f"{path}: tensor {shown(name)}: {why}")

    if not isinstance(value, dict):
        raise wrong("damaged: its entry in the header is not an object")
    dtype, shape, offsets = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or (dtype not in FLOATS and dtype not in _OTHERS):
        raise wrong(f"its dtype {shown(dtype)} is unknown")
    bits = 8 * FLOATS[dtype][1] if dtype in FLOATS else _OTHERS[dtype]
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise wrong(f"damaged: its shape {shown(shape)} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise wrong(f"damaged: data_offsets {shown(offsets)} are not two offsets")
    if len(shape) > _MAX_DIMENSIONS:
        raise wrong(f"damaged: {len(shape)} dimensions")
    for extent in shape:
        bits *= extent
    if 8 * (offsets[1] - offsets[0]) != bits:
        raise wrong(f"damaged: {offsets[1] - offsets[0]} bytes do not fit {dtype} of shape {shown(shape)}")
    return Entry(dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


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


def read_index(index: Path) -> dict[str, str]:
    """Tensor -> the file that has it, of an index file.

    Raises:
        ModelError: it is damaged, or names a file that is not there or outside the folder.
    """
    given = mapping(Values(read_json(index), f"{index}: ").required("weight_map"), f"{index}: weight_map")
    files = {tensor: text(file, f"{index}: {shown(tensor)}") for tensor, file in given.items()}
    if not files:
        raise ModelError(f"{index}: the index names no tensors")
    for file in sorted(set(files.values())):
        if Path(file).name != file:
            raise ModelError(f"{index}: names a file outside the folder: {shown(file)}")
        if not os.path.isfile(index.parent / file):  # noqa: PTH113  also of a name that is too long
            raise ModelError(f"{index.parent / shown(file)[1:-1]}: missing, but named by {index.name}")
    return files
