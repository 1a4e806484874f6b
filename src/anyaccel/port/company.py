# SPDX-License-Identifier: Apache-2.0
"""Which files of a run wait for what stays in others of their package, or of those that import one another."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from anyaccel.port import notebook, source
from anyaccel.port.links import Finder, Import, Imports, groups
from anyaccel.port.together import Holder, is_test, left_in_text
from anyaccel.port.unsettled import unsettled


def waiting(
    links: Mapping[str, Imports], holds: Mapping[str, str], changed: Sequence[str], look: Callable[[str], str]
) -> dict[str, str]:
    """The files whose changes wait, with what they wait for.

    Args:
        links: of all files, those beside the ported ones as well.
        holds: what stays in the files that were looked at, for which others wait.
        changed: files that would be changed.
        look: says the same of a file beside them.
    """
    held: dict[str, str] = {}
    finder = Finder(links)
    wanted = set(changed)
    for group in groups(links, top):
        ours = [path for path in group if path in wanted]
        if not ours:
            continue
        code = [path for path in group if not is_test(path)]
        why = next((holds[path] for path in code if holds.get(path)), "")
        why = why or next((told for told in map(_told, code) if told), "")
        why = why or next((told for told in map(look, (path for path in code if path not in holds)) if told), "")
        why = why or next((told for told in (_open(path, links, finder) for path in code) if told), "")
        for path in ours:
            reason = why or holds.get(path, "") or _told(path) or _open(path, links, finder)
            if reason:
                held[path] = reason
    return held


def _told(path: str) -> str:
    return _found(path, left_in_text)


def _open(path: str, links: Mapping[str, Imports], finder: Finder) -> str:
    """What a file does that leaves open what its values meet: packages, processes, programs that are not here."""

    def here(one: Import) -> bool:
        return bool(finder.meant(path, one))

    for program in links[path].programs:
        if not here(program):
            return (
                f"`{program.module.replace('.', '/')}.py`, a program that {Path(path).name} runs and that is not here"
            )
    return _found(path, lambda text: unsettled(text, here))


def _found(path: str, find: Callable[[str], Holder | None]) -> str:
    try:
        text = source.decode(source.read_bytes(path)).text
        book = notebook.read(text) if path.endswith(".ipynb") else None
    except source.UnreadableError:
        return ""
    found = find(text if book is None else book.module)
    if found is None:
        if book is not None and book.written is not None:
            number, line, code = book.written
            return place(f"{path} cell {number}", line, code)
        return ""
    if book is None:
        return place(path, found.line, found.code)
    cell, line = book.cell_of(found.line)
    return place(f"{path} cell {cell}", line, found.code)


def place(path: str, line: int, code: str) -> str:
    """How a place that others wait for is named."""
    return f"`{code}` in {Path(path).name} line {line}, which stays"


@functools.lru_cache(4096)
def _top(folder: Path) -> Path | None:
    if not (folder / "__init__.py").is_file():
        return None
    return _top(folder.parent) or folder


def top(path: str) -> str:
    """The package that a file is of, the outermost one; the file itself where it is of none."""
    found = _top(Path(os.path.realpath(path)).parent)
    return str(found) if found is not None else path
