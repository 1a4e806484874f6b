# SPDX-License-Identifier: Apache-2.0
"""Groups that end, and programs that end, with something under way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

import ranks
from anyaccel import comm
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
        wait_for(lambda: group._line._closed, "the group does not begin to end")
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
