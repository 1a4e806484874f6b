# SPDX-License-Identifier: Apache-2.0
"""When ranks that load count as hanging: told by their heartbeats, to the command that started them or each other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from anyaccel.errors import CommTimeoutError

if TYPE_CHECKING:
    from anyaccel.comm.heartbeat import Heartbeat

# The least time that a process has to start Python and import what it needs.
STARTING = 60.0
# A rank that loads is heard of every second, whatever it does.
_MOST_SILENCE = 30.0
# Times the deadline: ranks that try to reach each other in vain have that deadline too, and know more.
_IDLE_TIMES = 1.5
_SLICE = 1.0  # seconds that count of a time in which this process may have been paused too


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

    def resume(self) -> None:
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


class LoadingRanks:
    """The ranks of a script, each of which watches the others while they load.

    Args:
        watch: what is heard of them.
        rank: this one.
        seconds: as of LoadingWatch.
    """

    def __init__(self, watch: Heartbeat, rank: int, seconds: float) -> None:
        self._watch, self._rank = watch, rank
        self._loading = LoadingWatch(watch.names(), seconds)
        count = len(watch.names())
        self._loading.passed(0, [True] * count, [True] * count)  # all have started
        self._loading.waits(rank)
        self._seen = watch.look()
        self._looked = time.monotonic()

    def check(self) -> None:
        """Called now and then while this rank loads or waits for others.

        Raises:
            CommTimeoutError: some hang; they are named.
        """
        now = time.monotonic()
        if (passed := now - self._looked) < _SLICE / 4:
            return
        before, self._seen, self._looked = self._seen, self._watch.look(), now
        heard = [new.beats != old.beats for new, old in zip(self._seen, before, strict=True)]
        worked = [new.works != old.works for new, old in zip(self._seen, before, strict=True)]
        heard[self._rank] = True
        if problem := self._loading.passed(min(passed, _SLICE), heard, worked):
            raise CommTimeoutError(problem)

    def meet(self) -> None:
        """Wait until all ranks have loaded.

        Raises:
            CommTimeoutError: some hang; they are named.
            PeerLostError: one has ended.
        """
        self._watch.meet(self.check)
