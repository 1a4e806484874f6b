# SPDX-License-Identifier: Apache-2.0
"""Waiting for a condition with a deadline: a loaded machine makes a test slower, and not fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def settled(look: Callable[[], T], wanted: T, seconds: float = 60) -> T:
    """What `look` sees once it is `wanted`, or after `seconds`."""
    deadline = time.monotonic() + seconds
    seen = look()
    while seen != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
        seen = look()
    return seen


def wait_for(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Wait until `condition` holds; AssertionError with `what` where it does not within `seconds`."""
    assert settled(lambda: bool(condition()), True, seconds), f"not within {seconds:g} s: {what}"


def wait_asleep(pid: int, still: float = 0.3, seconds: float = 60) -> None:
    """Wait until the main thread of a process has waited for something, without running, for `still` seconds."""

    def looks() -> tuple[str, str]:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        return fields["State"][:1], fields["voluntary_ctxt_switches"]

    deadline, since, before = time.monotonic() + seconds, time.monotonic(), looks()
    while time.monotonic() - since < still or before[0] != "S":
        assert time.monotonic() < deadline, f"process {pid} has not come to rest within {seconds:g} s"
        time.sleep(0.02)
        if (now := looks()) != before:
            since, before = time.monotonic(), now
