# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints (GPTQ, AWQ, compressed-tensors), read under the names and shapes of plain ones.

Layouts, W being [out, in]; eight values of four bits (four of eight) share an int32 word, the first in its lowest bits:
- GPTQ: qweight [in/8, out], words along `in`; scales [groups, out]; qzeros [groups, out/8] hold the zero point less one
  (checkpoint_format "gptq"; "gptq_v2" holds it as it is). W = scale * (q - zero).
  With activation order (desc_act) g_idx has the group of each column: such a matrix is converted.
- AWQ (gemm): qweight [in, out/8], qzeros [groups, out/8], words along `out` in the order 0 2 4 6 1 3 5 7.
- compressed-tensors pack-quantized: weight_packed [out, in/8], weight_scale [out, groups], weight_zero_point
  [out/8, groups]; values and zero points are signed and stored plus 8 (plus 128).
- compressed-tensors int-quantized: weight int8 [out, in], weight_scale [out, groups].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.float8 import Float8
from anyaccel.inference.checkpoints.quantised_layout import Layout, QuantisedTensor, row_index
from anyaccel.inference.checkpoints.sources import SafetensorsSource, TensorSource
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.outside import Values, shown

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the position of value i in its word, the inverse of 0 2 4 6 1 3 5 7
_INTEGERS = ("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")


def quantised_source(source: TensorSource, config: Mapping[str, Any]) -> Any:
    """`source`, wrapped for the quantised tensors that the config's `quantization_config` describes, if it has one.

    Raises:
        Unsupported: a method or layout that does not map to the native formats; the message names it.
        ModelError: the tensors do not fit together.
    """
    given = Values(config, "config: ")
    outer = given.mapping("quantization_config")
    settings = outer if outer.known() else given.mapping("text_config").mapping("quantization_config")
    if not settings.known():
        refuse_integers(source)
        return source
    method = settings.text("quant_method", "")
    if not isinstance(source, SafetensorsSource):
        raise Unsupported(f"reader for {method} weights in files other than safetensors")
    if method not in METHODS:
        raise Unsupported(f"reader for quantization {shown(method)}")
    return METHODS[method](source, settings)


def refuse_integers(source: TensorSource) -> None:
    """Raise for integer weights without a quantization_config, whose meaning is unknown."""
    if not isinstance(source, SafetensorsSource):
        return
    for name in source.names():
        file, entry = source.entry(name)
        if name.endswith(".weight") and entry.dtype in _INTEGERS:
            raise ModelError(
                f"{file.path}: tensor {shown(name)} has integers ({entry.dtype}), and config.json has no "
                "quantization_config that says what they stand for"
            )


def _bits(settings: Values, name: str = "bits") -> int:
    bits = settings.whole(name, minimum=1, maximum=64)
    if bits not in (4, 8):
        raise Unsupported(f"reader for {settings.text('quant_method')} weights of {bits} bits")
    return bits


def _unpack(words: Any, bits: int, axis: int, order: Sequence[int] | None = None) -> Any:
    """Unpack the uint8 values of 32-bit words along `axis` of a matrix."""
    import numpy

    count = 32 // bits
    octets = numpy.ascontiguousarray(words).view(numpy.uint32)
    shifts = [bits * (order[i] if order else i) for i in range(count)]
    values = numpy.stack([((octets >> shift) & ((1 << bits) - 1)).astype(numpy.uint8) for shift in shifts], axis + 1)
    shape = list(words.shape)
    shape[axis] *= count
    return values.reshape(shape)


def _common_value(zeros: Any) -> int | None:
    first = int(zeros.flat[0]) if zeros.size else 0
    return first if (zeros == first).all() else None


def _group_size(stem: str, cols: int, groups: int) -> int:
    """The number of columns of each of `groups` groups; 0 for one group."""
    if groups == 1:
        return 0
    if groups < 1 or cols % groups:
        raise ModelError(f"{stem}: {groups} groups do not divide {cols} columns")
    return cols // groups


class _Gptq(Layout):
    suffixes = (".qweight",)

    def __init__(self, source: SafetensorsSource, settings: Values) -> None:
        super().__init__(source, settings)
        self.bits = _bits(settings)
        kind = settings.text("checkpoint_format", "") or "gptq"
        if kind not in ("gptq", "gptq_v2"):
            raise Unsupported(f"reader for the GPTQ checkpoint format {shown(kind)}")
        self.offset = 1 if kind == "gptq" else 0

    def zeros(self, stem: str) -> Any:
        """Zero points [groups, out], with a few more columns if the last word is not full."""
        packed = self.array(f"{stem}.qzeros", ("I32",))
        # They are stored less one, modulo 2**bits: 2**bits - 1 means zero point 0.
        return (_unpack(packed, self.bits, 1).astype("i2") + self.offset) & ((1 << self.bits) - 1)

    def make(self, stem: str) -> QuantisedTensor:
        name = f"{stem}.qweight"
        words = self.array(name, ("I32",))
        shape = (words.shape[1], words.shape[0] * 32 // self.bits)
        scales = self.scales(f"{stem}.scales")
        self.check(scales.shape[1] == shape[0], name, f"{scales.shape[1]} columns of scales for {shape[0]} rows")
        group = _group_size(stem, shape[1], scales.shape[0])
        order = self._order(stem, shape[1], group or shape[1], scales.shape[0])
        zeros = self.zeros(stem)
        self.check(zeros.shape[0] == scales.shape[0] and zeros.shape[1] >= shape[0], name, f"zero points {zeros.shape}")
        zero = _common_value(zeros[:, : shape[0]])
        return QuantisedTensor(self.where(name), shape, self.bits, group, zero, self, stem, group_of=order)

    def _order(self, stem: str, cols: int, group: int, groups: int) -> Any:
        """The group of each column; None if groups are consecutive, as they are without desc_act."""
        import numpy

        name = f"{stem}.g_idx"
        if name not in self.source:
            return None
        index = self.array(name, ("I32", "I64"), 1)
        self.check(len(index) == cols > 0, name, f"{len(index)} entries for {cols} columns")
        self.check(int(index.min()) >= 0 and int(index.max()) < groups, name, f"groups up to {index.max()} of {groups}")
        return None if (index == numpy.arange(cols) // group).all() else index

    def unpack(self, tensor: QuantisedTensor, rows: Any) -> tuple[Any, Any, Any]:
        chosen = row_index(rows)
        words = self.array(f"{tensor.stem}.qweight", ("I32",))[:, chosen]
        scales = self.scales(f"{tensor.stem}.scales")[:, chosen]
        zeros = self.zeros(tensor.stem)[:, chosen]
        return _unpack(words, self.bits, 0).T, scales.T.astype("f4"), zeros.T.astype("f4")


class _Awq(Layout):
    suffixes = (".qweight",)

    def __init__(self, source: SafetensorsSource, settings: Values) -> None:
        super().__init__(source, settings)
        if _bits(settings) != 4:
            raise Unsupported("reader for AWQ weights of 8 bits")
        version = (settings.text("version", "") or "gemm").lower()
        if version != "gemm":
            raise Unsupported(f"reader for AWQ's version {shown(version)}, only 'gemm' is known")

    def zeros(self, stem: str) -> Any:
        return _unpack(self.array(f"{stem}.qzeros", ("I32",)), 4, 1, _AWQ_ORDER)

    def make(self, stem: str) -> QuantisedTensor:
        name = f"{stem}.qweight"
        words = self.array(name, ("I32",))
        shape = (words.shape[1] * 8, words.shape[0])
        scales = self.scales(f"{stem}.scales")
        zeros = self.zeros(stem)
        self.check(
            scales.shape == zeros.shape and scales.shape[1] == shape[0],
            name,
            f"scales {scales.shape} and zero points {zeros.shape} do not fit {shape}",
        )
        group = _group_size(stem, shape[1], scales.shape[0])
        return QuantisedTensor(self.where(name), shape, 4, group, _common_value(zeros), self, stem)

    def unpack(self, tensor: QuantisedTensor, rows: Any) -> tuple[Any, Any, Any]:
        chosen = row_index(rows)
        words = self.array(f"{tensor.stem}.qweight", ("I32",))
        if isinstance(chosen, slice):  # unpack only the words that have these rows
            first = chosen.start // 8
            q = _unpack(words[:, first : -(-chosen.stop // 8)], 4, 1, _AWQ_ORDER)
            q = q[:, chosen.start - first * 8 : chosen.stop - first * 8]
        else:
            q = _unpack(words, 4, 1, _AWQ_ORDER)[:, chosen]
        scales = self.scales(f"{tensor.stem}.scales")[:, chosen]
        return q.T, scales.T.astype("f4"), self.zeros(tensor.stem)[:, chosen].T.astype("f4")


class _CompressedTensors(Layout):
    suffixes = (".weight_packed", ".weight")

    def __init__(self, source: SafetensorsSource, settings: Values) -> None:
        kind = settings.text("format", "")
        if kind not in ("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision"):
            raise Unsupported(f"reader for the compressed-tensors format {shown(kind)}")
        super().__init__(source, settings)

    def is_quantised(self, name: str) -> bool:
        return name.endswith("_packed") or self.source.entry(name)[1].dtype == "I8"

    def make(self, stem: str) -> QuantisedTensor:
        if f"{stem}.weight_g_idx" in self.source:
            raise Unsupported(f"activation order of compressed-tensors ({self.where(f'{stem}.weight_g_idx')})")
        scales = self.scales(f"{stem}.weight_scale")
        if f"{stem}.weight_packed" not in self.source:
            name = f"{stem}.weight"
            shape, bits = self.array(name, ("I8",)).shape, 8
        else:
            name = f"{stem}.weight_packed"
            words = self.array(name, ("I32",))
            found = self.array(f"{stem}.weight_shape", ("I64", "I32"), 1)
            self.check(len(found) == 2 and found[0] == words.shape[0] and found[1] > 0, name, f"weight_shape {found}")
            shape = (int(found[0]), int(found[1]))
            bits = next((each for each in (4, 8) if -(-shape[1] * each // 32) == words.shape[1]), 0)
            if not bits:
                raise Unsupported(f"compressed-tensors weights of other than 4 or 8 bits ({self.where(name)})")
        if scales.shape == (1, 1):
            raise Unsupported(f"one scale for a whole matrix ({self.where(name)})")
        self.check(scales.shape[0] == shape[0], name, f"{scales.shape[0]} rows of scales for {shape[0]} rows")
        group = _group_size(stem, shape[1], scales.shape[1])
        zeros = self.zeros(stem, bits, scales.shape)
        uniform = 1 << (bits - 1) if zeros is None else _common_value(zeros)
        return QuantisedTensor(self.where(name), shape, bits, group, uniform, self, stem)

    def zeros(self, stem: str, bits: int, shape: tuple[int, ...]) -> Any | None:
        """Zero points [out, groups], made unsigned like the values; None if there are none."""
        name = f"{stem}.weight_zero_point"
        if name not in self.source:
            return None
        if f"{stem}.weight_packed" not in self.source:
            found = self.array(name, ("I8",)).astype("i2") + 128
        else:
            found = _unpack(self.array(name, ("I32",)), bits, 0)[: shape[0]]
        self.check(found.shape == shape, name, f"zero points {found.shape} for scales {shape}")
        return found

    def unpack(self, tensor: QuantisedTensor, rows: Any) -> tuple[Any, Any, Any]:
        import numpy

        chosen = row_index(rows)
        scales = self.scales(f"{tensor.stem}.weight_scale")
        zeros = self.zeros(tensor.stem, tensor.bits, scales.shape)
        if f"{tensor.stem}.weight_packed" in self.source:
            words = self.array(f"{tensor.stem}.weight_packed", ("I32",))[chosen]
            q = _unpack(words, tensor.bits, 1)[:, : tensor.shape[1]]
        else:
            q = (self.array(f"{tensor.stem}.weight", ("I8",))[chosen].astype("i2") + 128).astype("u1")
        if zeros is None:
            zeros = numpy.full(scales.shape, 1 << (tensor.bits - 1), "f4")
        return q, scales[chosen].astype("f4"), zeros[chosen].astype("f4")


def _compressed_tensors(source: SafetensorsSource, settings: Values) -> Layout:
    kind = Float8 if settings.text("format", "") == "float-quantized" else _CompressedTensors
    return kind(source, settings)


# quant_method of a config -> the layout of its checkpoints; see docs/add-a-format.md.
METHODS: dict[str, Callable[[SafetensorsSource, Values], Layout]] = {
    "gptq": _Gptq,
    "awq": _Awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": Float8,
    "fbgemm_fp8": Float8,
}
