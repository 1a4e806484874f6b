# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/serving.md: formats of tool calls and of thoughts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from anyaccel.serve.requests.reasoning import REASONING_FORMATS
from anyaccel.serve.requests.tools.formats import FORMATS
from generators import DOCS, fill

PAGE = DOCS / "serving.md"


def code(text: str) -> str:
    """A mark as code in a table's cell, whose line breaks and bars are written as they are."""
    return f"`{text.strip()}`".replace("|", "\\|")


def tool_formats() -> Iterator[str]:
    yield "| `--tool-format` | models | a call begins with |"
    yield "| --- | --- | --- |"
    for form in sorted(FORMATS.values(), key=lambda each: each.name):
        marks = [*map(code, form.marks), *([f"`{form.unmarked}`"] if form.unmarked else [])]
        yield f"| `{form.name}` | {form.models} | {', '.join(marks)} |"


def reasoning_formats() -> Iterator[str]:
    yield "| `--reasoning-format` | models | thoughts are between |"
    yield "| --- | --- | --- |"
    for form in sorted(REASONING_FORMATS.values(), key=lambda each: each.name):
        yield f"| `{form.name}` | {form.models} | {code(form.begin[0])} and {code(form.end[0])} |"


def files() -> dict[Path, str]:
    text = PAGE.read_text(encoding="utf-8")
    text = fill(text, "formats of tool calls", tool_formats())
    return {PAGE: fill(text, "formats of thoughts", reasoning_formats())}
