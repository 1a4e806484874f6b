# SPDX-License-Identifier: Apache-2.0
"""Writes into docs/deepspeed.md what tools/deepspeed_tests.py found: how DeepSpeed's own tests end on both sides."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from generators import DOCS, ROOT, fill

PAGE = DOCS / "deepspeed.md"
TESTS = ROOT / "tests" / "data" / "deepspeed_tests.json"
# Outcome -> the heading of its column.
KINDS = {
    "both passed": "pass on both",
    "both skipped": "skip themselves on both",
    "both failed": "fail on both",
    "only theirs": "pass on DeepSpeed's only",
    "only ours": "pass on ours only",
}


def outcome() -> Iterator[str]:
    """The number of tests of each outcome, in all and for each folder of tests."""
    found = json.loads(TESTS.read_text())
    folders: dict[str, Counter[str]] = {}
    for file, tests in found["files"].items():
        folders.setdefault(str(Path(file).parent), Counter()).update({kind: len(tests[kind]) for kind in KINDS})
    yield f"The unit tests of DeepSpeed {found['tests']} with DeepSpeed {found['deepspeed']} installed:"
    yield ""
    yield f"| tests | {' | '.join(KINDS.values())} |"
    yield f"| --- |{' ---: |' * len(KINDS)}"
    for folder, counts in sorted(folders.items()):
        yield f"| `{folder}` | {' | '.join(str(counts[kind]) for kind in KINDS)} |"
    yield f"| all | {' | '.join(str(sum(counts[kind] for counts in folders.values())) for kind in KINDS)} |"


def files() -> dict[Path, str]:
    return {PAGE: fill(PAGE.read_text(), "training", ["", *outcome(), ""])}
