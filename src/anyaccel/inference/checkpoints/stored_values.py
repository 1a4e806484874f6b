# SPDX-License-Identifier: Apache-2.0
"""Reads the values of stored tensors as numpy arrays, rounds them and packs them into words. Torch-free."""

from __future__ import annotations

import math
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.sources import BLOCKS, TensorView, dense_strides


def relative_error(error: float, total: float) -> float:
    return math.sqrt(error / total) if total > 0 else 0.0


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The shape of the tensor in a Hugging Face checkpoint."""
    return tuple(tensor.shape[::-1]) if tensor.transposed else tuple(tensor.shape)


def stored_bytes(tensor: Any) -> int:
    count = math.prod(tensor.shape)
    if isinstance(tensor, TensorView):
        values, size = BLOCKS[tensor.type]
        return int(count // values * size)
    return int(math.prod(tensor.shape[:-1]) * getattr(tensor, "row_bytes", 4 * tensor.shape[-1]))


def kept_dtype(tensor: Any) -> str:
    """The dtype for a tensor that is not quantised: vectors keep their precision, matrices get 16 bits."""
    if isinstance(tensor, TensorView) and tensor.type == "f16":
        return "F16"
    if len(tensor.shape) < 2 and not (isinstance(tensor, TensorView) and tensor.type == "bf16"):
        return "F32"
    return "BF16"


def rows_of(tensor: Any, rows: range) -> tuple[int, str, int, Any]:
    """Address, type and stride of some rows, and the array that owns them if a copy was needed."""
    if isinstance(tensor, TensorView) and tensor.order is None and not tensor.plus:
        _check_dense(tensor)
        return tensor.address + rows.start * tensor.strides[0], tensor.type, tensor.strides[0], None
    floats = floats_of(tensor, rows)
    return floats.ctypes.data, "f32", floats.strides[0], floats


def floats_of(tensor: Any, rows: range | None = None) -> Any:
    """A copy of the values as float32, in the layout of a Hugging Face checkpoint."""
    import numpy

    stored: Any = rows if rows is not None else range(tensor.shape[0])
    if tensor.order is not None:
        stored = [tensor.order[row] for row in stored]
    if not isinstance(tensor, TensorView):
        values = tensor.floats(stored, range(tensor.shape[1]))
    else:
        values = _array(tensor)[stored.start : stored.stop] if isinstance(stored, range) else _array(tensor)[stored]
        values = _as_floats(values, tensor.type)
    values = values + numpy.float32(tensor.plus) if tensor.plus else values
    return numpy.ascontiguousarray(values.T if tensor.transposed else values)


def _check_dense(tensor: TensorView) -> None:
    values, size = BLOCKS[tensor.type]
    if values == 1 and tensor.strides != dense_strides(tensor.shape, size):
        raise ModelError(f"{tensor.where}: strides of {tensor.strides} bytes are not those of a dense tensor")


def _array(tensor: TensorView) -> Any:
    """The stored bytes or values, dense, without a copy."""
    import ctypes

    import numpy

    _check_dense(tensor)
    values, size = BLOCKS[tensor.type]
    data = memoryview((ctypes.c_ubyte * stored_bytes(tensor)).from_address(tensor.address))
    kind = {"f32": "<f4", "f64": "<f8", "f16": "<f2", "bf16": "<u2"}.get(tensor.type, "u1")
    shape = tensor.shape if values == 1 else (*tensor.shape[:-1], tensor.shape[-1] // values * size)
    return numpy.frombuffer(data, kind).reshape(shape)


def _as_floats(values: Any, kind: str) -> Any:
    import numpy

    if kind == "bf16":
        return (values.astype(numpy.uint32) << 16).view(numpy.float32)
    if BLOCKS[kind][0] == 1:
        return values.astype(numpy.float32)
    from gguf import GGMLQuantizationType, dequantize

    return dequantize(values, GGMLQuantizationType[kind.upper()])


def as_bf16(values: Any) -> Any:
    """The bits of bfloat16, rounded to nearest even."""
    import numpy

    bits = numpy.ascontiguousarray(values, numpy.float32).view(numpy.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return numpy.where(numpy.isnan(values), 0x7FC0, rounded).astype(numpy.uint16)


def packed_words(q: Any, bits: int) -> Any:
    """int32 words along the last axis, the first value in the lowest bits."""
    import numpy

    q = numpy.ascontiguousarray(q, numpy.uint8)
    if bits == 4:
        q = q[:, 0::2] | (q[:, 1::2] << 4)
    return numpy.ascontiguousarray(q).view("<i4")


def with_zero_points(floats: Any, scales: Any, minima: Any, group: int) -> tuple[Any, Any, Any, tuple[float, float]]:
    """Replace minima by integer zero points: value = scale * (q - zero)."""
    import numpy

    rows, cols = floats.shape
    values = floats.reshape(rows, -1, group)
    inverse = numpy.divide(1.0, scales, out=numpy.zeros_like(scales), where=scales != 0)
    zeros = numpy.clip(numpy.rint(-minima * inverse), 0, 15)
    q = numpy.clip(numpy.rint(values * inverse[..., None]) + zeros[..., None], 0, 15)
    steps = q - zeros[..., None]
    squares = (steps * steps).sum(-1)
    # The scale with the least squared error for these values, as the half that is stored.
    fitted = numpy.divide((steps * values).sum(-1), squares, out=scales.copy(), where=squares > 0)
    fitted = fitted.astype(numpy.float16).astype(numpy.float32)
    difference = (values - fitted[..., None] * steps).astype(numpy.float64)
    error = float((difference * difference).sum()), float((values.astype(numpy.float64) ** 2).sum())
    return q.reshape(rows, cols).astype(numpy.uint8), fitted, zeros.astype(numpy.uint8), error
