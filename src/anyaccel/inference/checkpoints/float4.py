# SPDX-License-Identifier: Apache-2.0
"""Layouts of float4 (e2m1) weights, two values a byte along `in`, the first in the low bits. Torch-free.

- gpt-oss: NAME_blocks uint8 [experts, out, in/32, 16], NAME_scales [experts, out, in/32], of experts whose plain matrix
  NAME is [experts, in, out]; a scale is the exponent of a power of two, plus 127 (MXFP4).
- compressed-tensors: weight_packed uint8 [out, in/2]. mxfp4-pack-quantized: weight_scale [out, in/32] as above.
  nvfp4-pack-quantized: weight_scale float8 [out, in/16], divided by weight_global_scale [1].
- modelopt's NVFP4: weight uint8 [out, in/2], weight_scale float8 [out, in/16], times weight_scale_2.
"""

from __future__ import annotations

from typing import Any

from anyaccel.inference.checkpoints.gguf_types import nibbles
from anyaccel.inference.checkpoints.quantised_layout import (
    FLOATS,
    Layout,
    QuantisedTensor,
    float8_values,
    power_values,
    row_index,
)
from anyaccel.inference.spec.packed_formats import FORMATS

_CODES = FORMATS["fp4"].codes  # twice the values
_POWERS = ("U8", "F8_E8M0")


class Mxfp4Experts(Layout):
    """As gpt-oss is published."""

    mains = ("_blocks",)
    plain = ""
    companions = ("_scales",)

    def is_quantised(self, name: str, stem: str) -> bool:
        return self.dtype(name) == "U8" and f"{stem}_scales" in self.source

    def make(self, stem: str) -> QuantisedTensor:
        name = f"{stem}_blocks"
        shape = self.array(name, ("U8",), 4).shape
        scales = self.array(f"{stem}_scales", _POWERS, 3)
        self.check(shape[:3] == scales.shape and shape[3] == 16, name, f"blocks {shape} for scales {scales.shape}")
        # The weights of an expert are small powers of two: what the largest scale is tells whether halves hold them.
        most = float(power_values()[scales.max()]) / 2 if scales.size else 0.0
        return QuantisedTensor(
            *(self.where(name), (shape[0], shape[1], shape[2] * 32), self, stem, "mxfp4"),
            transposed=True,
            group=32,
            codes=_CODES,
            most_scale=most,
        )

    def unpack(self, tensor: QuantisedTensor, rows: Any) -> tuple[Any, Any, Any]:
        chosen = row_index(rows)
        blocks = self.array(f"{tensor.stem}_blocks", ("U8",), 4, tensor.index)[chosen]
        scales = self.array(f"{tensor.stem}_scales", _POWERS, 3, tensor.index)[chosen]
        return nibbles(blocks.reshape(len(blocks), -1)), power_values()[scales] / 2, None


class Float4(Layout):
    """Of compressed-tensors and modelopt; with scales that are powers of two, or float8."""

    mains = (".weight_packed", ".weight")
    companions = (".weight_scale", ".weight_scale_2", ".weight_global_scale")
    refused = (".pre_quant_scale", ".weight_zero_point")

    def is_quantised(self, name: str, stem: str) -> bool:
        return self.dtype(name) == "U8" and self.dtype(f"{stem}.weight_scale") in ("F8_E4M3", *_POWERS)

    def _values(self, stem: str) -> str:
        return next(stem + end for end in self.mains if stem + end in self.source)

    def make(self, stem: str) -> QuantisedTensor:
        name = self._values(stem)
        rows, octets = self.array(name, ("U8",)).shape
        scales = self._scales(stem, slice(None))
        groups = scales.shape[1]
        fits = scales.shape[0] == rows and groups > 0 and octets * 2 % groups == 0
        self.check(fits, name, f"scales {scales.shape} for {rows} x {octets * 2} values")
        kind = "nvfp4" if self.dtype(f"{stem}.weight_scale") == "F8_E4M3" else "mxfp4"
        return QuantisedTensor(
            *(self.where(name), (rows, octets * 2), self, stem, kind),
            group=octets * 2 // groups,
            codes=_CODES,
            most_scale=float(scales.max(initial=0)),
        )

    def _scales(self, stem: str, rows: Any) -> Any:
        """float32 [rows, groups], of what is twice the values."""
        import numpy

        name = f"{stem}.weight_scale"
        if self.dtype(name) in _POWERS:
            return power_values()[self.array(name, _POWERS)[rows]] / 2
        scales = float8_values()[self.array(name, ("F8_E4M3",))[rows]]
        for end, divides in ((".weight_scale_2", False), (".weight_global_scale", True)):
            whole = stem + end
            if whole in self.source:
                found = self.array(whole, FLOATS, self.rank(whole))
                self.check(found.size == 1 and found.flat[0] != 0, whole, f"{found.shape} scales, or zero")
                scales = scales / found.reshape(1, 1) if divides else scales * found.reshape(1, 1)
        return (scales / 2).astype(numpy.float32)

    def unpack(self, tensor: QuantisedTensor, rows: Any) -> tuple[Any, Any, Any]:
        chosen = row_index(rows)
        octets = self.array(self._values(tensor.stem), ("U8",))[chosen]
        return nibbles(octets), self._scales(tensor.stem, chosen), None
