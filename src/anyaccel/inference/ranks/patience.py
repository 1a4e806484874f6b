# SPDX-License-Identifier: Apache-2.0
"""The deadlines of ranks: when a step is late, and when ranks that load or compute count as hanging."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# A step may take _LEAST_S plus _TIMES its expected time. _TOKEN_S is the expected time of a token before the first
# step: enough for 70 billion parameters at 28 GFLOP/s.
_LEAST_S = 60.0
_TIMES = 20.0
_TOKEN_S = 0.25
# The same for a step that counts as late: it may still end, but requests should go elsewhere if possible.
_LATE_LEAST_S = 5.0
_LATE_TIMES = 4.0
# The least time that a process has to start Python and import what it needs.
STARTING = 60.0
# A rank that loads is heard of every second, whatever it does.
_MOST_SILENCE = 30.0
# Times the deadline: ranks that try to reach each other in vain have that deadline too, and know more.
_IDLE_TIMES = 1.5


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


class LoadingWatch:
    """Tells ranks that load slowly, however long that takes, from ranks that are stopped or cannot go on.

    A rank that is stopped, or whose host is, sends no heartbeat. One that waits for a file which never comes sends
    heartbeats, but does not work. A rank may have nothing to do while it waits for another in a way that cannot be
    seen from here, so ranks count as hanging only if none of those that should work does.

    Args:
        names: names of the ranks for errors.
        seconds: how long a rank may be silent, if that is less than half a minute; for work it has half as long again.
    """

    def __init__(self, names: Sequence[str], seconds: float) -> None:
        self._names = names
        self._seconds = seconds
        self._silent = dict.fromkeys(range(len(names)), 0.0)
        self._starting = set(self._silent)
        self._waiting: set[int] = set()
        self._idle = 0.0

    def waits(self, rank: int) -> None:
        """A rank now waits for a message from here."""
        self._waiting.add(rank)
        self._idle = 0.0

    def goes_on(self) -> None:
        """All ranks have what they waited for."""
        self._waiting.clear()
        self._idle = 0.0

    def loaded(self, rank: int) -> None:
        """A rank is done, and sends no heartbeats any more."""
        self._silent.pop(rank, None)
        self._idle = 0.0

    def passed(self, seconds: float, heard: Sequence[bool], worked: Sequence[bool]) -> str:
        """Time has passed in which the ranks could have sent something; returns what is wrong with them, or "".

        Args:
            heard: whether each rank has sent anything in this time.
            worked: whether each rank has told that it works.
        """
        for rank in self._silent:
            self._silent[rank] = 0.0 if heard[rank] else self._silent[rank] + seconds
            if heard[rank]:
                self._starting.discard(rank)
        busy = [rank for rank in self._silent if rank not in self._waiting]
        self._idle = (
            0.0 if any(worked[rank] for rank in busy) or self._starting.intersection(busy) else (self._idle + seconds)
        )
        for rank, silent in self._silent.items():
            starting = rank in self._starting
            limit = max(self._seconds, STARTING) if starting else min(self._seconds, _MOST_SILENCE)
            if silent > limit:
                problem = f"has not {'started' if starting else 'been heard of'} for {limit:g} s"
                return f"{self._names[rank]} {problem} while the model is loaded; is it, or its host, stopped?"
        if busy and self._idle > _IDLE_TIMES * self._seconds:
            names = ", ".join(self._names[rank] for rank in busy)
            have = "has" if len(busy) == 1 else "have"
            return (
                f"{names} {have} neither read nor computed anything for {_IDLE_TIMES * self._seconds:g} s while the "
                "model is loaded (ANYACCEL_COMM_TIMEOUT); does the file system answer?"
            )
        return ""
