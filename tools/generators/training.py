# SPDX-License-Identifier: Apache-2.0
"""Writes into docs/deepspeed.md what tools/deepspeed_tests.py found: how DeepSpeed's own tests end on both sides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from generators import DOCS, ROOT, fill

PAGE = DOCS / "deepspeed.md"
TESTS = ROOT / "tests" / "data" / "deepspeed_tests.json"
KINDS = ("both passed", "both skipped", "both failed", "only theirs", "only ours")


def outcome() -> Iterator[str]:
    """The number of tests of each outcome."""
    found = json.loads(TESTS.read_text())
    total = {kind: sum(len(tests[kind]) for tests in found["files"].values()) for kind in KINDS}
    yield (
        f"Of the unit tests of DeepSpeed {found['tests']} that were run so far, with DeepSpeed {found['deepspeed']} "
        f"installed and without those that met a time limit, {total['both passed']} pass on both sides, "
        f"{total['both skipped']} skip themselves on both, {total['both failed']} fail on both, "
        f"{total['only theirs']} pass only on DeepSpeed's side and {total['only ours']} only on ours. "
        "`tests/data/deepspeed_tests.json` names them."
    )


def files() -> dict[Path, str]:
    return {PAGE: fill(PAGE.read_text(), "training", ["", *outcome(), ""])}
