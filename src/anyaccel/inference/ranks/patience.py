# SPDX-License-Identifier: Apache-2.0
"""The deadlines of ranks that compute: when a step is late, and when they count as hanging."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

# A step may take _LEAST_S plus _TIMES its expected time. _TOKEN_S is the expected time of a token before the first
# step: enough for 70 billion parameters at 28 GFLOP/s.
_LEAST_S = 60.0
_TIMES = 20.0
_TOKEN_S = 0.25
# The same for a step that counts as late: it may still end, but requests should go elsewhere if possible.
_LATE_LEAST_S = 5.0
_LATE_TIMES = 4.0


class Patience:
    """Derives deadlines from the longest step so far, in proportion for a step with more tokens than any before it."""

    def __init__(self) -> None:
        self._longest_s = _TOKEN_S
        self._most = 1
        self._late_from = float("inf")

    def seconds(self, tokens: int) -> float:
        """The seconds after which a step of so many tokens counts as hanging."""
        return _LEAST_S + _TIMES * self._expected(tokens)

    def took(self, tokens: int, seconds: float) -> None:
        """Learn from a step that has ended."""
        self._longest_s = max(self._longest_s, seconds)
        self._most = max(self._most, tokens)

    @contextmanager
    def step(self, tokens: int) -> Iterator[float]:
        """A context for waiting for a step; yields its deadline in seconds. A step that fails stays late."""
        start = time.monotonic()
        self._late_from = start + _LATE_LEAST_S + _LATE_TIMES * self._expected(tokens)
        yield self.seconds(tokens)
        self._late_from = float("inf")
        self.took(tokens, time.monotonic() - start)

    def late(self) -> bool:
        """Whether the step under way takes much longer than those before it; may be called in any thread."""
        return time.monotonic() > self._late_from

    def _expected(self, tokens: int) -> float:
        return self._longest_s * max(1.0, tokens / self._most)
