# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of float8 (e4m3fn) weights, read under the names and shapes of plain ones.

- transformers' and DeepSeek-V3's `fp8`: weight [out, in], weight_scale_inv [blocks of rows, blocks of columns] of
  `weight_block_size` (the last ones may be smaller); W = weight * weight_scale_inv.
- compressed-tensors' float-quantized and fbgemm's: weight [out, in], weight_scale of the whole matrix, of each row
  [out, 1] or of blocks.

They run as bfloat16, as no native integer format can hold float values. The product of a value and its scale is rounded
once. Activations are not rounded to float8, whatever `activation_scheme` says.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.quantised_layout import Layout, row_index
from anyaccel.inference.checkpoints.sources import SafetensorsSource
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.outside import Values

_SCALES = ("weight_scale_inv", "weight_scale")


@functools.cache
def _values() -> Any:
    """The value of each byte, float32 [256]: a sign, 4 bits of exponent, 3 of fraction; 0x7f is NaN."""
    import numpy

    octets = numpy.arange(256)
    exponent, fraction = octets >> 3 & 15, (octets & 7) / 8
    magnitude = numpy.where(exponent > 0, numpy.ldexp(1 + fraction, exponent - 7), numpy.ldexp(fraction, -6))
    magnitude[octets & 127 == 127] = numpy.nan
    return numpy.where(octets < 128, magnitude, -magnitude).astype(numpy.float32)


@dataclass(frozen=True)
class Float8Tensor:
    """One matrix [out, in]; `block` has the numbers of rows and columns that share a scale."""

    where: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    layout: Float8
    stem: str
    type: str = "float8"
    transposed: bool = False
    order: Sequence[int] | None = None
    plus: float = 0.0

    def format(self, cols: range) -> tuple[str, int, bool]:
        return ("bf16", 0, False)

    def will_need(self) -> None:
        file, entry = self.layout.source.entry(f"{self.stem}.weight")
        file.will_need(entry.begin, entry.end)

    def entry(self, index: int) -> Float8Tensor:
        raise Unsupported(f"stacked float8 matrices ({self.where})")

    def floats(self, rows: Any, cols: range) -> Any:
        """float32 [rows, cols]."""
        import numpy

        octets = self.layout.array(f"{self.stem}.weight", ("F8_E4M3",))[row_index(rows), cols.start : cols.stop]
        scales = self.layout.block_scales(self.stem)[numpy.asarray(rows) // self.block[0]]
        scales = scales[:, numpy.arange(cols.start, cols.stop) // self.block[1]]
        return numpy.ascontiguousarray(_values()[octets] * scales, numpy.float32)

    def values(self, rows: Any, cols: range, group: int) -> tuple[Any, Any, Any]:
        raise NotImplementedError  # `format` is bf16, for which only `floats` is called


class Float8(Layout):
    suffixes = (".weight",)

    def __init__(self, source: SafetensorsSource, settings: Values) -> None:
        super().__init__(source, settings)
        for name in source.names():
            if name.endswith(".weight") and source.entry(name)[1].dtype in ("F8_E5M2", "I8", "U8"):
                raise Unsupported(f"{source.entry(name)[1].dtype} weights in a float8 checkpoint ({self.where(name)})")
        self.size = settings.wholes("weight_block_size", 1) if settings.has("weight_block_size") else []

    def is_quantised(self, name: str) -> bool:
        return self.source.entry(name)[1].dtype == "F8_E4M3"

    def block_scales(self, stem: str) -> Any:
        """float32 [blocks of rows, blocks of columns]."""
        name = next((f"{stem}.{each}" for each in _SCALES if f"{stem}.{each}" in self.source), None)
        if name is None:
            raise ModelError(f"{self.where(f'{stem}.weight')}: float8 values without a scale")
        scales = self.array(name, ("F16", "BF16", "F32"), len(self.source.entry(name)[1].shape))
        self.check(scales.ndim == 2 or scales.size == 1, name, f"scales of shape {scales.shape}")
        return scales.reshape(scales.shape if scales.ndim == 2 else (1, 1)).astype("f4")

    def make(self, stem: str) -> Float8Tensor:
        name = f"{stem}.weight"
        shape = self.array(name, ("F8_E4M3",)).shape
        found = self.block_scales(stem).shape
        # The block size of the config if it fits, else blocks that divide the matrix evenly.
        sizes = [(length, size, count) for length, size, count in zip(shape, self.size, found, strict=False)]
        if len(sizes) == 2 and all(-(-length // size) == count for length, size, count in sizes):
            block = (self.size[0], self.size[1])
        else:
            self.check(not (shape[0] % found[0] or shape[1] % found[1]), name, f"scales {found} for {shape} values")
            block = (shape[0] // found[0], shape[1] // found[1])
        return Float8Tensor(self.where(name), shape, block, self, stem)
