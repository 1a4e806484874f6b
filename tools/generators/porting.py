# SPDX-License-Identifier: Apache-2.0
"""Writes docs/porting-rules.md from the rules in port/rules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from anyaccel.port.rules import RULES
from generators import DOCS, fill

PAGE = DOCS / "porting-rules.md"


def rules() -> Iterator[str]:
    """The lines of the generated part."""
    for rule in RULES:
        yield from ("", f"## {rule.code}: {rule.title}", "", f"*{rule.tier}.* {rule.why}", "")
        if rule.before:
            yield "```diff"
            yield from (f"-{line}" for line in rule.before.split("\n"))
            yield from (f"+{line}" for line in rule.after.split("\n"))
            yield "```"
        if rule.left:
            yield from (["", "Reported and left:", ""] if rule.before else ["Reported:", ""])
            yield from ("```python", *rule.left.split("\n"), "```")
    yield ""


def files() -> dict[Path, str]:
    return {PAGE: fill(PAGE.read_text(encoding="utf-8"), "porting", rules())}
