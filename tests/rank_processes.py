# SPDX-License-Identifier: Apache-2.0
"""The ranks of a command that starts its own."""

from __future__ import annotations

from pathlib import Path


def ranks_below(pid: int) -> list[int]:
    """The ranks that a command has started, in their order."""
    found: list[int] = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"anyaccel.inference.ranks.rank" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
            found.append(int(child))
        found += ranks_below(int(child))
    return sorted(found)
