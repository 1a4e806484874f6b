# SPDX-License-Identifier: Apache-2.0
"""Several engines on the same cores compute in turn, a step each. Torch-free."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Turn:
    """Lets one engine at a time compute, in the order in which they have asked.

    Each step already takes all cores. Two at once would make both wait for threads that are not running.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[tuple[threading.Event, Callable[[], object]]] = deque()

    @contextmanager
    def taken(self, hurry: Callable[[], object]) -> Iterator[None]:
        """Within the context, no other engine computes.

        Args:
            hurry: ends a call of several steps after the one under way; called when another engine waits.
        """
        mine = threading.Event()
        with self._lock:
            self._queue.append((mine, hurry))
            self._begin()
        mine.wait()
        try:
            yield
        finally:
            with self._lock:
                self._queue.popleft()
                self._begin()

    def _begin(self) -> None:
        """Let the first go on, in a hurry if there are others."""
        if len(self._queue) > 1:
            self._queue[0][1]()
        if self._queue:
            self._queue[0][0].set()


class Turns:
    """A turn for each part of the machine: that of the replicas with the same number."""

    def __init__(self) -> None:
        self._turns: dict[int, Turn] = defaultdict(Turn)

    def of(self, replica: int) -> Turn:
        return self._turns[replica]
