# SPDX-License-Identifier: Apache-2.0
"""How findings, differences and totals are told."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from anyaccel.port.finding import Finding
from anyaccel.port.rule import Tier
from anyaccel.port.rules import BY_CODE
from anyaccel.port.run import FileResult

_MARKS = {Tier.SAFE: " [fixable]", Tier.UNSAFE: " [fixable with --unsafe-fixes]", Tier.REPORT: ""}


def line(finding: Finding) -> str:
    """`file:line:col RULE message [fixable]`."""
    return f"{finding.place} {finding.code} {finding.message}{_MARKS[finding.tier]}"


def problem(outcome: FileResult) -> str:
    """The one line for a file that could not be looked at."""
    place = f":{outcome.line}:{outcome.column}" if outcome.line else ""
    return f"{outcome.path}{place}: not ported: {outcome.error}"


def difference(outcome: FileResult) -> str:
    """The changes of a file as a unified diff, empty when there are none."""
    if outcome.before is None or outcome.after is None:
        return ""
    before, after = (_lines(data) for data in (outcome.before, outcome.after))
    parts = difflib.unified_diff(before, after, outcome.path, outcome.path)
    text = []
    for part in parts:
        text.append(part if part.endswith("\n") else f"{part}\n\\ No newline at end of file\n")
    return "".join(text)


def _lines(data: bytes) -> list[str]:
    return data.decode("utf-8", "backslashreplace").splitlines(keepends=True)


def as_dict(finding: Finding, fixed: bool) -> dict[str, Any]:
    """A finding for programs."""
    return {
        "path": finding.path,
        "cell": finding.cell or None,
        "line": finding.line,
        "column": finding.column,
        "end_line": finding.end_line,
        "code": finding.code,
        "rule": BY_CODE[finding.code].title,
        "message": finding.message,
        "tier": str(finding.tier),
        "fixed": fixed,
    }


def counts(findings: Sequence[Finding]) -> dict[str, dict[str, int]]:
    """For each rule how many places of each tier."""
    tally = Counter((finding.code, finding.tier) for finding in findings)
    return {code: {str(tier): tally[code, tier] for tier in Tier} for code in sorted({code for code, _ in tally})}


def plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def dumped(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=2, ensure_ascii=False)
