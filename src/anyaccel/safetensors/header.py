# SPDX-License-Identifier: Apache-2.0
"""The header of a safetensors file: eight bytes with its length, then JSON; the tensors' bytes follow without gaps.

The format: https://github.com/huggingface/safetensors#format. Torch-free.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from anyaccel.errors import ModelError
from anyaccel.validation import error_text, short_repr

# Each dtype of the format and the bits of a value.
BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
MAX_HEADER = 100_000_000  # what safetensors accepts
_LENGTH_BYTES = 8
_MAX_DIMENSION = 1 << 62
# Of the beginning of the tensors in the file: then rows of most tensors begin on a cache line when the file is mapped.
_ALIGNMENT = 64


class TensorEntry(NamedTuple):
    """One tensor: bytes [begin, end) of the file; its dtype and shape as the file has them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """The tensors in the order of their bytes, which are [begin, end) of the file."""

    entries: list[TensorEntry]
    metadata: dict[str, str]
    begin: int
    end: int


def require_little_endian(path: object) -> None:
    """Raise where the values of a file are not those of this machine.

    Raises:
        ModelError: the machine is big-endian; safetensors and GGUF files are little-endian, and read where they are.
    """
    if sys.byteorder != "little":
        raise ModelError(
            f"{path}: its values are little-endian, and this machine ({sys.byteorder}-endian) does not turn them "
            "round; use a little-endian one, as x86-64, arm64, riscv64 and ppc64le are"
        )


def read_header(read: Callable[[int, int], Any], path: object, size: int) -> Header:
    """The header of a file of `size` bytes, all of it checked against the file.

    Args:
        read: read(begin, length) gives bytes of the file.
        path: of the file, for messages.

    Raises:
        ModelError: it is not a safetensors file, is damaged or cut off, or has a dtype that the format has not.
    """
    require_little_endian(path)
    if size < _LENGTH_BYTES:
        raise ModelError(f"{path}: {size} bytes are too few for a safetensors file; is the download complete?")
    length = int.from_bytes(read(0, _LENGTH_BYTES), "little")
    if length > MAX_HEADER:
        raise ModelError(
            f"{path}: the header would have {length} bytes, above {MAX_HEADER}; this is no safetensors file"
        )
    begin = _LENGTH_BYTES + length
    if begin > size:
        raise ModelError(
            f"{path}: the file is cut off within its header ({size} of {begin} bytes); is the download complete?"
        )
    text = bytes(read(_LENGTH_BYTES, length))
    if len(text) < length:
        raise ModelError(f"{path}: the file became shorter while its header was read")
    try:
        # "-0", which is 0 to Python, is no count to the format.
        whole = _signed if b"-0" in text else None
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=partial(_unique, path), parse_int=whole)
    except ModelError:
        raise
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the header is not JSON ({error_text(error)}); this is no safetensors file") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{path}: the header is not a JSON object; this is no safetensors file")
    metadata = parsed.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelError(f"{path}: __metadata__ in the header is not a map of text to text; the file is damaged")
    for each in (*parsed, *metadata, *metadata.values()):
        if not is_unicode(each):
            raise ModelError(f"{path}: {short_repr(each)} in the header is an unpaired surrogate; the file is damaged")
    entries = sorted((_entry(path, name, value, begin) for name, value in parsed.items()), key=lambda entry: entry[-2:])
    at = begin
    for entry in entries:
        if entry.begin != at:
            raise ModelError(
                f"{path}: tensor {short_repr(entry.name)} begins at byte {entry.begin}, not at {at}, where the one "
                "before it ends; the file is damaged"
            )
        at = entry.end
    if at != size:
        if at > size:
            raise ModelError(f"{path}: the file is cut off: {size} bytes of {at}; is the download complete?")
        raise ModelError(f"{path}: the file has more than its tensors: {size} bytes instead of {at}")
    return Header(entries, metadata, begin, at)


def _unique(path: object, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ModelError(f"{path}: the header names {short_repr(twice)} twice; the file is damaged")
    return found


def _signed(digits: str) -> int:
    return -1 if digits == "-0" else int(digits)


def is_unicode(text: str) -> bool:
    """Whether UTF-8 has it: a str of Python may have surrogates, of which two make one character in UTF-16."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_DIMENSION


def _entry(path: object, name: str, value: object, begin: int) -> TensorEntry:
    def wrong(why: str) -> ModelError:
        return ModelError(f"{path}: tensor {short_repr(name)}: {why}")

    if not isinstance(value, dict):
        raise wrong("its entry in the header is not an object; the file is damaged")
    dtype, shape, offsets = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in BITS:
        raise wrong(f"dtype {short_repr(dtype)} is unknown; known are {', '.join(BITS)}")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise wrong(f"shape {short_repr(shape)} is not a list of sizes; the file is damaged")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise wrong(f"data_offsets {short_repr(offsets)} are not two offsets; the file is damaged")
    # Also of an empty tensor, whose strides nobody could count. The product stops where it is too large: with all sizes
    # of a damaged shape it may have thousands of digits.
    bits = BITS[dtype]
    for size in filter(None, shape):
        bits *= size
        if bits > _MAX_DIMENSION:
            raise wrong(f"shape {short_repr(shape)} of {dtype} is larger than memory can be; the file is damaged")
    wanted, over = divmod(bits if all(shape) else 0, 8)
    if over:
        raise wrong(f"{bits // BITS[dtype]} values of {dtype} do not fit whole bytes")
    if offsets[1] - offsets[0] != wanted:
        raise wrong(
            f"{offsets[1] - offsets[0]} bytes do not fit shape {short_repr(shape)} of {dtype}, which takes {wanted}; "
            "the file is damaged"
        )
    return TensorEntry(name, dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


def make_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[int]]:
    """The header for tensors (name, dtype, shape) in this order; the offset in the file of each one and of the end.

    Raises:
        ModelError: it would be too long for any reader.
    """
    content: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    ends = [0]
    for name, dtype, shape in tensors:
        end = ends[-1] + math.prod(shape) * BITS[dtype] // 8
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [ends[-1], end]}
        ends.append(end)
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise ModelError(
            f"the header would have {len(text)} bytes, above {MAX_HEADER}, which nobody reads: use shorter metadata"
        )
    begin = _LENGTH_BYTES + len(text)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, [begin + end for end in ends]
