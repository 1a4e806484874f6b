# SPDX-License-Identifier: Apache-2.0
"""Stands in for `_llm.Model` in tests of packing: keeps what it is given, as floats."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from anyaccel.inference.spec.packed_formats import FORMATS

_BLOCKS = {"q8_0": 34, "q4_0": 18, "q4_1": 20}


def _bytes(address: int, length: int) -> Any:
    return np.frombuffer((ctypes.c_ubyte * length).from_address(address), np.uint8)


def _row(address: int, kind: str, cols: int, col_stride: int) -> Any:
    if kind in _BLOCKS:
        from gguf import GGMLQuantizationType, dequantize

        data = _bytes(address, cols // 32 * _BLOCKS[kind])
        return dequantize(data[None], GGMLQuantizationType[kind.upper()])[0]
    size = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2}[kind]
    stride = col_stride or size
    raw = np.lib.stride_tricks.as_strided(_bytes(address, (cols - 1) * stride + size), (cols, size), (stride, 1))
    raw = np.ascontiguousarray(raw)
    if kind == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)[:, 0]
    return raw.view({"f32": np.float32, "f64": np.float64, "f16": np.float16}[kind])[:, 0].astype(np.float32)


class RecordedModel:
    """Attributes: matrices, vectors: name -> values; kept: matrices that got quantised rows as they were."""

    weight_bytes = 1 << 20

    def __init__(self, shapes: dict[str, Any]) -> None:
        self.shapes = {shape[0]: shape for shape in shapes["matrices"]}
        self.matrices = {name: np.full((rows, cols), np.nan, np.float32) for name, rows, cols, *_ in shapes["matrices"]}
        self.vectors = {name: np.full(count, np.nan, np.float32) for name, count in shapes["vectors"]}
        self.kept: set[str] = set()

    def set_rows(
        self,
        name: str,
        first: int,
        count: int,
        address: int,
        kind: str,
        row_stride: int,
        col_stride: int = 0,
        order: Sequence[int] | None = None,
    ) -> None:
        matrix = self.matrices[name]
        assert first + count <= len(matrix)
        for i in range(count):
            at = address + (order[i] if order is not None else i) * row_stride
            matrix[first + i] = _row(at, kind, matrix.shape[1], col_stride)

    def set_quantised_rows(self, name: str, first: int, count: int, q: int, scales: int, minima: int = 0) -> None:
        _, rows, cols, form, group, minimum, _ = self.shapes[name]
        assert first + count <= rows
        assert bool(minima) == minimum
        groups = -(-cols // group) if group else 1
        values = _bytes(q, count * cols).reshape(count, cols)
        values = values.view(np.int8).astype(np.float32) if form == "i8" else values.astype(np.float32)
        of = np.arange(cols) // (group or cols)
        scale = _bytes(scales, count * groups * 4).view(np.float32).reshape(count, groups)[:, of]
        low = _bytes(minima, count * groups * 4).view(np.float32).reshape(count, groups)[:, of] if minimum else 0.0
        if FORMATS[form].codes is not None:
            values = np.array(FORMATS[form].codes, np.float32)[values.astype(np.uint8)]
        elif not minimum:
            values = values - FORMATS[form].zero
        self.matrices[name][first : first + count] = scale * values + low
        self.kept.add(name)

    def set_vector(
        self, name: str, first: int, count: int, address: int, kind: str, stride: int = 0, plus: float = 0.0
    ) -> None:
        size = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2}[kind]
        self.vectors[name][first : first + count] = _row(address, kind, count, stride or size) + np.float32(plus)

    def check_full(self) -> None:
        for name, values in {**self.matrices, **self.vectors}.items():
            assert not np.isnan(values).any(), name
