# SPDX-License-Identifier: Apache-2.0
"""How commands that write files end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does: what is cleaned up then is cleaned up."""

    def end(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
