# SPDX-License-Identifier: Apache-2.0
"""Equal shares of the machine for those who compete for it."""

from __future__ import annotations

from collections import Counter


class Shares:
    """How much each key has had, counted from when it began to compete.

    Fair queueing: who has had least comes next. A key that comes back is set beside those that competed meanwhile: it
    gets nothing for the time in which it wanted nothing.
    """

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._open: Counter[str] = Counter()

    def enter(self, key: str) -> None:
        """A request of the key is there."""
        if self._open[key] == 0:
            self._had[key] = min(self._had.values(), default=0.0)
        self._open[key] += 1

    def leave(self, key: str) -> None:
        """A request of the key is gone."""
        self._open[key] -= 1
        if self._open[key] == 0:
            del self._open[key], self._had[key]

    def add(self, key: str, tokens: int) -> None:
        """So many tokens were computed for it."""
        self._had[key] += tokens

    def had(self, key: str) -> float:
        """The more, the later it comes."""
        return self._had[key]
