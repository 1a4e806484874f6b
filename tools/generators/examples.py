# SPDX-License-Identifier: Apache-2.0
"""Writes into docs/deepspeed-examples.md what tools/deepspeed_examples.py found: which ones run, and why not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from generators import DOCS, ROOT, fill

PAGE = DOCS / "deepspeed-examples.md"
FOUND = ROOT / "tests" / "data" / "deepspeed_examples.json"
# Of an error, what a reader needs.
_NOISE = (r"^[\w.]*NotCovered\w*Error: ", r"\. docs/deepspeed-names\.md lists .*$", r" \(modeling_utils\.py\)$")


def sentence(ends: str) -> str:
    """Why an example does not run, for a list."""
    for noise in _NOISE:
        ends = re.sub(noise, "", ends)
    return ends


def table(examples: dict[str, dict[str, str]]) -> Iterator[str]:
    yield "| example | DeepSpeed as it is | DeepSpeed with our parts | the alias |"
    yield "| --- | --- | --- | --- |"
    for name, sides in examples.items():
        ends = {side: outcome == "runs" for side, outcome in sides.items()}
        ours = "runs" if ends["ours"] else "runs with `--as-cuda`" if ends.get("ours as CUDA") else "no"
        script, _, what = name.partition(" ")
        shown = f"`{script}`" + (f" `{what}`" if what else "")
        yield f"| {shown} | {'runs' if ends['deepspeed'] else 'no'} | {ours} | {'runs' if ends['alias'] else 'no'} |"


def reasons(examples: dict[str, dict[str, str]], side: str) -> Iterator[str]:
    """The sentences of one side, each with the examples that end like this."""
    by_sentence: dict[str, list[str]] = {}
    for name, sides in examples.items():
        if (ends := sides[side]) != "runs":
            by_sentence.setdefault(sentence(ends), []).append(name)
    for text, names in by_sentence.items():
        yield f"- {text}: {', '.join(f'`{name}`' for name in names)}"


def text() -> Iterator[str]:
    examples: dict[str, dict[str, str]] = json.loads(FOUND.read_text())["examples"]
    yield from ("", *table(examples))
    titles = {
        "deepspeed": "Why not: DeepSpeed as it is",
        "ours": "Why not: with our parts, without `--as-cuda`",
        "alias": "Why not: the alias",
    }
    for side, title in titles.items():
        yield from ("", f"## {title}", "", *reasons(examples, side))
    yield ""


def files() -> dict[Path, str]:
    return {PAGE: fill(PAGE.read_text(), "examples", text())}
