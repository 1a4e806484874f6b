# SPDX-License-Identifier: Apache-2.0
"""The ranks of a command that starts its own."""

from __future__ import annotations

from pathlib import Path


def ranks_below(pid: int, module: str = "anyaccel.inference.ranks.rank") -> list[int]:
    """The ranks that a process has started, in their order; `module`: what they run."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):  # each of its threads has its own
        for child in children.read_text().split():
            if module.encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                found.append(int(child))
            found += ranks_below(int(child), module)
    return sorted(found)
