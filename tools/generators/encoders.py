# SPDX-License-Identifier: Apache-2.0
"""Writes the table of transformers' encoders and classifiers in docs/encoders.md, as tools/census.py found them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from generators import DOCS, ROOT, fill

PAGE = DOCS / "encoders.md"
CENSUS = ROOT / "tests" / "data" / "census_texts.json"
SPEED = ROOT / "tests" / "data" / "texts_speed.json"


def rows(taken: Mapping[str, Mapping[str, str]], speed: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """The table of those that run, and why the others are not in it."""
    yield "| `model_type` | runs | million parameters | one text | eight |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for name, found in taken.items():
        if found["way"] == "untried":
            continue
        measured = speed.get(name)
        ratios = (f"{measured[each]:.1f}" for each in ("texts 1", "texts 8")) if measured else ("", "")
        size = f"{measured['parameters'] / 1e6:.0f}" if measured else ""
        yield f"| `{name}` | {WAYS[found['way']]} | {' | '.join((size, *ratios))} |"
    yield ""
    yield "Not in the census:"
    yield ""
    for name, found in taken.items():
        if found["way"] == "untried":
            yield f"- `{name}`: {found['why']}."


def files() -> dict[Path, str]:
    taken, speed = (json.loads(file.read_text()) for file in (CENSUS, SPEED))
    return {PAGE: fill(PAGE.read_text(), "all encoders", rows(taken, speed))}


WAYS = {"native": "natively", "own code": "own code", "fails": "fails"}
