# SPDX-License-Identifier: Apache-2.0
"""send and recv of the `shm` backend."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ranks
from anyaccel import comm, errors
from waiting import wait_for


def rings() -> None:
    group = comm.new_group(backend="shm")
    rank, world = group.rank(), group.size()
    following, before = (rank + 1) % world, (rank - 1) % world
    # Below a slot, several slots, more than the ring; every layout and dtype.
    for count in (0, 1, 1000, 70_000, 1_500_000):
        for dtype in (torch.float32, torch.bool, torch.complex128):
            given = (torch.arange(count) % 7 + rank).to(dtype)
            got = torch.zeros(2 * count, dtype=dtype)[::2]
            requests = [
                dist.isend(given, following, group=group, tag=3),
                dist.irecv(got, before, group=group, tag=3),
            ]
            for request in requests:
                assert request is not None
                request.wait()
            assert torch.equal(got, (torch.arange(count) % 7 + before).to(dtype))
    batch = [
        dist.P2POp(dist.irecv, torch.empty(4), before, group),
        dist.P2POp(dist.isend, torch.full((4,), float(rank)), following, group),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert batch[0].tensor.tolist() == [float(before)] * 4


@pytest.mark.parametrize("world_size", [2, 3])
def test_round_a_ring(world_size: int) -> None:
    ranks.run(rings, world_size)


def tags_and_sources() -> None:
    group = comm.new_group(backend="shm")
    rank, world = group.rank(), group.size()
    one = torch.empty(1)
    if rank == 0:
        for tag in (1, 2):
            dist.send(torch.tensor([float(tag)]), 1, group=group, tag=tag)
        dist.send(torch.zeros(500_000), 1, group=group, tag=3)
        dist.send(torch.tensor([4.0]), 1, group=group)
    elif rank == 1:
        dist.recv(one, 0, group=group, tag=2)  # the first one is set aside
        assert one.item() == 2
        dist.recv(one, 0, group=group, tag=1)
        assert one.item() == 1
        last = dist.irecv(one, 0, group=group)
        large = torch.ones(500_000)
        dist.recv(large, 0, group=group, tag=3)
        assert not large.any()
        assert last is not None
        last.wait()
        assert one.item() == 4
    # From whoever sends.
    if rank != 0:
        dist.send(torch.tensor([float(rank)]), 0, group=group, tag=9)
    else:
        sources = [dist.recv(one, group=group, tag=9) for _ in range(world - 1)]
        assert sorted(sources) == list(range(1, world))
    # A send that nobody waits for is brought to its end while the sender is in a collective.
    if rank == 0:
        request = dist.isend(torch.ones(3_000_000), 1, group=group)
    elif rank == 1:
        large = torch.empty(3_000_000)
        dist.recv(large, 0, group=group)
        assert bool(large.all())
    dist.barrier(group)
    if rank == 0:
        assert request is not None
        request.wait()
        assert request.is_completed()


def test_tags_any_source_and_progress() -> None:
    ranks.run(tags_and_sources, 3)


def misfits() -> None:
    group = comm.new_group(backend="shm")
    if group.rank() == 0:
        dist.send(torch.ones(5), 1, group=group)
        dist.send(torch.ones(4), 1, group=group)
    else:
        with pytest.raises(errors.CommError, match="rank 0 sent 5 float32, rank 1 expects 4 int32"):
            dist.recv(torch.ones(4, dtype=torch.int32), 0, group=group)
        # What did not fit is thrown away, and the next message is whole.
        tensor = torch.zeros(4)
        dist.recv(tensor, 0, group=group)
        assert tensor.tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="send to rank"):
        group.send([torch.ones(1)], group.rank(), 0)


def test_misfits_are_named() -> None:
    ranks.run(misfits, 2)


def wait_for_a_message(how: str, folder: Path) -> None:
    group = comm.new_group(backend="shm", timeout=timedelta(seconds=2))
    if group.rank() == 1:
        if how == "kill":
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "last words":
            dist.send(torch.ones(3), 0, group=group)
            (folder / "sender").write_text(str(os.getpid()))
            os._exit(0)
        ranks.wait_for_marks(folder, 0)
        os._exit(0)
    tensor = torch.zeros(3)
    if how == "last words":
        sender = folder / "sender"
        wait_for(lambda: sender.exists() and sender.read_text(), "the message is not sent")
        wait_for(lambda: not Path(f"/proc/{sender.read_text()}").exists(), "the sender has not ended")
        dist.recv(tensor, 1, group=group)
        text = str(tensor.tolist())
    else:
        try:
            dist.recv(tensor, 1, group=group)
            text = "no error"
        except errors.CommError as error:
            text = f"{type(error).__name__}: {error}"
    os.write(1, text.encode())
    ranks.mark(folder)
    os._exit(0)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("kill", "PeerLostError: rank 1 (pid"),
        ("stop", "CommTimeoutError: rank 1 (pid"),
        ("last words", "[1.0, 1.0, 1.0]"),
    ],
)
def test_a_sender_that_is_gone(how: str, text: str, tmp_path: Path) -> None:
    outcome = ranks.finish(ranks.start(wait_for_a_message, 2, (how, tmp_path), tmp_path), tmp_path, timeout=60)
    assert text in outcome[0][1], outcome
    if how == "stop":
        assert "did not come within the timeout of 2 s for receive of 3 float32 from rank 1" in outcome[0][1]
