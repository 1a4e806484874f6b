# SPDX-License-Identifier: Apache-2.0
"""Numbers as people write them in options and variables; `int` and `float` take `1_0`, ` 10 `, other digits and nan."""

from __future__ import annotations

import operator

from anyaccel.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# No number that anybody means has more, and reading takes the square of them.
_DIGITS = 100
# By their powers, and the letters of a text in capitals.
_UNITS: dict[str, int] = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("IB", 1024))
}


def parse_integer(text: str) -> int:
    """The whole number that the text is: digits, and a minus sign before them.

    Raises:
        ValueError: it is none.
    """
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()):
        raise ValueError("is not a whole number such as 8")
    if len(digits) > _DIGITS:
        raise ValueError("is too large a number")
    return int(text)


def parse_number(text: str) -> float:
    """The number that the text is, such as 3, -0.5 or 1e-3.

    Raises:
        ValueError: it is none, or too large to be one.
    """
    if not text or text[0] == "+" or not set(text) <= set("0123456789.eE+-"):
        raise ValueError("is not a number such as 0.5")
    try:
        value = float(text)
    except ValueError:
        raise ValueError("is not a number such as 0.5") from None
    if value in (float("inf"), float("-inf")):
        raise ValueError("is too large a number")
    return value


def parse_bytes(text: str) -> int:
    """The number of bytes that the text is: 8GiB, 512MB, 1.5 TiB, or digits alone.

    Raises:
        ValueError: it is none.
    """
    digits = text.rstrip("BKMGTIbkmgti")
    unit, amount = text[len(digits) :].upper(), digits.removesuffix(" ")
    try:
        if not unit:
            return parse_integer(text)
        if not set(amount) <= set("0123456789."):
            raise ValueError
        return round(parse_number(amount) * _UNITS[unit])
    except (KeyError, ValueError):
        raise ValueError("is not a size such as 8GiB, 512MB or 8000000000") from None


def to_integer(name: str, value: Any) -> int:
    """`value` as an int; UsageError where it is none, such as 1.5, True or a text."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise UsageError(f"{name}={value!r}: must be a whole number")
