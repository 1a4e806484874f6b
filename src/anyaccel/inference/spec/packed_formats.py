# SPDX-License-Identifier: Apache-2.0
"""The forms that native code has matrices in: `kFormats` of csrc/llm/pack/matrix.h for Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Format = tuple[str, int, bool]  # of `_llm`: format, group (0: all columns), whether groups have a minimum
# What scales of groups are: halves; bytes (so are minima) times a half of 256 columns, as in GGUF's K types; powers of
# two, as in MXFP4.
ScaleKind = Literal["halves", "superblocks", "powers"]

_SCALE_BITS = 16  # of a group's scale, and of its minimum


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


def smallest_format(
    low: int, high: int, group: int, cols: range, minimum: bool = False, codes: tuple[int, ...] | None = None
) -> Format | None:
    """The smallest format that holds scale * n exactly for whole numbers n, or scale * n + minimum.

    Of formats that take about as much memory it is the one with the largest groups, which is the fastest.

    Args:
        low, high: the least and the largest n.
        group: columns that share a scale in the whole matrix; 0: all.
        cols: which columns are wanted of it.
        minimum: whether groups have one; then low is 0.
        codes: all that n may be, where that is not every number from low to high.
    """
    held = []
    for name, each in FORMATS.items():
        if name not in QUANTISED or not _holds(each, low, high, minimum, codes):
            continue
        for own in each.groups:
            # A rank's groups begin at its first column.
            if (group == 0 and (own > 0 or not minimum)) or (own > 0 and group % own == 0 and cols.start % own == 0):
                minima = minimum or each.minima == "always"
                bits = each.bits + (1 + minima) * _SCALE_BITS / own if own else each.bits
                held.append((round(bits), -(own or len(cols)), name, own, minima))
    return min(held)[2:] if held else None


def _holds(to: PackedFormat, low: int, high: int, minimum: bool, codes: tuple[int, ...] | None) -> bool:
    if to.codes is not None:
        return not minimum and codes is not None and set(codes) <= set(to.codes)
    if minimum:
        return to.minima != "never" and high < 1 << to.bits
    if to.minima == "always":
        return low >= -(1 << to.bits - 1) and high < 1 << to.bits - 1
    zero = 1 << to.bits - 1
    return low >= -zero and high < zero
