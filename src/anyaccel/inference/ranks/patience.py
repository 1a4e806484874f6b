# SPDX-License-Identifier: Apache-2.0
"""How long ranks may take for a step: when whoever waits for them says that they are late, and when that they hang."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds that every step has, however short the others were; how many times what it should need; and the seconds that a
# token should need while no step has said more: both together let 70 billion parameters pass at 28 GFLOP/s.
_LEAST_S = 60.0
_TIMES = 20.0
_TOKEN_S = 0.25
# The same of a step that is late: it may end yet, but whoever can ask elsewhere should.
_LATE_LEAST_S = 5.0
_LATE_TIMES = 4.0


class Patience:
    """Whoever takes longer than `seconds` hangs: the slowest machine has many times what its longest step has taken, in
    proportion where a step has more tokens than any before it."""

    def __init__(self) -> None:
        self._longest_s = _TOKEN_S
        self._most = 1
        self._late_from = float("inf")

    def seconds(self, tokens: int) -> float:
        """For a step of so many tokens."""
        return _LEAST_S + _TIMES * self._expected(tokens)

    def took(self, tokens: int, seconds: float) -> None:
        """A step has ended."""
        self._longest_s = max(self._longest_s, seconds)
        self._most = max(self._most, tokens)

    @contextmanager
    def step(self, tokens: int) -> Iterator[float]:
        """While a step is waited for, at most the seconds that this gives. One that fails stays late."""
        start = time.monotonic()
        self._late_from = start + _LATE_LEAST_S + _LATE_TIMES * self._expected(tokens)
        yield self.seconds(tokens)
        self._late_from = float("inf")
        self.took(tokens, time.monotonic() - start)

    def late(self) -> bool:
        """Whether the step under way takes much longer than those before it; asked in any thread."""
        return time.monotonic() > self._late_from

    def _expected(self, tokens: int) -> float:
        return self._longest_s * max(1.0, tokens / self._most)
