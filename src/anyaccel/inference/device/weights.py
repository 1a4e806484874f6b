# SPDX-License-Identifier: Apache-2.0
"""The weights of a decoder as tensors of a device. They are filled as `_llm.Model` is, by the same packing plan.

What the plan hands over is a few megabytes of the checkpoint at a time, so the host never has more of them than that.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.sources import BLOCKS
from anyaccel.inference.device.layout import row_orders
from anyaccel.inference.spec.decoder import DecoderSpec

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_SOURCES = DTYPES | {"f64": torch.float64}
_EXPERT = re.compile(r"(.*experts)\.(\d+)\.(.*)")
# Vectors that belong to the choice of experts, which is made in float32 whatever the rest is.
_OF_ROUTER = re.compile(r"(router|shared_gate)\.")


class DeviceWeights:
    """Every weight by its native name; those of a layer's experts are the entries of one tensor.

    Args:
        spec: by which `layout.row_orders` puts rows elsewhere.
        shapes: as `packing.Plan.shapes` gives them, of float formats.
        dtype: of vectors.
    """

    def __init__(self, spec: DecoderSpec, shapes: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.stacks: dict[str, torch.Tensor] = {}  # "layers.3.experts.down" -> [experts, rows, cols]
        self._tensors: dict[str, torch.Tensor] = {}
        self._missing: dict[str, int] = {}
        self._orders = row_orders(spec)
        counts: dict[str, int] = {}
        names = [each[0] for each in shapes["matrices"]] + [each[0] for each in shapes["vectors"]]
        for name in names:
            if found := _EXPERT.match(name):
                stack = f"{found[1]}.{found[3]}"
                counts[stack] = max(counts.get(stack, 0), int(found[2]) + 1)
        for name, rows, cols, kind, _group, _minimum in shapes["matrices"]:
            self._make(name, (rows, cols), DTYPES[kind], counts)
        for name, count in shapes["vectors"]:
            self._make(name, (count,), torch.float32 if _OF_ROUTER.search(name) else dtype, counts)

    def _make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, counts: Mapping[str, int]) -> None:
        self._missing[name] = shape[0]
        if found := _EXPERT.match(name):
            stack = f"{found[1]}.{found[3]}"
            if stack not in self.stacks:
                self.stacks[stack] = torch.empty((counts[stack], *shape), dtype=dtype, device=self.device)
            self._tensors[name] = self.stacks[stack][int(found[2])]
        else:
            self._tensors[name] = torch.empty(shape, dtype=dtype, device=self.device)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def get(self, name: str) -> torch.Tensor | None:
        return self._tensors.get(name)

    @property
    def weight_bytes(self) -> int:
        return sum(each.nbytes for each in self._tensors.values())

    # What `packing.Plan.fill` calls, with the meaning that it has for `_llm.Model` -----------------------------

    def set_rows(
        self,
        name: str,
        first: int,
        count: int,
        address: int,
        type: str,
        row_stride: int,
        col_stride: int = 0,
        order: Sequence[int] | None = None,
    ) -> None:
        target = self._tensors[name]
        cols = target.shape[1]
        stored = count if order is None else max(order) + 1
        if BLOCKS[type][0] > 1:
            rows = _blocks(address, type, stored, cols, row_stride)
        else:
            rows = _memory(address, type, (stored, cols), (row_stride, col_stride or _SOURCES[type].itemsize))
        if order is not None:
            rows = rows[torch.tensor(order)]
        self._write(name, first, rows)

    def set_quantised_rows(self, name: str, first: int, count: int, q: int, scales: int, minima: int = 0) -> None:
        raise ModelError(f"{name}: this runtime holds floats, and was handed whole numbers")

    def set_vector(
        self, name: str, first: int, count: int, address: int, type: str, stride: int = 0, plus: float = 0.0
    ) -> None:
        values = _memory(address, type, (count,), (stride or _SOURCES[type].itemsize,))
        self._write(name, first, values.float() + plus if plus else values)

    def _write(self, name: str, first: int, values: torch.Tensor) -> None:
        target = self._tensors[name]
        if values.dtype is not target.dtype:
            values = values.to(target.dtype)  # here: a device may lack the file's type
        order = self._orders.get(name)
        moved = 0 if order is None else min(max(len(order) - first, 0), len(values))  # what comes behind them stays
        if order is not None and moved:
            target.index_copy_(0, order[first : first + moved].to(self.device), values[:moved].to(self.device))
        target[first + moved : first + len(values)].copy_(values[moved:])
        self._missing[name] -= len(values)

    def finish(self) -> None:
        """After the last weight.

        Raises:
            ModelError: some were not set.
        """
        missing = sorted(name for name, rows in self._missing.items() if rows > 0)
        if missing:
            raise ModelError(f"{len(missing)} weights were not set or not in full, {missing[0]!r} among them")


def _memory(address: int, type: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A view of host memory that is not ours; strides in bytes."""
    dtype = _SOURCES[type]
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


def _blocks(address: int, type: str, rows: int, cols: int, row_stride: int) -> torch.Tensor:
    """float32 [rows, cols] of ggml's simple blocks of 32: a half scale, for q4_1 a half minimum, then the values."""
    values, size = BLOCKS[type]
    count = cols // values
    octets = _octets(address, (rows - 1) * row_stride + count * size).as_strided(
        (rows, count, size), (row_stride, size, 1)
    )
    halves = octets[..., : 4 if type == "q4_1" else 2].contiguous().view(torch.float16).float()
    if type == "q8_0":
        return (octets[..., 2:].contiguous().view(torch.int8).float() * halves).flatten(1)
    nibbles = octets[..., halves.shape[-1] * 2 :]
    q = torch.cat([nibbles & 15, nibbles >> 4], dim=-1).float()
    if type == "q4_0":
        return ((q - 8) * halves).flatten(1)
    return (q * halves[..., :1] + halves[..., 1:]).flatten(1)
