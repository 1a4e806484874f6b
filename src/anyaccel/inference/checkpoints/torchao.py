# SPDX-License-Identifier: Apache-2.0
"""The layouts of torchao's tensor subclasses, as transformers writes them into safetensors files. Torch-free.

Tensor MODULE.weight is MODULE._weight_qdata, ._weight_scale and for some ._weight_zero_point; the file's metadata have
JSON with the class's name and attributes under MODULE.weight.

- Int8Tensor and IntxUnpackedToInt8Tensor: qdata int8 [out, in]. W = scale * (q - zero_point), one each block, which is
  some columns of a row or of all.
- Int4Tensor: qdata [out, in/2], signed, the first of two values in the low bits; scale and zero_point (a float)
  [groups, out]. W = scale * q + zero_point.
- Float8Tensor: qdata float8 [out, in]; scales of blocks.
"""

from __future__ import annotations

import json
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.gguf_types import nibbles
from anyaccel.inference.checkpoints.packed_integers import common_value, group_size
from anyaccel.inference.checkpoints.quantised_layout import (
    FLOATS,
    DecodedTensor,
    Layout,
    QuantisedTensor,
    StoredMatrix,
    Unreadable,
    float8_values,
    row_index,
    scaled,
)
from anyaccel.validation import Fields, check_mapping, error_text, short_repr


class TorchAo(Layout):
    mains = ("._weight_qdata",)
    companions = ("._weight_scale", "._weight_zero_point")
    refused = ("._weight_act_pre_scale",)
    skipped = ("._weight_act_quant_scale", "._weight_act_quant_zero_point")

    def make(self, stem: str) -> StoredMatrix:
        name = f"{stem}._weight_qdata"
        try:
            said = json.loads(self.source.metadata.get(f"{stem}.weight", "{}"))
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{self.where(name)}: the metadata of it are not JSON ({error_text(error)})") from None
        kind = Fields(check_mapping(said, f"{self.where(name)}: metadata"), f"{self.where(name)}: ").text("_type", "")
        makers = {
            "Int8Tensor": self._integers,
            "IntxUnpackedToInt8Tensor": self._integers,
            "Int4Tensor": self._int4,
            "Float8Tensor": self._float8,
        }
        if kind not in makers:
            raise Unreadable(f"reader for torchao's {short_repr(kind)} ({self.where(name)})")
        return makers[kind](stem, name, kind)

    def _levels(self, stem: str, end: str = "scale") -> Any:
        """Scales or zero points [rows or 1, groups]; None if there are none."""
        name = f"{stem}._weight_{end}"
        if name not in self.source:
            return None
        found = self.array(name, (*FLOATS, "I8"), self.rank(name))
        return found if found.ndim == 2 else found.reshape(-1, 1)

    def _integers(self, stem: str, name: str, kind: str) -> QuantisedTensor:
        shape = self.array(name, ("I8",)).shape
        scales, zeros = self._levels(stem), self._levels(stem, "zero_point")
        fits = scales is not None and scales.size > 0 and scales.shape[0] in (1, shape[0])
        self.check(fits, name, "no scales, or not one a row")
        self.check(zeros is None or zeros.shape == scales.shape, name, "zero points are not like scales")
        zero = 128 if zeros is None or not zeros.any() else None
        return QuantisedTensor(
            *(self.where(name), shape, self, stem, f"torchao {kind}"),
            bits=8,
            group=group_size(stem, shape[1], scales.shape[1]),
            zero=zero,
            most_scale=self.most(f"{stem}._weight_scale", scales),
        )

    def _int4(self, stem: str, name: str, kind: str) -> QuantisedTensor:
        octets = self.array(name, ("U8", "I8"))
        shape = (octets.shape[0], octets.shape[1] * 2)
        scales, zeros = self._levels(stem), self._levels(stem, "zero_point")
        fits = scales is not None and zeros is not None and scales.shape == zeros.shape and scales.shape[1] == shape[0]
        self.check(fits, name, "scales and zero points are not [groups, rows]")
        zero = common_value(zeros) if not zeros.any() else None
        return QuantisedTensor(
            *(self.where(name), shape, self, stem, f"torchao {kind}"),
            group=group_size(stem, shape[1], scales.shape[0]),
            zero=8 if zero == 0 else None,
            most_scale=self.most(f"{stem}._weight_scale", scales),
        )

    def _float8(self, stem: str, name: str, kind: str) -> DecodedTensor:
        shape = self.array(name, ("F8_E4M3",)).shape
        scales = self._levels(stem)
        self.check(scales is not None and scales.size > 0, name, "no scales")
        fits = not (shape[0] % scales.shape[0] or shape[1] % scales.shape[1])
        self.check(fits, name, f"scales {scales.shape} for {shape} values")
        block = (shape[0] // scales.shape[0], shape[1] // scales.shape[1])
        return DecodedTensor(self.where(name), shape, self, stem, f"torchao {kind}", made=block)

    def unpack(self, tensor: QuantisedTensor, rows: Any) -> tuple[Any, Any, Any]:
        import numpy

        chosen = row_index(rows)
        scales, zeros = self._levels(tensor.stem).astype("f4"), self._levels(tensor.stem, "zero_point")
        if tensor.bits == 4:
            octets = self.array(f"{tensor.stem}._weight_qdata", ("U8", "I8"))[chosen].view("u1")
            q = nibbles(octets) ^ 8  # without a sign
            scales, zeros = scales.T[chosen], zeros.T[chosen].astype("f4")
            shift = numpy.divide(zeros, scales, out=numpy.zeros_like(scales), where=scales != 0)
            return q, scales, 8 - shift
        q = (self.array(f"{tensor.stem}._weight_qdata", ("I8",))[chosen].astype("i2") + 128).astype("u1")
        zeros = numpy.zeros_like(scales) if zeros is None else zeros.astype("f4")
        whole = (tensor.shape[0], scales.shape[1])
        return q, numpy.broadcast_to(scales, whole)[chosen], 128 + numpy.broadcast_to(zeros, whole)[chosen]

    def decode(self, tensor: DecodedTensor, rows: Any) -> Any:
        import numpy

        octets = self.array(f"{tensor.stem}._weight_qdata", ("F8_E4M3",))[row_index(rows)]
        scales = self._levels(tensor.stem).astype("f4")[numpy.asarray(rows) // tensor.made[0]]
        return scaled(float8_values()[octets], scales, tensor.made[1])
