# SPDX-License-Identifier: Apache-2.0
"""The layouts of bitsandbytes. Torch-free.

- 8 bits (LLM.int8()): weight int8 [out, in]; SCB [out] has 127 times the scale.
- 4 bits: weight uint8 [out * in / 2, 1], the first of two values in the high bits; weight.quant_map has the 16 values
  of the codes (nf4 or fp4), weight.absmax what each block of the flat matrix is multiplied by. With double quantisation
  absmax is uint8: nested_quant_map's value, times nested_absmax of each nested block, plus nested_offset.
  weight.quant_state.bitsandbytes__nf4 is JSON with the shape and the sizes of blocks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.quantised_layout import (
    FLOATS,
    DecodedTensor,
    Layout,
    QuantisedTensor,
    Unreadable,
    row_index,
    scaled,
)
from anyaccel.validation import Fields, check_mapping, error_text

_STATES = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))


class BitsAndBytes8(Layout):
    """Of bitsandbytes: LLM.int8()."""

    mains = (".weight",)
    companions = (".SCB",)
    skipped = (".weight_format",)

    def is_quantised(self, name: str, stem: str) -> bool:
        return self.dtype(name) == "I8" and f"{stem}.SCB" in self.source

    def make(self, stem: str) -> QuantisedTensor:
        name = f"{stem}.weight"
        shape = self.array(name, ("I8",)).shape
        scales = self.array(f"{stem}.SCB", FLOATS, 1)
        self.check(len(scales) == shape[0], name, f"{len(scales)} scales for {shape[0]} rows")
        form = f"{stem}.weight_format"
        if form in self.source and self.array(form, ("U8", "I8"), self.rank(form)).any():
            raise Unreadable(f"bitsandbytes weights in the order of a GPU's tiles ({self.where(form)})")
        return QuantisedTensor(self.where(name), shape, self, stem, "bitsandbytes int8", bits=8, zero=128)

    def unpack(self, tensor: QuantisedTensor, rows: Any) -> tuple[Any, Any, Any]:
        import numpy

        chosen = row_index(rows)
        q = (self.array(f"{tensor.stem}.weight", ("I8",))[chosen].astype("i2") + 128).astype("u1")
        scales = self.array(f"{tensor.stem}.SCB", FLOATS, 1)[chosen].astype("f4") * numpy.float32(1 / 127)
        return q, scales[:, None], numpy.full((len(q), 1), 128, "f4")


@dataclass(frozen=True)
class _Blocks:
    """How the flat matrix is scaled: blocks of `size` values, and of `nested` blocks, 0 without double quantisation."""

    size: int
    nested: int
    offset: float


class BitsAndBytes4(Layout):
    mains = (".weight",)
    companions = (".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map", *_STATES)

    def is_quantised(self, name: str, stem: str) -> bool:
        return any(stem + state in self.source for state in _STATES)

    def make(self, stem: str) -> DecodedTensor:
        name = f"{stem}.weight"
        state_name = next(stem + state for state in _STATES if stem + state in self.source)
        try:
            state = json.loads(bytes(self.array(state_name, ("U8",), 1)))
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{self.where(state_name)}: not JSON ({error_text(error)})") from None
        given = Fields(check_mapping(state, f"{self.where(state_name)}: state"), f"{self.where(state_name)}: ")
        shape = given.get_ints("shape", 1)
        if len(shape) != 2:
            raise Unreadable(f"bitsandbytes weights of shape {shape} ({self.where(name)})")
        count = shape[0] * shape[1]
        size = given.get_int("blocksize", minimum=2)
        blocks = -(-count // size)
        octets = self._octets(name)
        self.check(len(octets) * 2 == count + count % 2, name, f"{len(octets)} bytes for {count} values of 4 bits")
        self.check(self._table(stem, "quant_map").size == 16, name, "quant_map has not 16 values")
        nested, offset = 0, 0.0
        absmax = f"{stem}.weight.absmax"
        if self.dtype(absmax) == "U8":
            nested, offset = given.get_int("nested_blocksize", minimum=1), given.number("nested_offset")
            self.check(self._table(stem, "nested_quant_map").size == 256, name, "nested_quant_map has not 256 values")
            outer = self._table(stem, "nested_absmax").size
            self.check(outer == -(-blocks // nested), name, f"nested_absmax has {outer} values for {blocks} blocks")
        found = self.array(absmax, ("U8", *FLOATS), 1).size
        self.check(found == blocks, name, f"absmax has {found} values for {blocks} blocks")
        kind = f"bitsandbytes {state_name.rpartition('__')[2]}"
        return DecodedTensor(
            self.where(name), (shape[0], shape[1]), self, stem, kind, made=_Blocks(size, nested, offset)
        )

    def _octets(self, name: str) -> Any:
        """The packed values; some are stored as another type of as many bytes."""
        return self.array(name, ("U8",), self.rank(name)).reshape(-1)

    def _table(self, stem: str, name: str) -> Any:
        return self.array(f"{stem}.weight.{name}", FLOATS, 1)

    def decode(self, tensor: DecodedTensor, rows: Any) -> Any:
        import numpy

        cols, blocks = tensor.shape[1], tensor.made
        octets = self._octets(f"{tensor.stem}.weight")
        table = self._table(tensor.stem, "quant_map").astype(numpy.float32)
        if cols % blocks.size == 0 and cols % 2 == 0:  # rows are whole blocks
            chosen = row_index(rows)
            pairs = table[numpy.stack([numpy.arange(256) >> 4, numpy.arange(256) & 15], axis=1)]
            values = pairs[octets.reshape(-1, cols // 2)[chosen]].reshape(-1, cols)
            of_rows = numpy.arange(tensor.shape[0] * cols // blocks.size).reshape(tensor.shape[0], -1)[chosen]
            return scaled(values, self._absmax(tensor, of_rows), blocks.size)
        where = numpy.asarray(rows, numpy.int64)[:, None] * cols + numpy.arange(cols)
        codes = numpy.where(where & 1, octets[where >> 1] & 15, octets[where >> 1] >> 4)
        return table[codes] * self._absmax(tensor, where // blocks.size)

    def _absmax(self, tensor: DecodedTensor, of: Any) -> Any:
        """float32: what the values of these blocks are multiplied by."""
        import numpy

        absmax = self.array(f"{tensor.stem}.weight.absmax", ("U8", *FLOATS), 1)[of]
        if tensor.made.nested:
            outer = self._table(tensor.stem, "nested_absmax")[of // tensor.made.nested]
            absmax = self._table(tensor.stem, "nested_quant_map")[absmax] * outer + numpy.float32(tensor.made.offset)
        return absmax.astype(numpy.float32)
