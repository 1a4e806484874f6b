# SPDX-License-Identifier: Apache-2.0
"""BitNet's layout. Torch-free.

weight uint8 [out/4, in] has two bits a value, plus one, of four rows that are out/4 apart; weight_scale [1]. Values are
-1, 0 and 1. Activations are not rounded to int8.
"""

from __future__ import annotations

from typing import Any

from anyaccel.inference.checkpoints.quantised_layout import FLOATS, Layout, QuantisedTensor, Unreadable
from anyaccel.inference.checkpoints.sources import SafetensorsSource
from anyaccel.validation import Fields


class BitNet(Layout):
    mains = (".weight",)
    companions = (".weight_scale",)

    def __init__(self, source: SafetensorsSource, settings: Fields) -> None:
        super().__init__(source, settings)
        if settings.text("quantization_mode", "offline") != "offline":
            raise Unreadable("BitNet weights that are rounded as the model runs (quantization_mode)")

    def is_quantised(self, name: str, stem: str) -> bool:
        return self.dtype(name) == "U8" and f"{stem}.weight_scale" in self.source

    def make(self, stem: str) -> QuantisedTensor:
        name = f"{stem}.weight"
        rows, cols = self.array(name, ("U8",)).shape
        scale = self._scale(stem)
        return QuantisedTensor(
            *(self.where(name), (rows * 4, cols), self, stem, "bitnet"),
            bits=2,
            codes=(-1, 0, 1, 2),
            most_scale=abs(scale),
        )

    def _scale(self, stem: str) -> float:
        """What values are multiplied by: transformers' `bitlinear` divides by what is stored."""
        name = f"{stem}.weight_scale"
        found = self.array(name, FLOATS, self.rank(name))
        self.check(found.size == 1 and found.flat[0] != 0, name, f"scales of shape {found.shape}, or zero")
        stored = float(found.flat[0])
        return stored if self.settings.text("linear_class", "bitlinear") == "autobitlinear" else 1 / stored

    def unpack(self, tensor: QuantisedTensor, rows: Any) -> tuple[Any, Any, Any]:
        import numpy

        packed = self.array(f"{tensor.stem}.weight", ("U8",))
        wanted = numpy.asarray(rows)
        quarter, row = numpy.divmod(wanted, len(packed))
        q = packed[row] >> (2 * quarter)[:, None].astype("u1") & 3
        return q, numpy.full((len(q), 1), self._scale(tensor.stem), "f4"), None
