# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group that is being made find each other, over a store that may have seen other groups."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from anyaccel.errors import CommError, CommTimeoutError

_LOOK_SECONDS = (0.001, 0.02)  # Seconds between two looks of rank 0 for ranks that ask it: at first, and at most.


class Meeting:
    """Exchanges of texts among the ranks of one group, numbered.

    A store may have keys of an earlier group with the same name, of the same size or another, ended or failed. So each
    group has a name that nobody has had: rank 0 makes it up, and tells it to each rank in answer to a random word that
    this rank has made up. Answers to words of earlier groups are read by nobody.

    Attributes:
        store: keys in it are this group's alone. Of ranks above 0 once they have exchanged something.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._common, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._turn = 0
        self._word = secrets.token_hex(8)
        self.store: Store = PrefixStore(self._word, store)

    def __call__(self, text: str) -> list[str]:
        """Every rank's text, in rank order.

        Raises:
            CommTimeoutError: ranks did not come; they are named.
            CommError: the store does not work.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        first, self._turn = self._turn == 0, self._turn + 1
        try:
            if first and self._rank != 0:
                self._common.set(_question(self._rank), self._word)
                self._wait(self._common, {0: _answer(self._word)}, deadline)
                self.store = PrefixStore(self._common.get(_answer(self._word)).decode(), self._common)
            self.store.set(f"{self._turn}/{self._rank}", text)
            keys = {rank: f"{self._turn}/{rank}" for rank in range(self._size)}
            if first and self._rank == 0:
                self._answer_until(list(keys.values()), deadline)
            self._wait(self.store, keys, deadline)
            return [self.store.get(key).decode() for key in keys.values()]
        except CommError:
            raise
        except RuntimeError as error:
            raise CommError(f"the ranks of a group could not meet: {error}") from error

    def _answer_until(self, keys: list[str], deadline: float) -> None:
        """Tell the group's name to whoever asks, until all have come or the time is over."""
        answered: dict[int, str] = {}
        pause, most = _LOOK_SECONDS
        while not self.store.check(keys) and time.monotonic() < deadline:
            for rank in range(1, self._size):
                if not self._common.check([_question(rank)]):
                    continue
                word = self._common.get(_question(rank)).decode()
                if answered.get(rank) != word:
                    self._common.set(_answer(word), self._word)
                    answered[rank] = word
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
        """Take this rank's texts out of the store; call it when all have read them."""
        with suppress(RuntimeError):  # not every store can
            for turn in range(1, self._turn + 1):
                self.store.delete_key(f"{turn}/{self._rank}")
            if self._rank != 0:
                self._common.delete_key(_question(self._rank))
                self._common.delete_key(_answer(self._word))


def _question(rank: int) -> str:
    return f"question/{rank}"


def _answer(word: str) -> str:
    return f"answer/{word}"


def _is_there(store: Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:
        return False
