# SPDX-License-Identifier: Apache-2.0
"""The header of a safetensors file: eight bytes with its length, then JSON; the tensors' bytes follow without gaps.

The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import torch

from anyaccel.errors import ModelError

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F4": torch.float4_e2m1fn_x2,
}
# Of which torch keeps two values in an element, along the last dimension; the file has them one by one.
_PAIRS = "F4"
# Of which torch has no tensors, and their bits: a file may have them beside others.
_NOT_IN_TORCH = {"F6_E2M3": 6, "F6_E3M2": 6}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000  # what safetensors accepts
_MAX_DIMENSION = 1 << 62
# Of the beginning of the tensors in the file: then rows of most tensors begin on a cache line when the file is mapped.
_ALIGNMENT = 64


class Entry(NamedTuple):
    """One tensor: bytes [begin, end) of the file. `dtype` is the name of one that torch does not have."""

    name: str
    dtype: torch.dtype | str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """The tensors in the order of their bytes, which are [begin, end) of the file."""

    entries: list[Entry]
    metadata: dict[str, str]
    begin: int
    end: int


def _unique(path: str) -> Any:
    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ModelError(f"{path}: the header names {twice!r} twice; the file is damaged")
        return found

    return check


def read_header(file: BinaryIO, path: str, size: int) -> Header:
    """The header of a file of `size` bytes, all of it checked against the file.

    Raises:
        ModelError: it is not a safetensors file, is damaged or cut off, or has a dtype that is not known here.
    """
    prefix = file.read(_LENGTH_BYTES)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < _LENGTH_BYTES:
        raise ModelError(f"{path}: {size} bytes are too few for a safetensors file")
    if length > _MAX_HEADER:
        raise ModelError(
            f"{path}: the header would have {length} bytes, above {_MAX_HEADER}; this is no safetensors file"
        )
    if _LENGTH_BYTES + length > size:
        raise ModelError(f"{path}: the file is cut off within its header ({size} of {_LENGTH_BYTES + length} bytes)")
    text = file.read(length)
    if len(text) < length:
        raise ModelError(f"{path}: the file became shorter while its header was read")
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=_unique(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: the header is not JSON ({error}); this is no safetensors file") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{path}: the header is not a JSON object; this is no safetensors file")
    metadata = parsed.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelError(f"{path}: __metadata__ in the header is not a map of text to text; the file is damaged")
    for text_of in (*parsed, *metadata, *metadata.values()):
        if not is_unicode(text_of):
            raise ModelError(
                f"{path}: {text_of!r} in the header is half a character (a surrogate); the file is damaged"
            )
    begin = _LENGTH_BYTES + length
    entries = sorted((_entry(path, name, value, begin) for name, value in parsed.items()), key=lambda entry: entry[-2:])
    at = begin
    for entry in entries:
        if entry.begin != at:
            raise ModelError(
                f"{path}: tensor {entry.name!r} begins at byte {entry.begin}, not at {at}, where the one before it "
                "ends; the file is damaged"
            )
        at = entry.end
    if at != size:
        what = "is cut off" if at > size else "has more than its tensors"
        raise ModelError(f"{path}: the file {what}: {size} bytes instead of {at}")
    return Header(entries, metadata, begin, at)


def is_unicode(text: str) -> bool:
    """Whether UTF-8 has it: a str of Python may have surrogates, of which two make one character in UTF-16."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_DIMENSION


def _entry(path: str, name: str, value: object, begin: int) -> Entry:
    def wrong(why: str) -> ModelError:
        return ModelError(f"{path}: tensor {name!r}: {why}")

    if not isinstance(value, dict):
        raise wrong("its entry in the header is not an object; the file is damaged")
    dtype_name, shape, offsets = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype_name, str) or (dtype_name not in DTYPES and dtype_name not in _NOT_IN_TORCH):
        raise wrong(f"dtype {dtype_name!r} is unknown; known are {', '.join((*DTYPES, *_NOT_IN_TORCH))}")
    dtype = DTYPES.get(dtype_name, dtype_name)
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise wrong(f"shape {shape!r} is not a list of sizes; the file is damaged")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise wrong(f"data_offsets {offsets!r} are not two offsets; the file is damaged")
    if dtype_name == _PAIRS:
        if not shape or shape[-1] % 2:
            raise wrong(f"shape {shape} of {dtype_name} has no even last dimension: torch keeps these values in pairs")
        shape = [*shape[:-1], shape[-1] // 2]
    bits = _NOT_IN_TORCH[dtype] if isinstance(dtype, str) else 8 * dtype.itemsize
    wanted, over = divmod(math.prod(shape) * bits, 8)
    if over:
        raise wrong(f"{math.prod(shape)} values of {dtype_name} do not fill their last byte")
    if offsets[1] - offsets[0] != wanted:
        raise wrong(f"{offsets[1] - offsets[0]} bytes do not fit shape {shape} of {dtype_name}, which takes {wanted}")
    # Empty, and yet torch could not count its strides.
    if math.prod(filter(None, shape)) * bits > _MAX_DIMENSION:
        raise wrong(f"shape {shape} of {dtype_name} is larger than memory can be; the file is damaged")
    return Entry(name, dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


def make_header(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[int]]:
    """The header for tensors in this order, and the offset in the file of each one and of the end."""
    content: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    ends = [0]
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * dtype.itemsize
        sizes = [*shape[:-1], shape[-1] * 2] if NAMES[dtype] == _PAIRS else list(shape)
        content[name] = {"dtype": NAMES[dtype], "shape": sizes, "data_offsets": [at, end]}
        at = end
        ends.append(end)
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    if len(text) > _MAX_HEADER:
        raise ModelError(
            f"the header would have {len(text)} bytes, above {_MAX_HEADER}, which nobody reads: use shorter metadata"
        )
    begin = _LENGTH_BYTES + len(text)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, [begin + end for end in ends]
