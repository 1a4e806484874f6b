# SPDX-License-Identifier: Apache-2.0
"""Torch's tensors in a safetensors file: which dtype each is, and a tensor on the bytes of one."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from anyaccel.errors import ModelError
from anyaccel.safetensors.header import Header, TensorEntry, read_header
from anyaccel.validation import open_file, short_repr

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
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def torch_layout(path: object, entry: TensorEntry) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and the shape that an entry has in torch.

    Raises:
        ModelError: torch has no such tensor.
    """
    dtype, shape = DTYPES.get(entry.dtype), entry.shape
    if dtype is None:
        raise ModelError(
            f"{path}: tensor {short_repr(entry.name)} is {entry.dtype}, which torch does not have; load the others "
            "with tensors="
        )
    if entry.dtype == _PAIRS:
        if not shape or shape[-1] % 2:
            raise ModelError(
                f"{path}: tensor {short_repr(entry.name)}: shape {short_repr(list(shape))} of {entry.dtype} has no "
                "even last dimension: torch keeps these values in pairs"
            )
        shape = (*shape[:-1], shape[-1] // 2)
    return dtype, shape


def file_layout(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The dtype and the shape that the file has for one of torch."""
    name = NAMES[dtype]
    return name, (*shape[:-1], shape[-1] * 2) if name == _PAIRS else shape


def to_tensor(path: object, entry: TensorEntry, memory: mmap.mmap | None, base: int = 0) -> torch.Tensor:
    """The tensor on the bytes of an entry in `memory`, in which the file begins at `base`."""
    dtype, shape = torch_layout(path, entry)
    if memory is None or entry.begin == entry.end:
        return torch.empty(shape, dtype=dtype)
    count = (entry.end - entry.begin) // dtype.itemsize
    # A storage of its own, since torch.save() writes whole storages.
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=base + entry.begin)
    if flat.data_ptr() % min(dtype.itemsize, 8):
        flat = flat.clone()  # a file with an odd number of bytes before it
    return flat.view(shape)


def map_file(path: Path) -> tuple[Header, mmap.mmap]:
    """A file's header, and the file in memory; what is written there does not reach the file.

    Raises:
        ModelError: see `read_header`. OSError: it cannot be read.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise ModelError(f"{path}: 0 bytes are too few for a safetensors file; is the download complete?")
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    return read_header(lambda begin, length: memory[begin : begin + length], path, size), memory
