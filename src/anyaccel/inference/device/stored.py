# SPDX-License-Identifier: Apache-2.0
"""Rows of a checkpoint in the host's memory: as floats, and as the whole numbers and scales that they are stored as."""

from __future__ import annotations

import ctypes
import math

import torch

from anyaccel.inference.checkpoints.sources import BLOCKS, dense_strides
from anyaccel.inference.device.quantised import Quantised

SOURCES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f64": torch.float64,
    "i8": torch.int8,
    "u8": torch.uint8,
}
# Blocks of 32 values -> the matrices that hold them: kind, and whether only ones with a minimum do.
_HELD = {"q8_0": ("i8", False), "q4_0": ("i4", False), "q4_1": ("i4", True)}
_BLOCK = 32


def host_memory(address: int, type: str, shape: tuple[int, ...], strides: tuple[int, ...] = ()) -> torch.Tensor:
    """A view of host memory that is not ours; strides in bytes, () for an array without gaps."""
    dtype = SOURCES[type]
    strides = strides or dense_strides(shape, dtype.itemsize)
    if not all(shape):
        return torch.empty(shape, dtype=dtype)
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if any(stride % dtype.itemsize for stride in strides) or address % dtype.itemsize:
        octets = _octets(address, last + dtype.itemsize)
        places = torch.zeros((), dtype=torch.int64)
        for size, stride in zip(shape, strides, strict=True):
            places = places[..., None] + torch.arange(size) * stride
        return octets[places[..., None] + torch.arange(dtype.itemsize)].view(dtype).reshape(shape)
    flat = _octets(address, last + dtype.itemsize).view(dtype)
    return flat.as_strided(shape, [stride // dtype.itemsize for stride in strides])


def _octets(address: int, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * count).from_address(address), dtype=torch.uint8)


def holds_blocks(matrix: Quantised, type: str) -> bool:
    """Whether a matrix can have ggml's blocks as they are."""
    kind, minimum = _HELD[type]
    return (matrix.kind, matrix.group) == (kind, _BLOCK) and (matrix.minimum or not minimum)


def blocks(
    address: int, type: str, rows: int, cols: int, row_stride: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """q [rows, cols], scales and minima [rows, blocks] of ggml's simple blocks of 32.

    A block is a half scale, for q4_1 a half minimum, then the values: int8, or nibbles of the first 16 and the others.
    """
    values, size = BLOCKS[type]
    count = cols // values
    octets = _octets(address, (rows - 1) * row_stride + count * size).as_strided(
        (rows, count, size), (row_stride, size, 1)
    )
    halves = octets[..., : 4 if type == "q4_1" else 2].contiguous().view(torch.float16).float()
    if type == "q8_0":
        return octets[..., 2:].contiguous().view(torch.int8).flatten(1), halves[..., 0], None
    nibbles = octets[..., halves.shape[-1] * 2 :]
    q = torch.cat([nibbles & 15, nibbles >> 4], dim=-1).flatten(1)
    return q, halves[..., 0], halves[..., 1] if type == "q4_1" else None


def dequantised_blocks(address: int, type: str, rows: int, cols: int, row_stride: int) -> torch.Tensor:
    """float32 [rows, cols]."""
    q, scales, minima = blocks(address, type, rows, cols, row_stride)
    if minima is None:
        minima = torch.zeros_like(scales) if type == "q8_0" else -8 * scales
    return (q.view(rows, -1, _BLOCK).float() * scales[..., None] + minima[..., None]).flatten(1)


def rounded(rows: torch.Tensor, matrix: Quantised) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows of floats in a matrix's form, by the rules of native packing: q, scales and minima.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    from anyaccel import _llm

    rows = rows.float().contiguous()
    groups = matrix.scales.shape[-1]
    q = torch.empty(rows.shape, dtype=torch.int8 if matrix.kind == "i8" else torch.uint8)
    scales = torch.empty(len(rows), groups)
    minima = torch.empty(len(rows), groups) if matrix.minimum else None
    _, group, _ = matrix.form
    _, squares = _llm.quantise(
        rows.data_ptr(), "f32", rows.stride(0) * 4, len(rows), rows.shape[1], matrix.kind, group,
        minima is not None, q.data_ptr(), scales.data_ptr(), 0 if minima is None else minima.data_ptr(),
    )  # fmt: skip
    if not math.isfinite(squares):
        raise ValueError("a value is NaN or infinite")
    return q, scales, minima
