# SPDX-License-Identifier: Apache-2.0
"""English text that every machine with Python has: what the standard library says of itself, in two halves."""

from __future__ import annotations

import ast
import inspect
import sysconfig
from pathlib import Path

_LEAST = 200  # characters of a docstring that is text, not a label


def docstrings(test_characters: int) -> tuple[str, str]:
    """The longer docstrings of the standard library without examples: a text to calibrate on and one to test with.

    They are of different modules, and no passage is in both. The first is all of every other module; the second has
    about `test_characters`, from all over the modules between.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    modules = [
        file
        for file in sorted(folder.rglob("*.py"))
        if not {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"} & set(file.parts)
    ]
    seen: set[str] = set()
    halves: tuple[list[str], list[str]] = ([], [])
    turn = 0
    for module in modules:
        found = [text for text in _docstrings_of(module) if text not in seen]
        seen.update(found)
        if found:
            halves[turn % 2].extend(found)
            turn += 1
    step = max(sum(map(len, halves[1])) // test_characters, 1)
    return "\n\n".join(halves[0]), "\n\n".join(halves[1][::step])


def _docstrings_of(module: Path) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(module.read_bytes())) if isinstance(node, kinds)]
    texts = [inspect.cleandoc(text) for node in nodes if (text := ast.get_docstring(node)) is not None]
    return [text for text in texts if len(text) >= _LEAST and ">>>" not in text]
