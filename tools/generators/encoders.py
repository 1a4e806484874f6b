# SPDX-License-Identifier: Apache-2.0
"""Writes the list of transformers' encoders and classifiers in docs/encoders.md, as tools/census.py found them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from generators import DOCS, ROOT, fill

PAGE = DOCS / "encoders.md"
CENSUS = ROOT / "tests" / "data" / "census_texts.json"
HEADS = {
    "native": "Natively",
    "own code": "With their own code and packed linears",
    "untried": "Not in the census, which knows no small configuration that transformers' own code runs with here",
}


def rows(taken: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """The lines of the list."""
    for way, head in HEADS.items():
        names = sorted(name for name, found in taken.items() if found["way"] == way)
        yield ""
        yield f"**{head}** ({len(names)}): {', '.join(f'`{name}`' for name in names)}."
    yield ""


def files() -> dict[Path, str]:
    return {PAGE: fill(PAGE.read_text(), "all encoders", rows(json.loads(CENSUS.read_text())))}
