# SPDX-License-Identifier: Apache-2.0
"""Bounds on the numbers of ranks and hosts, and the reader of such numbers: larger ones are mistakes."""

from __future__ import annotations

MOST_ON_A_HOST = 1 << 16
MOST_HOSTS = 1 << 16
MOST_IN_A_JOB = 1 << 20

# The most digits of a number: the counts of any launcher have fewer.
_DIGITS = 12
_SHOWN = 60


def parse_count(text: str) -> int | None:
    """The number that `text` says; None if it is no number, or has more digits than a count can have."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS else None


def shorten(text: str) -> str:
    """A text from outside, quoted for a message and cut where it is long."""
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}... ({len(text)} characters)"
