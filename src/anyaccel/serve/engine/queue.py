# SPDX-License-Identifier: Apache-2.0
"""The requests that wait, in fair order among the keys that compete for the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Queued(Protocol):
    """A request of a key; numbers grow in the order of arrival."""

    id: int
    key: str


R = TypeVar("R", bound=Queued)


class FairQueue(Generic[R]):
    """Waiting requests by key, and how many tokens were computed for each key with open requests.

    The key with the fewest comes next. A key that returns starts at the least of the others: it gets no credit for the
    time in which it had no requests.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, dict[int, R]] = {}
        self._computed: dict[str, int] = {}
        self._open: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[R]:
        """The waiting requests, the next one first; those that were returned may be removed meanwhile."""
        for key in sorted(self._waiting, key=self.computed):
            yield from list(self._waiting[key].values())

    def share(self, key: str, total: int) -> tuple[int, int]:
        """How many requests of the key wait, and how many of `total` places are its share."""
        return len(self._waiting.get(key, ())), total // len(self._waiting.keys() | {key})

    def open(self, request: R) -> None:
        """Put a new request into the queue."""
        if self._open[request.key] == 0:
            self._computed[request.key] = min(self._computed.values(), default=0)
        self._open[request.key] += 1
        self.push(request)

    def close(self, request: R) -> None:
        """Take a request that has ended out of the queue."""
        self.remove(request)
        self._open[request.key] -= 1
        if self._open[request.key] == 0:
            del self._open[request.key], self._computed[request.key]

    def push(self, request: R) -> None:
        """Put a request into the queue; one that waited before keeps its place before those that came later."""
        waiting = self._waiting.setdefault(request.key, {})
        is_newest = not waiting or request.id > next(reversed(waiting))
        waiting[request.id] = request
        if not is_newest:
            self._waiting[request.key] = dict(sorted(waiting.items()))

    def remove(self, request: R) -> None:
        """Take a request out of the queue, if it waits."""
        waiting = self._waiting.get(request.key, {})
        if waiting.pop(request.id, None) is not None and not waiting:
            del self._waiting[request.key]

    def count(self, key: str, tokens: int) -> None:
        """Count tokens that were computed for the key."""
        self._computed[key] += tokens

    def computed(self, key: str) -> int:
        """The number of tokens that were computed for the key."""
        return self._computed[key]
