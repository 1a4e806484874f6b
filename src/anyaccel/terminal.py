# SPDX-License-Identifier: Apache-2.0
"""What a terminal shows: its width, colours only there, and the name that a mistyped one was meant to be."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TextIO

# Codes of ECMA-48: bold red, yellow, cyan, dim.
_STYLES = {"error": "1;31", "warning": "33", "plan": "36", "speed": "2"}
# Where less than this is left for the last column, it begins anew further to the left.
_NARROWEST = 32


def is_terminal(stream: TextIO | int) -> bool:
    """Whether a person reads this stream, or descriptor, as it is written."""
    try:
        return os.isatty(stream) if isinstance(stream, int) else stream.isatty()
    except (OSError, ValueError):  # it is closed
        return False


def moves_cursor(stream: TextIO | int) -> bool:
    """Whether the stream is a terminal that can write a line anew: a progress line has a meaning there only."""
    return is_terminal(stream) and os.environ.get("TERM") not in (None, "", "dumb")


def styled(text: str, kind: str, stream: TextIO | int) -> str:
    """The text as `stream` is to show it: plain but on a terminal, and there with NO_COLOR and TERM=dumb.

    Args:
        kind: error, warning, plan or speed.
    """
    if os.environ.get("NO_COLOR") or not moves_cursor(stream):
        return text
    return f"\x1b[{_STYLES[kind]}m{text}\x1b[0m"


def marked(line: str, stream: TextIO | int) -> str:
    """A message whose first word says `error:` or `warning:`, with this word in its colour."""
    for kind in ("error", "warning"):
        if line.startswith(f"{kind}:"):
            return styled(f"{kind}:", kind, stream) + line[len(kind) + 1 :]
    return line


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


def table_width(stream: TextIO) -> int | None:
    """The columns that a table for `stream` may take; None for a pipe or file, whose lines are never broken."""
    return terminal_width() if is_terminal(stream) else None


class Table:
    """Aligned columns. Where they do not fit, the last cell of a row goes below it, and cells of words are broken.

    Args:
        rows: those that set the widths of columns, each with as many cells. Later ones may have a longer last cell.
        width: columns of the terminal; None breaks nothing.
    """

    def __init__(self, rows: Sequence[Sequence[str]], width: int | None) -> None:
        self._width = width
        self._widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
        self._last = sys.maxsize
        self._below = False
        if width is None:
            return
        self._last = width - self._taken() - 2
        longest = max(len(word) for row in rows for word in row[-1].split(" "))
        if max(len(row[-1]) for row in rows) > self._last and self._last < max(_NARROWEST, longest):
            self._below = True
            self._last = width - 4
            self._narrow(rows)

    def row(self, cells: Sequence[str]) -> str:
        """One row as text, in as many lines as it needs."""
        *first, last = cells
        broken = [_broken(cell, room) for cell, room in zip(first, self._widths, strict=True)]
        ends = _broken(last, self._last)
        lines = []
        for number in range(max(map(len, broken if self._below else [*broken, ends]))):
            parts = [cell[number] if number < len(cell) else "" for cell in broken]
            line = "".join(f"{part:{room}}  " for part, room in zip(parts, self._widths, strict=True))
            lines.append((line if self._below or number >= len(ends) else line + ends[number]).rstrip())
        if self._below and last:
            lines += [f"    {end}" for end in ends]
        return "\n".join(lines)

    def _taken(self) -> int:
        return sum(self._widths) + 2 * (len(self._widths) - 1)

    def _narrow(self, rows: Sequence[Sequence[str]]) -> None:
        """Make the widest column narrower until all fit, but none narrower than its longest word."""
        columns = zip(*(row[:-1] for row in rows), strict=True)
        least = [max(len(word) for cell in column for word in cell.split()) for column in columns]
        while self._taken() > (self._width or 0):
            free = [at for at, room in enumerate(self._widths) if room > least[at]]
            if not free:
                break
            self._widths[max(free, key=lambda at: self._widths[at])] -= 1


def table(rows: Sequence[Sequence[str]], width: int | None) -> str:
    """All rows of a `Table` as text."""
    drawn = Table(rows, width)
    return "\n".join(map(drawn.row, rows))


def _broken(text: str, width: int) -> list[str]:
    if len(text) <= width:
        return [text]
    import textwrap

    # A word that is too long, such as a path, stays whole: the terminal breaks it, and it can be copied.
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def fitted(text: str, width: int | None) -> str:
    """Lines of a text, broken at spaces where they are longer than `width`.

    A broken line goes on below its last column, or a little to the right of its beginning.
    """
    if width is None:
        return text
    import re
    import textwrap

    lines = []
    for line in text.splitlines():
        if len(line) > width:
            columns = [found.end() for found in re.finditer(r"(?<=\S) {2,}(?=\S)", line)]
            begin = len(line) - len(line.lstrip())
            at = next((each for each in reversed(columns) if each <= width - _NARROWEST), begin + 2)
            line = textwrap.fill(
                line[begin:],
                width,
                initial_indent=line[:begin],
                subsequent_indent=" " * at,
                drop_whitespace=True,
                replace_whitespace=False,
                break_long_words=False,
                break_on_hyphens=False,
            )
        lines.append(line)
    return "\n".join(lines)


def did_you_mean(word: str, known: Iterable[str], least: float = 0.6) -> str:
    """` (did you mean ...?)`, or nothing where no known word is near; several where they are equally near.

    Args:
        least: how much of the letters is the same, from 0 to 1.
    """
    from difflib import SequenceMatcher, get_close_matches

    names = list(known)
    near = get_close_matches(word, names, 3, least)
    if not near:
        return ""
    ratio = {each: SequenceMatcher(None, each, word).ratio() for each in near}
    return f" (did you mean {' or '.join(each for each in names if ratio.get(each) == ratio[near[0]])}?)"
