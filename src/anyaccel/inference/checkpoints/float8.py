# SPDX-License-Identifier: Apache-2.0
"""Layouts of float8 (e4m3fn) weights. Torch-free.

- transformers' and DeepSeek-V3's `fp8`: weight [out, in], weight_scale_inv [blocks of rows, blocks of columns] of
  `weight_block_size` (the last ones may be smaller); W = weight * weight_scale_inv.
- compressed-tensors' float-quantized and naive-quantized, fbgemm's and modelopt's: weight [out, in], weight_scale of
  the whole matrix, of each row [out, 1] or [out], or of blocks.
- MXFP8: weight_scale is e8m0, the exponent of a power of two, one for each 32 columns of a row.

They run as bfloat16, as no native integer format can hold float values. The product of a value and its scale is rounded
once. Activations are not rounded to float8, whatever `activation_scheme` says.
"""

from __future__ import annotations

from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.quantised_layout import (
    FLOATS,
    DecodedTensor,
    Layout,
    Unreadable,
    float8_values,
    power_values,
    row_index,
    scaled,
)
from anyaccel.inference.checkpoints.sources import SafetensorsSource
from anyaccel.validation import Fields

_SCALES = ("weight_scale_inv", "weight_scale")
_POWERS = ("U8", "F8_E8M0")


class Float8(Layout):
    mains = (".weight",)
    companions = tuple(f".{name}" for name in _SCALES)
    refused = (".pre_quant_scale",)

    def __init__(self, source: SafetensorsSource, settings: Fields) -> None:
        super().__init__(source, settings)
        self.size = settings.get_ints("weight_block_size", 1) if settings.has("weight_block_size") else []

    def is_quantised(self, name: str, stem: str) -> bool:
        if self.dtype(name) == "F8_E5M2":
            raise Unreadable(f"F8_E5M2 weights in a float8 checkpoint ({self.where(name)})")
        return self.dtype(name) == "F8_E4M3"

    def block_scales(self, stem: str) -> Any:
        """float32 [blocks of rows, blocks of columns]."""
        name = next((f"{stem}.{each}" for each in _SCALES if f"{stem}.{each}" in self.source), None)
        if name is None:
            raise ModelError(f"{self.where(f'{stem}.weight')}: float8 values without a scale")
        scales = self.array(name, (*FLOATS, *_POWERS), self.rank(name))
        if self.dtype(name) in _POWERS:
            scales = power_values()[scales]
        rows = self.source.entry(f"{stem}.weight")[1].shape[0]
        self.check(scales.size > 0, name, "no scales")
        each_row = scales.ndim == 1 and scales.size == rows > 1
        self.check(scales.ndim == 2 or scales.size == 1 or each_row, name, f"scales of shape {scales.shape}")
        return scales.reshape(scales.shape if scales.ndim == 2 else (-1, 1)).astype("f4")

    def make(self, stem: str) -> DecodedTensor:
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
        return DecodedTensor(self.where(name), shape, self, stem, "float8", made=block)

    def decode(self, tensor: DecodedTensor, rows: Any) -> Any:
        import numpy

        octets = self.array(f"{tensor.stem}.weight", ("F8_E4M3",))[row_index(rows)]
        scales = self.block_scales(tensor.stem)[numpy.asarray(rows) // tensor.made[0]]
        return scaled(float8_values()[octets], scales, tensor.made[1])
