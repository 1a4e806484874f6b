# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of the ranks of a new group, over a store that earlier groups may have used."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from anyaccel.errors import CommError, CommTimeoutError

_POLL_SECONDS = (0.001, 0.02)  # the first and the longest pause between rank 0's polls for questions


class Rendezvous:
    """All-gathers of texts among the ranks of one group.

    The store may still have the keys of an earlier group with the same name. So each group uses a random prefix: rank 0
    chooses it, and sends it to each rank as the answer to a random nonce of that rank. Answers to the nonces of earlier
    groups are never read.

    Attributes:
        store: a store with keys of this group only; on ranks above 0 it is valid after the first exchange.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._common, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._exchanges = 0
        self._nonce = secrets.token_hex(8)
        self.store: Store = PrefixStore(self._nonce, store)

    def __call__(self, text: str) -> list[str]:
        """Every rank's text, in rank order.

        Raises:
            CommTimeoutError: ranks did not come; they are named.
            CommError: the store does not work.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        first, self._exchanges = self._exchanges == 0, self._exchanges + 1
        try:
            if first and self._rank != 0:
                self._common.set(_question(self._rank), self._nonce)
                self._wait(self._common, {0: _answer(self._nonce)}, deadline)
                self.store = PrefixStore(self._common.get(_answer(self._nonce)).decode(), self._common)
            self.store.set(f"{self._exchanges}/{self._rank}", text)
            keys = {rank: f"{self._exchanges}/{rank}" for rank in range(self._size)}
            if first and self._rank == 0:
                self._answer_questions(list(keys.values()), deadline)
            self._wait(self.store, keys, deadline)
            return [self.store.get(key).decode() for key in keys.values()]
        except CommError:
            raise
        except RuntimeError as error:
            raise CommError(f"the ranks of a group could not meet: {error}") from error

    def _answer_questions(self, keys: list[str], deadline: float) -> None:
        """Answer ranks with the group's prefix until all have come or the deadline has passed."""
        answered: dict[int, str] = {}
        pause, most = _POLL_SECONDS
        while not self.store.check(keys) and time.monotonic() < deadline:
            for rank in range(1, self._size):
                if not self._common.check([_question(rank)]):
                    continue
                nonce = self._common.get(_question(rank)).decode()
                if answered.get(rank) != nonce:
                    self._common.set(_answer(nonce), self._nonce)
                    answered[rank] = nonce
            time.sleep(pause)
            pause = min(pause * 1.5, most)

    def _wait(self, store: Store, keys: dict[int, str], deadline: float) -> None:
        """Wait until the store has a key of each rank."""
        try:
            store.wait(list(keys.values()), timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            missing = [rank for rank, key in keys.items() if not _is_there(store, key)]
            if not missing:
                raise
            raise CommTimeoutError(
                f"rank {', '.join(map(str, missing))} of {self._size} did not join the group within "
                f"{self._timeout.total_seconds():g} s"
            ) from error

    def tidy(self) -> None:
        """Remove this rank's keys from the store, once all ranks have read them."""
        with suppress(RuntimeError):  # not every store can delete keys
            for turn in range(1, self._exchanges + 1):
                self.store.delete_key(f"{turn}/{self._rank}")
            if self._rank != 0:
                self._common.delete_key(_question(self._rank))
                self._common.delete_key(_answer(self._nonce))


def _question(rank: int) -> str:
    return f"question/{rank}"


def _answer(nonce: str) -> str:
    return f"answer/{nonce}"


def _is_there(store: Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:
        return False
