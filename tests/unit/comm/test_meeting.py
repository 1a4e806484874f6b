# SPDX-License-Identifier: Apache-2.0
"""Ranks of a group find each other, whatever an earlier group has left in the store."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store

from anyaccel.comm.rendezvous import Rendezvous
from anyaccel.errors import CommTimeoutError

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.2)


@pytest.fixture(params=["hash", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return HashStore() if request.param == "hash" else FileStore(str(tmp_path / "store"), -1)


def meet(store: Store, size: int, turns: int, tidy: bool) -> None:
    """Have the ranks exchange texts."""
    all_have_read = threading.Barrier(size)

    def one(rank: int) -> None:
        meeting = Rendezvous(PrefixStore("a-group", store), rank, size, LONG)
        for turn in range(turns):
            assert meeting(f"{rank}.{turn}.{size}") == [f"{each}.{turn}.{size}" for each in range(size)]
        all_have_read.wait(60)
        if tidy:
            meeting.tidy()

    with ThreadPoolExecutor(size) as threads:
        list(threads.map(one, range(size)))


@pytest.mark.parametrize("tidy", [True, False])
def test_groups_one_after_another_of_any_size(store: Store, tidy: bool) -> None:
    for size in (2, 3, 1, 3):
        meet(store, size, 2, tidy)


def test_what_groups_that_failed_have_left_is_read_by_nobody(store: Store) -> None:
    for rank, size, missing in ((0, 3, "rank 1, 2"), (1, 3, "rank 0"), (2, 3, "rank 0")):
        with pytest.raises(CommTimeoutError, match=rf"{missing} of 3 did not join the group within 0\.2 s"):
            Rendezvous(PrefixStore("a-group", store), rank, size, SHORT)("of a group that failed")
    meet(store, 3, 1, tidy=True)
    meet(store, 2, 1, tidy=True)
