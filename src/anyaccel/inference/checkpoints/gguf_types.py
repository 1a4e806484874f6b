# SPDX-License-Identifier: Apache-2.0
"""The types of GGUF: their blocks, and the smallest native format that holds their values.

A matrix runs in the precision of the file. Superblocks of the K types and IQ4_XS are kept bit by bit. Of other types,
and where ranks or matrices of several types divide superblocks, values are converted to the smallest format that holds
them: the quantised values (`q`) exactly, scales and minima rounded to the halves of the native formats. That changes a
value by at most 2**-10 of the largest of its group, and at most half as much as rounding to bfloat16 would; types whose
scales are halves already are kept exactly.

The blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, and ggml-quants.c (`dequantize_row_*`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anyaccel.inference.spec.packed_formats import Format, ScaleKind

# Number in the file -> name, values of a block, bytes of a block.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    10: ("q2_k", 256, 84),
    11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
}
# Types that are not supported: for activations, for integers, or (nvfp4) with scales in a separate tensor.
UNREAD = {
    9: "q8_1",
    15: "q8_k",
    24: "i8",
    25: "i16",
    26: "i32",
    27: "i64",
    40: "nvfp4",
    41: "q1_0",
}

BLOCK_BYTES = {name: (values, size) for name, values, size in GGML_TYPES.values()}

Levels = tuple[Any, Any]  # scales and minima [blocks, groups of a block] float32; minima None without them


@dataclass(frozen=True)
class HeldType:
    """The native format of a type: value = scale * q + minimum.

    Attributes:
        format: the format with its largest possible group.
        levels: returns the Levels of blocks, uint8 [blocks, bytes].
        fractions: whether scales may be too small for a half, as fractions of a half or with a wider range.
        codes: returns the values as the unsigned numbers of `format`, uint8 [blocks, values]; None: they are found from
            what the package gguf says of a block, which takes several times as long.
        read_as: `_llm` reads whole blocks, whose scales it keeps in the bits that they have; None: it does not.
    """

    format: Format
    levels: Callable[[Any], Levels]
    fractions: bool = False
    codes: Callable[[Any], Any] | None = None
    read_as: ScaleKind | None = None


def _half(blocks: Any, at: int) -> Any:
    """The half at the byte `at` of each block, float32 [blocks, 1]."""
    import numpy

    return blocks[:, at : at + 2].copy().view("<f2").astype(numpy.float32)


def _words(blocks: Any, begin: int, end: int, kind: str) -> Any:
    return blocks[:, begin:end].copy().view(kind)


def nibbles(octets: Any) -> Any:
    """[rows, n] -> [rows, 2 n], the low four bits of each byte first."""
    import numpy

    found = numpy.empty((len(octets), 2 * octets.shape[1]), numpy.uint8)
    numpy.bitwise_and(octets, 15, out=found[:, ::2])
    numpy.right_shift(octets, 4, out=found[:, 1::2])
    return found


def _scales_of_6_bits(blocks: Any) -> Any:
    """Eight scales and eight minima of q4_k and q5_k: the half scales times those of 6 bits."""
    import numpy

    packed = blocks[:, 4:16]
    scale = numpy.concatenate([packed[:, 0:4] & 63, (packed[:, 8:12] & 15) | ((packed[:, 0:4] >> 6) << 4)], axis=1)
    minimum = numpy.concatenate([packed[:, 4:8] & 63, (packed[:, 8:12] >> 4) | ((packed[:, 4:8] >> 6) << 4)], axis=1)
    return _half(blocks, 0) * scale, -_half(blocks, 2) * minimum


def _q2_k(blocks: Any) -> Levels:
    return _half(blocks, 80) * (blocks[:, :16] & 15), -_half(blocks, 82) * (blocks[:, :16] >> 4)


def _q3_k(blocks: Any) -> Levels:
    """Sixteen scales of 6 bits: the low four of scale i and i + 8 in byte i, the high two of i, i + 4, ... after it."""
    import numpy

    low, high = blocks[:, 96:104], blocks[:, 104:108]
    low = numpy.concatenate([low & 15, low >> 4], axis=1)
    high = numpy.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1)
    return _half(blocks, 108) * ((low | (high << 4)).astype(numpy.int8) - 32), None


def _q6_k(blocks: Any) -> Levels:
    return _half(blocks, 208) * blocks[:, 192:208].view("i1"), None


def _halves_of_bytes(octets: Any, run: int) -> Any:
    """The low four bits of each `run` bytes, then the high four of the same: [blocks, n] -> [blocks, 2 n]."""
    import numpy

    runs = octets.reshape(len(octets), -1, 1, run)
    return numpy.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(octets), -1)


def _q4_k_codes(blocks: Any) -> Any:
    return _halves_of_bytes(blocks[:, 16:], 32)


def _q5_k_codes(blocks: Any) -> Any:
    """The fifth bits of 32 neighbours are the same bit of 32 bytes."""
    import numpy

    fifth = (blocks[:, 16:48, None].transpose(0, 2, 1) >> numpy.arange(8, dtype=numpy.uint8)[:, None]) & 1
    return _halves_of_bytes(blocks[:, 48:], 32) | (fifth << 4).reshape(len(blocks), -1)


def _q6_k_codes(blocks: Any) -> Any:
    """The high two bits of 32 neighbours are the same bits of 32 bytes, which 128 values have together."""
    import numpy

    shifts = numpy.arange(0, 8, 2, dtype=numpy.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(len(blocks), 2, 1, 32) >> shifts) & 3
    return _halves_of_bytes(blocks[:, :128], 64) | (high << 4).reshape(len(blocks), -1)


def _iq4_xs(blocks: Any) -> Levels:
    """Eight scales of 6 bits: the high two in a word, the low four after it."""
    import numpy

    shifts = numpy.arange(0, 16, 2, dtype=numpy.uint16)
    high = ((_words(blocks, 2, 4, "<u2") >> shifts) & 3).astype(numpy.int16)
    return _half(blocks, 0) * ((nibbles(blocks[:, 4:8]).astype(numpy.int16) | (high << 4)) - 32), None


def _fraction(scale: Any, s: Any, part: float) -> Any:
    """scale * (s + 1/2) * part, in the order in which ggml rounds."""
    import numpy

    return scale * (numpy.float32(0.5) + s.astype(numpy.float32)) * numpy.float32(part)


def _iq2_xxs(blocks: Any) -> Levels:
    return _fraction(_half(blocks, 0), _words(blocks, 2, 66, "<u4")[:, 1::2] >> 28, 0.25), None


def _iq3_xxs(blocks: Any) -> Levels:
    return _fraction(_half(blocks, 0), _words(blocks, 66, 98, "<u4") >> 28, 0.5), None


def _iq3_s(blocks: Any) -> Levels:
    """Values are the odd numbers from -15 to 15."""
    scale = _half(blocks, 0) * (1 + 2 * nibbles(blocks[:, 106:110]))
    return 2 * scale, -15 * scale


def _iq1_s(blocks: Any) -> Levels:
    """Values are -1, 0 and 1, all an eighth up or down: of the odd eighths from -9 to 9."""
    scale = _half(blocks, 0) * (2 * ((_words(blocks, 34, 50, "<u2") >> 12) & 7) + 1)
    return scale / 4, scale * -1.125


def _iq1_m(blocks: Any) -> Levels:
    """As iq1_s, up or down for each eight; the half scale is in the high four bits of four words."""
    import numpy

    words = _words(blocks, 48, 56, "<u2")
    half = (words[:, 0] >> 12) | ((words[:, 1] >> 8) & 0xF0) | ((words[:, 2] >> 4) & 0xF00) | (words[:, 3] & 0xF000)
    scales = (words[:, :, None] >> numpy.array([0, 3, 6, 9], numpy.uint16)) & 7
    return half.view("<f2").astype(numpy.float32)[:, None] * (2 * scales.reshape(len(blocks), 16) + 1) / 8, None


def _mxfp4(blocks: Any) -> Levels:
    """A power of two: 2**(e - 128), values being doubled."""
    import numpy

    return numpy.ldexp(numpy.float32(1), blocks[:, :1].astype(numpy.int32) - 128), None


HELD: dict[str, HeldType] = {
    "q5_0": HeldType(("i5", 32, False), lambda blocks: (_half(blocks, 0), None), read_as="halves"),
    "q5_1": HeldType(("i5", 32, True), lambda blocks: (_half(blocks, 0), _half(blocks, 2)), read_as="halves"),
    "q2_k": HeldType(("i2", 16, True), _q2_k, read_as="superblocks"),
    "q3_k": HeldType(("i3", 16, False), _q3_k, read_as="superblocks"),
    "q4_k": HeldType(("i4", 32, True), _scales_of_6_bits, codes=_q4_k_codes, read_as="superblocks"),
    "q5_k": HeldType(("i5", 32, True), _scales_of_6_bits, codes=_q5_k_codes, read_as="superblocks"),
    "q6_k": HeldType(("i6", 16, False), _q6_k, codes=_q6_k_codes, read_as="superblocks"),
    "iq1_s": HeldType(("i4", 32, True), _iq1_s, fractions=True),
    "iq1_m": HeldType(("i8", 16, False), _iq1_m, fractions=True),
    "iq2_xxs": HeldType(("i8", 32, False), _iq2_xxs, fractions=True),
    "iq2_xs": HeldType(
        ("i8", 16, False),
        lambda blocks: (_fraction(_half(blocks, 0), nibbles(blocks[:, 66:74]), 0.25), None),
        fractions=True,
    ),
    "iq2_s": HeldType(
        ("i8", 16, False),
        lambda blocks: (_fraction(_half(blocks, 0), nibbles(blocks[:, 74:82]), 0.25), None),
        fractions=True,
    ),
    "iq3_xxs": HeldType(("i8", 32, False), _iq3_xxs, fractions=True),
    "iq3_s": HeldType(("i4", 32, True), _iq3_s),
    "iq4_nl": HeldType(("nl4", 32, False), lambda blocks: (_half(blocks, 0), None), read_as="halves"),
    "iq4_xs": HeldType(("nl4", 32, False), _iq4_xs, read_as="superblocks"),
    "tq1_0": HeldType(("i4", 128, False), lambda blocks: (_half(blocks, 52), None)),
    "tq2_0": HeldType(("i4", 128, False), lambda blocks: (_half(blocks, 64), None)),
    "mxfp4": HeldType(("fp4", 32, False), _mxfp4, fractions=True, read_as="powers"),
}
