# SPDX-License-Identifier: Apache-2.0
"""Jupyter notebooks: their code cells as one module, and its text back into the cells, all else byte for byte."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]

from anyaccel.port.rules import WORDS
from anyaccel.port.source import UnreadableError

# Begins a cell where the cells of a notebook are one module; ends a line that stands for one of IPython.
CELL_MARK = "# anyaccel-cell:"
MAGIC_MARK = "# anyaccel-line:"
_MAGIC = re.compile(r"(?P<indent>[ \t]*)(?:[%!?]|[\w.]+\?{1,2}\s*$|[\w.,() \t]+=\s*[%!])")
_MASK = re.compile(rf"pass  {re.escape(MAGIC_MARK)}(\d+)\n?")
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class Cell:
    """A code cell that can be ported.

    Attributes:
        number: among all cells, from 1.
        start, end: of its source's value in the notebook's text.
        source: its text.
    """

    number: int
    start: int
    end: int
    source: str


@dataclass(frozen=True)
class Notebook:
    """A notebook's text, and its code as one module.

    Attributes:
        module: the cells, each after a line with a mark; lines of magic stand as `pass`.
        masked: the lines that `pass` stands for.
        unread: which cell about CUDA is not Python, and why; empty where all can be read.
    """

    text: str
    cells: tuple[Cell, ...]
    module: str
    masked: tuple[str, ...]
    unread: str = ""

    def cell_of(self, line: int) -> tuple[int, int]:
        """The number of the cell and the line in it, for a line of the module."""
        lines = self.module.splitlines()
        for back in range(line - 1, -1, -1):
            if lines[back].startswith(CELL_MARK):
                return int(lines[back][len(CELL_MARK) :]), line - back - 1
        return 1, line

    def with_module(self, module: str) -> str:
        """The notebook's text with the cells of another module."""
        parts = re.split(rf"^{re.escape(CELL_MARK)}(\d+)\n", module, flags=re.MULTILINE)
        if parts[0].strip():
            raise UnreadableError("code would come before the first cell")
        sources = dict(zip(map(int, parts[1::2]), parts[2::2], strict=True))
        text = self.text
        for cell in reversed(self.cells):
            new = _MASK.sub(lambda match: self.masked[int(match[1])], sources[cell.number])
            new = new.removesuffix("\n")
            if new != cell.source:
                text = text[: cell.start] + _encoded(text[cell.start : cell.end], new) + text[cell.end :]
        return text


def read(text: str) -> Notebook:
    """Take a notebook apart.

    Raises:
        UnreadableError: it is no notebook.
    """
    try:
        content = json.loads(text)
        language = content.get("metadata", {}).get("kernelspec", {}).get("language", "python")
        spans = dict(_source_spans(text))
        cells = [
            Cell(number, *spans[number], "".join(cell["source"]))
            for number, cell in enumerate(content["cells"], 1)
            if cell["cell_type"] == "code" and number in spans and language == "python"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableError(f"not a notebook: {type(error).__name__}: {error}") from None
    kept: list[Cell] = []
    parts: list[str] = []
    masked: list[str] = []
    unread = ""
    for cell in cells:
        if _is_foreign(cell.source):
            continue
        try:
            code = _masked(cell.source, masked)
        except SyntaxError as error:
            if WORDS.search(cell.source) and not unread:
                unread = f"cell {cell.number} is not Python, and CUDA is in it: {error.msg} (line {error.lineno})"
            continue
        kept.append(cell)
        parts.append(f"{CELL_MARK}{cell.number}\n{code}\n")
    return Notebook(text, tuple(kept), "".join(parts), tuple(masked), unread)


def _is_foreign(source: str) -> bool:
    """Whether IPython hands the cell to something else than Python, or this module cannot mark its lines."""
    if CELL_MARK in source or MAGIC_MARK in source or "\r" in source:
        return True
    first = source.split("\n", 1)[0]
    return first.startswith("%%") and first.split()[0] not in ("%%time", "%%timeit", "%%capture", "%%prun")


def _masked(source: str, masked: list[str]) -> str:
    """The cell with its lines of magic replaced, those that a backslash continues as a whole.

    Raises:
        SyntaxError: what is left is not Python.
    """
    count = len(masked)
    code = []
    indent: str | None = None  # of the magic that goes on in this line
    for line in source.split("\n"):
        if indent is None or not line.startswith(indent):
            match = _MAGIC.match(line)
            indent = match["indent"] if match else None
        if indent is None:
            code.append(line)
            continue
        code.append(f"{indent}pass  {MAGIC_MARK}{len(masked)}")
        masked.append(line[len(indent) :] + "\n")
        if not line.endswith("\\"):
            indent = None
    text = "\n".join(code)
    try:
        ast.parse(text)
    except (ValueError, RecursionError) as error:
        del masked[count:]
        raise SyntaxError(str(error)) from None
    except SyntaxError:
        del masked[count:]
        raise
    return text


def _encoded(old: str, new: str) -> str:
    """The source as JSON, laid out as the old value: one string, or a list of lines with the same blanks between."""
    ascii_only = old.isascii() and "\\u" in old
    if old.startswith('"'):
        return json.dumps(new, ensure_ascii=ascii_only)
    lines = new.splitlines(keepends=True)
    first = _SPACE.match(old, 1)
    last = re.search(r"([ \t\r\n]*)\]$", old)
    blank = first[0] if first else ""
    strings = [json.dumps(line, ensure_ascii=ascii_only) for line in lines]
    return "[" + blank + f",{blank or ' '}".join(strings) + (last[1] if last else "") + "]"


def _source_spans(text: str) -> Iterator[tuple[int, tuple[int, int]]]:
    """For each cell, from 1, where the value of its "source" is in the text."""
    position = _skip(text, 0)
    for key, start, _end in _members(text, position):
        if key == "cells":
            for number, (cell, _) in enumerate(_items(text, start), 1):
                for name, begin, end in _members(text, cell):
                    if name == "source":
                        yield number, (begin, end)


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _end(text: str, position: int) -> int:
    return json.JSONDecoder().raw_decode(text, position)[1]


def _members(text: str, position: int) -> Iterator[tuple[str, int, int]]:
    """Key, start and end of each member of the object that begins here."""
    position = _skip(text, position + 1)
    while text[position] != "}":
        key, position = scanstring(text, position + 1)
        start = _skip(text, _skip(text, position) + 1)
        end = _end(text, start)
        yield key, start, end
        position = _skip(text, end)
        if text[position] == ",":
            position = _skip(text, position + 1)


def _items(text: str, position: int) -> Iterator[tuple[int, int]]:
    position = _skip(text, position + 1)
    while text[position] != "]":
        end = _end(text, position)
        yield position, end
        position = _skip(text, end)
        if text[position] == ",":
            position = _skip(text, position + 1)
