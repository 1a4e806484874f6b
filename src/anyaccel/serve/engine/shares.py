# SPDX-License-Identifier: Apache-2.0
"""Fair queueing among the keys that compete for the machine."""

from __future__ import annotations

from collections import Counter


class Shares:
    """The number of tokens that were computed for each key with open requests.

    The key with the least comes next. A key that returns starts at the least of the others: it gets no credit for the
    time in which it had no requests.
    """

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._open: Counter[str] = Counter()

    def enter(self, key: str) -> None:
        """Count a new request of the key."""
        if self._open[key] == 0:
            self._had[key] = min(self._had.values(), default=0.0)
        self._open[key] += 1

    def leave(self, key: str) -> None:
        """Count the end of a request of the key."""
        self._open[key] -= 1
        if self._open[key] == 0:
            del self._open[key], self._had[key]

    def add(self, key: str, tokens: int) -> None:
        """Count tokens that were computed for the key."""
        self._had[key] += tokens

    def had(self, key: str) -> float:
        """The number of tokens that were computed for the key."""
        return self._had[key]
