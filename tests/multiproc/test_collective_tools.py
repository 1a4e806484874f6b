# SPDX-License-Identifier: Apache-2.0
"""What torch's tools see of a group: its profiler, CommDebugMode, sequence numbers, timeouts that are set."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed.tensor.debug import CommDebugMode

import ranks
from anyaccel.comm import log, shm
from anyaccel.errors import CommTimeoutError


def collectives(group: Any) -> None:
    """Those that gloo has too."""
    ones, first = torch.ones(4), dist.get_rank() == 0
    parts = [torch.empty(4) for _ in range(group.size())]
    dist.all_reduce(ones, group=group)
    dist.all_reduce(ones, group=group, async_op=True).wait()
    dist.broadcast(ones, 0, group=group)
    dist.all_gather(parts, ones, group=group)
    dist.all_gather_single(torch.empty(4 * group.size()), ones, group=group)
    dist.reduce_scatter_single(torch.empty(4), torch.ones(4 * group.size()), group=group)
    dist.all_to_all_single(torch.empty(group.size()), torch.ones(group.size()), group=group)
    dist.reduce(ones, 0, group=group)
    dist.scatter(ones, parts if first else None, group=group)
    dist.gather(ones, parts if first else None, group=group)
    functional.all_reduce(ones, "sum", group).wait()
    with dist._coalescing_manager(group=group):  # type: ignore[attr-defined]
        dist.all_reduce(ones, group=group)
        dist.all_reduce(ones, group=group)


def counts(group: Any) -> Any:
    with CommDebugMode() as outer, CommDebugMode() as inner:
        collectives(group)
    assert inner.get_total_counts() == outer.get_total_counts()
    assert "c10d.allreduce_" in inner.generate_comm_debug_tracing_table()
    return {str(operation): count for operation, count in inner.get_comm_counts().items()}


def events(run: Callable[[], None]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    return [event.name for event in profiler.events() if event.name.startswith("shm:")]


def reduce_once(group: Any, asynchronous: bool) -> None:
    work = dist.all_reduce(torch.ones(100_000), group=group, async_op=asynchronous)
    if work is not None:
        work.wait()


def seen(hosts: tuple[int, ...]) -> None:
    gloo = dist.new_group(backend="gloo")
    shm.host_identity = lambda: f"host {hosts[dist.get_rank()]}"
    group = dist.new_group(backend="shm", timeout=timedelta(seconds=60))
    assert counts(group) == counts(gloo)
    wanted = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce", "scatter", "gather")
    assert {f"shm:{name}" for name in wanted} == set(events(lambda: collectives(group)))
    # What it consists of is nothing of its own.
    for asynchronous in (False, True):
        assert events(partial(reduce_once, group, asynchronous)) == ["shm:all_reduce"]
    log.configure()
    reduce_once(group, False)
    assert [entry.count for entry in log.entries()] == [1]
    log.configure(enabled=False)
    log.reset()
    before = group._get_sequence_number_for_group()
    collectives(group)
    numbers: list[Any] = [None] * group.size()
    dist.all_gather_object(numbers, group._get_sequence_number_for_group() - before, group=gloo)
    assert set(numbers) == {numbers[0]}
    assert numbers[0] >= 12  # an operation each
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it ignores what it is asked for
        distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    if group.rank() == 0:
        with pytest.raises(CommTimeoutError, match="within the timeout of 1 s"):
            dist.all_reduce(torch.ones(2), group=group)
    dist.barrier(gloo)  # nobody comes before rank 0 has given up


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)], ids=str)
def test_tools_of_torch_see_a_group(hosts: tuple[int, ...]) -> None:
    ranks.run(seen, len(hosts), hosts)
