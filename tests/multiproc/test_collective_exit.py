# SPDX-License-Identifier: Apache-2.0
"""Groups that end, and programs that end, with something under way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ranks
from anyaccel import comm, errors
from anyaccel.comm import shm
from waiting import wait_for

_PROGRAM = """
import threading, torch, torch.distributed as dist
import anyaccel.comm
dist.init_process_group("shm")
rank = dist.get_rank()
inside = threading.Event()

def slow(_):
    inside.set()
    threading.Event().wait(0.3)

kept = dist.all_reduce(torch.ones(10), async_op=True).get_future().then(slow)
inside.wait()
if rank == 0:
    kept_too = dist.all_reduce(torch.ones(1000), async_op=True)
    message = dist.isend(torch.ones(3_000_000), 1)
else:
    message = dist.irecv(torch.ones(3), 0, tag=5)
print("end", rank, flush=True)
"""


def test_a_program_ends_with_work_under_way() -> None:
    env = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ranks.free_port()),
        "OMP_NUM_THREADS": "1",
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outcome = [(process.communicate(timeout=100), process.returncode) for process in running]
    assert [code for _, code in outcome] == [0, 0], outcome
    assert [texts[0] for texts, _ in outcome] == ["end 0\n", "end 1\n"]


def destroyed(hosts: tuple[int, ...]) -> list[float]:
    shm.host_identity = lambda: f"host {hosts[dist.get_rank()]}"
    group = comm.new_group(backend="shm")
    rank, world = group.rank(), group.size()
    tensors = [torch.ones(100_000) for _ in range(5)]
    if rank == 0:
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        ending = threading.Thread(target=group.shutdown)
        ending.start()
        wait_for(lambda: group._executor._closed, "the group does not begin to end")
        dist.barrier()  # of another group: only now do the others come
        ending.join()
        assert all(work.is_completed() for work in works)
    else:
        dist.barrier()
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    assert all(bool((tensor == world).all()) for tensor in tensors)
    return [float(tensor[0]) for tensor in tensors]


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)], ids=str)
def test_a_group_ends_when_its_work_is_done(hosts: tuple[int, ...]) -> None:
    assert ranks.run(destroyed, 2, hosts) == [[2.0] * 5] * 2


def forked() -> None:
    group = comm.new_group(backend="shm")
    rank, world = group.rank(), group.size()
    dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()  # its threads are the parent's
    if rank == 0:
        child = os.fork()
        if child == 0:
            calls = [
                lambda: dist.all_reduce(torch.ones(3), group=group),
                lambda: dist.all_reduce(torch.ones(3), group=group, async_op=True).wait(),
                lambda: dist.broadcast(torch.ones(3), 0, group=group),
                lambda: dist.send(torch.ones(3), 1, group=group),
                lambda: comm.monitored_barrier(group),
            ]
            for call in calls:
                with pytest.raises(errors.CommError, match="this one was forked from"):
                    call()
            group.shutdown()
            comm.abort(group)
            del group, calls
            os._exit(17)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    tensor = torch.ones(3)
    for asynchronous in (False, True):
        work = dist.all_reduce(tensor, group=group, async_op=asynchronous)
        if work is not None:
            work.wait()
    assert tensor.tolist() == [world**2] * 3


def test_a_forked_process_leaves_its_parents_group_alone() -> None:
    ranks.run(forked, 2)


def interrupted(folder: Path) -> None:
    group = comm.new_group(backend="shm")
    told: list[str] = []
    if group.rank() == 0:

        def handler(*_: object) -> None:
            for call in (dist.barrier, lambda group: dist.all_reduce(torch.ones(3), group=group)):
                try:
                    call(group=group)
                except errors.CommError as error:
                    told.append(str(error))
            ranks.mark(folder)

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    else:
        ranks.wait_for_marks(folder, 0)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0] * 3
    if group.rank() == 0:
        assert len(told) == 2, told
        assert all("signal handler" in text and "all_reduce of 3 float32" in text for text in told)


def test_a_signal_handler_cannot_wait_for_its_own_thread(tmp_path: Path) -> None:
    ranks.run(interrupted, 2, tmp_path)


def calls_back() -> None:
    group = comm.new_group(backend="shm")
    rank = group.rank()
    tensor = torch.full((200_000,), float(rank))
    work = dist.isend(tensor, 1, group=group) if rank == 0 else dist.irecv(tensor, 0, group=group)
    assert work is not None
    work.get_future().then(lambda _: (work.wait(), work.is_completed())).wait()
    assert bool((tensor == 0).all())


def test_a_messages_callback_may_wait_for_the_message() -> None:
    ranks.run(calls_back, 2)
