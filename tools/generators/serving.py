# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/serving.md: formats of tool calls and of thoughts, and clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from anyaccel.serve.requests.reasoning import REASONING_FORMATS
from anyaccel.serve.requests.tools.formats import FORMATS
from generators import DOCS, fill

FEATURES = ("answer", "stream", "tools", "structure", "embeddings")
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


def clients() -> Iterator[str]:
    """What tools/serve_clients.py has found."""
    yield "| client | package | answers | streams | tools | structure | embeddings |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for each in json.loads((DOCS / "data" / "serve_clients.json").read_text(encoding="utf-8")):
        package = f"{each['package']} {each['version']}".strip() or "-"
        marks = " | ".join("✓" if name in each["did"] else "" for name in FEATURES)
        yield f"| {each['client']} | {package} | {marks} |"


def files() -> dict[Path, str]:
    text = PAGE.read_text(encoding="utf-8")
    text = fill(text, "formats of tool calls", tool_formats())
    text = fill(text, "formats of thoughts", reasoning_formats())
    return {PAGE: fill(text, "clients", clients())}
