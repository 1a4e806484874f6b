# SPDX-License-Identifier: Apache-2.0
"""The forms that native code has matrices in: `kFormats` of csrc/llm/matrix.h for Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PackedFormat:
    """Attributes:
    words: what users are told.
    bits: of a value.
    groups: columns that may share a scale, of quantised ones; 0: a scale a row.
    minima: whether groups have a minimum beside the scale.
    codes: what the values of 4 bits stand for.
    """

    words: str
    bits: int
    groups: tuple[int, ...] = (0,)
    minima: Literal["may", "never", "always"] = "may"
    codes: tuple[int, ...] | None = None

    @property
    def zero(self) -> int:
        """What is taken from a value without a minimum."""
        return 0 if self.bits == 8 or self.codes else 1 << (self.bits - 1)


FORMATS = {
    "f32": PackedFormat("fp32", 32),
    "f16": PackedFormat("fp16", 16),
    "bf16": PackedFormat("bf16", 16),
    "i8": PackedFormat("int8", 8, (0, 16, 32)),
    "i4": PackedFormat("int4", 4, (32, 64, 128)),
    "i6": PackedFormat("int6", 6, (16,)),
    "i5": PackedFormat("int5", 5, (32,)),
    "i3": PackedFormat("int3", 3, (16,), "never"),
    "i2": PackedFormat("int2", 2, (16,), "always"),
    "nl4": PackedFormat(
        "codes of 4 bits",
        4,
        (32,),
        "never",
        (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    ),
    "fp4": PackedFormat("fp4", 4, (32,), "never", (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)),
}
QUANTISED = frozenset(name for name, each in FORMATS.items() if each.bits <= 8)
