# SPDX-License-Identifier: Apache-2.0
"""Layouts of whole numbers of 2 to 8 bits with scales. Torch-free. W is [out, in].

- GPTQ: qweight [in * bits / 32, out], words along `in`; scales [groups, out]; qzeros [groups, out * bits / 32] have the
  zero point less one (checkpoint_format "gptq"; "gptq_v2" has it as it is). W = scale * (q - zero).
  With activation order (desc_act) g_idx has the group of each column: such a matrix is converted. AutoRound has the
  same or AWQ's.
- AWQ "gemm": qweight [in, out/8], qzeros [groups, out/8], words along `out` in the order 0 2 4 6 1 3 5 7.
- AWQ "gemv": qweight [out, in/8], words along `in` in order; scales [out, groups] and qzeros [out, groups/8], padded.
- compressed-tensors' integers: weight_packed [out, in * bits / 32], weight_scale [out, groups] or [1],
  weight_zero_point [out * bits / 32, groups]; values and zero points have a sign and are stored plus 2**(bits - 1).
  Or weight int8 [out, in], and zero points int8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.quantised_layout import FLOATS, Layout, QuantisedTensor, Unreadable, row_index
from anyaccel.inference.checkpoints.sources import SafetensorsSource
from anyaccel.validation import Fields, short_repr

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the position of value i in its word, the inverse of 0 2 4 6 1 3 5 7
_WORD = 32  # bits


def unpack_words(words: Any, bits: int, axis: int, order: Sequence[int] | None = None) -> Any:
    """The uint8 values of 32-bit words along `axis` of a matrix: a stream of bits, the first one the lowest."""
    import numpy

    if _WORD % bits:
        return _unpack_stream(words, bits, axis)
    count = _WORD // bits
    octets = numpy.ascontiguousarray(words).view(numpy.uint32)
    shifts = [bits * (order[i] if order else i) for i in range(count)]
    values = numpy.stack([((octets >> shift) & ((1 << bits) - 1)).astype(numpy.uint8) for shift in shifts], axis + 1)
    shape = list(words.shape)
    shape[axis] *= count
    return values.reshape(shape)


def _unpack_stream(words: Any, bits: int, axis: int) -> Any:
    """As `unpack_words`, where values begin in one word and end in the next: `bits` words have 32 of them."""
    import numpy

    octets = numpy.ascontiguousarray(words).view(numpy.uint32)
    octets = octets.T if axis == 0 else octets
    rows, count = octets.shape
    octets = numpy.pad(octets, ((0, 0), (0, -count % bits))).reshape(rows, -1, bits)
    values = numpy.empty((rows, octets.shape[1], _WORD), numpy.uint8)
    for i in range(_WORD):
        word, shift = divmod(i * bits, _WORD)
        value = octets[:, :, word] >> shift
        if shift + bits > _WORD:
            value = value | octets[:, :, word + 1] << (_WORD - shift)
        values[:, :, i] = value & ((1 << bits) - 1)
    found = values.reshape(rows, -1)[:, : count * _WORD // bits]
    return found.T if axis == 0 else found


def bits_of(settings: Fields, allowed: Sequence[int], name: str = "bits") -> int:
    bits = settings.get_int(name, minimum=1, maximum=64)
    if bits not in allowed:
        raise Unreadable(f"reader for {settings.text('quant_method')} weights of {bits} bits")
    return bits


def common_value(zeros: Any) -> int | None:
    first = int(zeros.flat[0]) if zeros.size else 0
    return first if (zeros == first).all() else None


def group_size(stem: str, cols: int, groups: int) -> int:
    """The number of columns of each of `groups` groups; 0 for one group."""
    if groups == 1:
        return 0
    if groups < 1 or cols % groups:
        raise ModelError(f"{stem}: {groups} groups do not divide {cols} columns")
    return cols // groups


class Gptq(Layout):
    mains = (".qweight",)
    companions = (".scales", ".qzeros", ".g_idx")

    def __init__(self, source: SafetensorsSource, settings: Fields, offset: int | None = None) -> None:
        super().__init__(source, settings)
        self.bits = bits_of(settings, range(2, 9))
        kind = settings.text("checkpoint_format", "") or "gptq"
        if kind not in ("gptq", "gptq_v2"):
            raise Unreadable(f"reader for the GPTQ checkpoint format {short_repr(kind)}")
        self.offset = int(kind == "gptq") if offset is None else offset

    def _bits(self, stem: str) -> int:
        """Of a matrix: some checkpoints have more for a few, which the columns' groups tell."""
        if f"{stem}.g_idx" not in self.source:
            return self.bits
        words, cols = self.array(f"{stem}.qweight", ("I32",)).shape[0], self.array(f"{stem}.g_idx", ("I32",), 1).size
        return next((bits for bits in range(2, 9) if words * _WORD == cols * bits), self.bits)

    def zeros(self, stem: str, bits: int) -> Any:
        """Zero points [groups, out], with a few more columns if the last word is not full."""
        packed = self.array(f"{stem}.qzeros", ("I32",))
        # They are stored less one, modulo 2**bits: 2**bits - 1 means zero point 0.
        return (unpack_words(packed, bits, 1).astype("i2") + self.offset) & ((1 << bits) - 1)

    def make(self, stem: str) -> QuantisedTensor:
        name = f"{stem}.qweight"
        words = self.array(name, ("I32",))
        bits = self._bits(stem)
        shape = (words.shape[1], words.shape[0] * _WORD // bits)
        scales = self.scales(f"{stem}.scales")
        self.check(scales.shape[1] == shape[0], name, f"{scales.shape[1]} columns of scales for {shape[0]} rows")
        group = group_size(stem, shape[1], scales.shape[0])
        order = self._order(stem, shape[1], group or shape[1], scales.shape[0])
        zeros = self.zeros(stem, bits)
        self.check(zeros.shape[0] == scales.shape[0] and zeros.shape[1] >= shape[0], name, f"zero points {zeros.shape}")
        zero = common_value(zeros[:, : shape[0]])
        most = self.most(f"{stem}.scales", scales)
        return QuantisedTensor(
            *(self.where(name), shape, self, stem, self.settings.text("quant_method")),
            bits=bits,
            group=group,
            zero=zero,
            group_of=order,
            most_scale=most,
        )

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
        zeros = self.zeros(tensor.stem, tensor.bits)[:, chosen]
        return unpack_words(words, tensor.bits, 0).T, scales.T.astype("f4"), zeros.T.astype("f4")


class Awq(Layout):
    """The version "gemm"."""

    mains = (".qweight",)
    companions = (".scales", ".qzeros")

    def __init__(self, source: SafetensorsSource, settings: Fields) -> None:
        super().__init__(source, settings)
        if bits_of(settings, (4, 8)) != 4:
            raise Unreadable("reader for AWQ weights of 8 bits")

    def zeros(self, stem: str) -> Any:
        return unpack_words(self.array(f"{stem}.qzeros", ("I32",)), 4, 1, _AWQ_ORDER)

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
        group = group_size(stem, shape[1], scales.shape[0])
        most = self.most(f"{stem}.scales", scales)
        return QuantisedTensor(
            *(self.where(name), shape, self, stem, self.settings.text("quant_method")),
            group=group,
            zero=common_value(zeros),
            most_scale=most,
        )

    def unpack(self, tensor: QuantisedTensor, rows: Any) -> tuple[Any, Any, Any]:
        chosen = row_index(rows)
        words = self.array(f"{tensor.stem}.qweight", ("I32",))
        if isinstance(chosen, slice):  # unpack only the words that have these rows
            first = chosen.start // 8
            q = unpack_words(words[:, first : -(-chosen.stop // 8)], 4, 1, _AWQ_ORDER)
            q = q[:, chosen.start - first * 8 : chosen.stop - first * 8]
        else:
            q = unpack_words(words, 4, 1, _AWQ_ORDER)[:, chosen]
        scales = self.scales(f"{tensor.stem}.scales")[:, chosen]
        return q.T, scales.T.astype("f4"), self.zeros(tensor.stem)[:, chosen].T.astype("f4")


class AwqGemv(Layout):
    """The version "gemv"."""

    mains = (".qweight",)
    companions = (".scales", ".qzeros")

    def __init__(self, source: SafetensorsSource, settings: Fields) -> None:
        super().__init__(source, settings)
        bits_of(settings, (4,))
        given = settings.get_int("group_size" if settings.has("group_size") else "q_group_size", 128, minimum=-1)
        self.size = max(given, 0)

    def make(self, stem: str) -> QuantisedTensor:
        name = f"{stem}.qweight"
        words = self.array(name, ("I32",))
        shape = (words.shape[0], words.shape[1] * 8)
        size = self.size or shape[1]
        self.check(shape[1] % size == 0, name, f"groups of {size} do not divide {shape[1]} columns")
        groups = shape[1] // size
        scales, zeros = self._levels(stem)
        found = f"scales {scales.shape} and zero points {zeros.shape} do not fit {shape}"
        self.check(scales.shape[0] == zeros.shape[0] == shape[0], name, found)
        self.check(min(scales.shape[1], zeros.shape[1]) >= groups, name, found)
        most = self.most(f"{stem}.scales", scales)
        return QuantisedTensor(
            *(self.where(name), shape, self, stem, "awq"),
            group=size % shape[1],
            zero=common_value(zeros[:, :groups]),
            most_scale=most,
        )

    def _levels(self, stem: str) -> tuple[Any, Any]:
        """Scales and zero points [out, groups], with more columns where the last word is not full."""
        return self.scales(f"{stem}.scales"), unpack_words(self.array(f"{stem}.qzeros", ("I32",)), 4, 1)

    def unpack(self, tensor: QuantisedTensor, rows: Any) -> tuple[Any, Any, Any]:
        chosen = row_index(rows)
        groups = tensor.shape[1] // (tensor.group or tensor.shape[1])
        scales, zeros = (each[chosen, :groups].astype("f4") for each in self._levels(tensor.stem))
        return unpack_words(self.array(f"{tensor.stem}.qweight", ("I32",))[chosen], 4, 1), scales, zeros


def awq(source: SafetensorsSource, settings: Fields) -> Layout:
    """The layout of an AWQ checkpoint."""
    version = (settings.text("version", "") or "gemm").lower()
    if version == "gemv":
        return AwqGemv(source, settings)
    if version != "gemm":
        raise Unreadable(f"reader for AWQ's version {short_repr(version)}, only 'gemm' and 'gemv' are known")
    return Awq(source, settings)


class CompressedIntegers(Layout):
    """Of compressed-tensors: in words of 32 bits, or int8."""

    mains = (".weight_packed", ".weight")
    companions = (".weight_scale", ".weight_zero_point", ".weight_shape")
    refused = (".weight_g_idx", ".pre_quant_scale")

    def __init__(self, source: SafetensorsSource, settings: Fields) -> None:
        super().__init__(source, settings)
        if settings.mapping("transform_config").mapping("config_groups").known():
            raise Unreadable("transforms of compressed-tensors (transform_config)")

    def is_quantised(self, name: str, stem: str) -> bool:
        dtype = "I32" if name.endswith("_packed") else "I8"
        return self.dtype(name) == dtype and f"{stem}.weight_scale" in self.source

    def make(self, stem: str) -> QuantisedTensor:
        packed = f"{stem}.weight_packed" in self.source
        name = f"{stem}.weight_packed" if packed else f"{stem}.weight"
        if packed:
            words = self.array(name, ("I32",))
            found = self.array(f"{stem}.weight_shape", ("I64", "I32"), 1)
            self.check(len(found) == 2 and found[0] == words.shape[0] and found[1] > 0, name, f"weight_shape {found}")
            shape = (int(found[0]), int(found[1]))
            bits = self._bits(name, shape[1], words.shape[1])
        else:
            shape, bits = self.array(name, ("I8",)).shape, 8
        scales = self._scales(stem)
        self.check(scales.shape[0] in (1, shape[0]), name, f"{scales.shape[0]} rows of scales for {shape[0]} rows")
        group = group_size(stem, shape[1], scales.shape[1])
        zeros = self._zeros(stem, bits, scales.shape)
        uniform = 1 << (bits - 1) if zeros is None else common_value(zeros)
        most = self.most(f"{stem}.weight_scale", scales)
        return QuantisedTensor(
            *(self.where(name), shape, self, stem, "compressed-tensors"),
            bits=bits,
            group=group,
            zero=uniform,
            most_scale=most,
        )

    def _bits(self, name: str, cols: int, words: int) -> int:
        """Bits of a value. As many words may hold a short row at several widths: then the config says."""
        fitting = [each for each in range(2, 9) if -(-cols * each // _WORD) == words]
        if not fitting:
            raise Unreadable(f"compressed-tensors weights of other than 2 to 8 bits ({self.where(name)})")
        groups = self.settings.mapping("config_groups")
        said = {groups.mapping(each).mapping("weights").get_int("num_bits", 0) for each in groups.known()}
        likely = [each for each in fitting if each in said] or fitting
        if len(likely) > 1:
            either = f"{likely[0]} or {likely[1]}"
            raise Unreadable(f"weights of {either} bits: the config does not say which ({self.where(name)})")
        return likely[0]

    def _scales(self, stem: str) -> Any:
        """[out, groups], or [1, 1] where all share one."""
        name = f"{stem}.weight_scale"
        scales = self.array(name, FLOATS, self.rank(name))
        self.check(scales.ndim == 2 or scales.size == 1, name, f"scales of shape {scales.shape}")
        return scales if scales.ndim == 2 else scales.reshape(1, 1)

    def _zeros(self, stem: str, bits: int, shape: tuple[int, ...]) -> Any | None:
        """Zero points like the scales, made unsigned like the values; None if there are none."""
        name = f"{stem}.weight_zero_point"
        if name not in self.source:
            return None
        if self.dtype(name) == "I8":
            found = self.array(name, ("I8",), self.rank(name)).astype("i2") + (1 << (bits - 1))
            found = found.reshape(1, 1) if found.size == 1 else found
        else:
            found = unpack_words(self.array(name, ("I32",)), bits, 0)[: shape[0]]
        self.check(found.shape == shape, name, f"zero points {found.shape} for scales {shape}")
        return found

    def unpack(self, tensor: QuantisedTensor, rows: Any) -> tuple[Any, Any, Any]:
        import numpy

        chosen = row_index(rows)
        scales = self._scales(tensor.stem)
        zeros = self._zeros(tensor.stem, tensor.bits, scales.shape)
        if f"{tensor.stem}.weight_packed" in self.source:
            words = self.array(f"{tensor.stem}.weight_packed", ("I32",))[chosen]
            q = unpack_words(words, tensor.bits, 1)[:, : tensor.shape[1]]
        else:
            q = (self.array(f"{tensor.stem}.weight", ("I8",))[chosen].astype("i2") + 128).astype("u1")
        if zeros is None:
            zeros = numpy.full(scales.shape, 1 << (tensor.bits - 1), "f4")
        scales, zeros = (numpy.broadcast_to(each, (tensor.shape[0], each.shape[1]))[chosen] for each in (scales, zeros))
        return q, scales.astype("f4"), zeros.astype("f4")
