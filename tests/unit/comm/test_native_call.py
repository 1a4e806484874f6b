# SPDX-License-Identifier: Apache-2.0
"""Which calls of torch.distributed.all_reduce are one native call, and which take the way of everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.tensor.debug import CommDebugMode

from anyaccel import _native
from anyaccel.comm import backends, log
from anyaccel.comm.shm_group import ShmProcessGroup

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[ShmProcessGroup]:
    made = backends.create_shm(dist.HashStore(), 0, 1, timedelta(seconds=60))
    assert isinstance(made, ShmProcessGroup)
    yield made
    made.shutdown()


def options(op: Any = ReduceOp.SUM, asynchronous: bool = False) -> dist.AllreduceOptions:
    made = dist.AllreduceOptions()
    made.reduceOp, made.asyncOp = op, asynchronous
    return made


def is_native(group: ShmProcessGroup, tensors: Any = None, opts: Any = None) -> bool:
    return _native.all_reduce_call(group.native, [torch.ones(4)] if tensors is None else tensors, opts or options())


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX], ids=str)
def test_a_plain_call_is_native(group: ShmProcessGroup, op: Any) -> None:
    assert is_native(group, opts=options(op))
    before = group._get_sequence_number_for_group()
    assert group.allreduce([torch.ones(4)], options(op)).wait()
    assert group._get_sequence_number_for_group() == before + 1


@pytest.mark.parametrize(
    ("tensors", "opts"),
    [
        ([torch.ones(4)], options(asynchronous=True)),
        ([torch.ones(4, dtype=torch.int32)], options(ReduceOp.BAND)),
        ([torch.ones(4), torch.ones(4)], options()),
        ([], options()),
        (torch.ones(4), options()),
        ([torch.ones(4, 4).t()[1:]], options()),
        ([torch.ones(4, dtype=torch.bool)], options()),
        ([torch.ones(4, device="meta")], options()),
        (["text"], options()),
        ([torch.ones(4)], ReduceOp.SUM),
        ([torch.ones(4)], None),
    ],
)
def test_what_is_out_of_the_ordinary_is_not(group: ShmProcessGroup, tensors: Any, opts: Any) -> None:
    assert not _native.all_reduce_call(group.native, tensors, opts)


def coalescing(group: ShmProcessGroup, inside: Callable[[], None]) -> None:
    group._start_coalescing(CPU)
    inside()
    work = group.allreduce([torch.ones(4)], options())
    group._end_coalescing(CPU).wait()
    assert work.is_completed()


def profiled(_: ShmProcessGroup, inside: Callable[[], None]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        inside()


def counted(_: ShmProcessGroup, inside: Callable[[], None]) -> None:
    with CommDebugMode():
        inside()


def logged(_: ShmProcessGroup, inside: Callable[[], None]) -> None:
    log.configure(True)
    inside()
    log.configure(False)


def behind_another(group: ShmProcessGroup, inside: Callable[[], None]) -> None:
    work = group._executor.submit(inside, None)
    work.wait()


@pytest.mark.parametrize("when", [coalescing, profiled, counted, logged, behind_another])
def test_where_somebody_looks_or_others_come_first_no_call_is(
    group: ShmProcessGroup, when: Callable[[ShmProcessGroup, Callable[[], None]], None]
) -> None:
    found: list[bool] = []
    when(group, lambda: found.append(is_native(group)))
    assert found == [False]
    assert is_native(group)
