# SPDX-License-Identifier: Apache-2.0
"""Colours on a terminal, and only there: not in a pipe or file, nor with NO_COLOR or TERM=dumb.

These few codes are written here: a library for them would be the only package that the launcher needs.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TextIO

_CODES = {"error": "1;31", "warning": "33", "plan": "36", "speed": "2"}


def wanted(stream: TextIO) -> bool:
    """Whether text for this stream gets colours."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return False
    try:
        return stream.isatty()
    except ValueError:  # it is closed
        return False


def styled(text: str, kind: str, stream: TextIO) -> str:
    """The text as `stream` is to show it; `kind` is error, warning, plan or speed."""
    return f"\033[{_CODES[kind]}m{text}\033[0m" if wanted(stream) else text


def terminal_width() -> int:
    """Columns of the terminal: COLUMNS, else what the terminal says of itself, else 80."""
    try:
        if (columns := int(os.environ.get("COLUMNS", ""))) > 0:
            return columns
    except ValueError:
        pass
    for number in (1, 2, 0):  # help goes through a pager; the terminal is behind another stream then
        try:
            return os.get_terminal_size(number).columns or 80
        except (OSError, ValueError):
            continue
    return 80


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)`, or nothing where no known word is near."""
    from difflib import get_close_matches

    near = get_close_matches(word, known, 1, 0.6)
    return f" (did you mean {near[0]}?)" if near else ""
