# SPDX-License-Identifier: Apache-2.0
"""Reductions over hosts that are said, not real: the edges of types, and what ranks disagree about."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_collective_checks import averages

import ranks
from anyaccel import comm, errors
from anyaccel.comm import hierarchy, shm

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def pretend(hosts: tuple[int, ...]) -> hierarchy.HierarchicalGroup:
    shm.host_identity = lambda: f"host {hosts[dist.get_rank()]}"
    group = dist.new_group(backend="shm")
    assert isinstance(group, hierarchy.HierarchicalGroup)
    return group


def at_the_edges(hosts: tuple[int, ...]) -> None:
    group = pretend(hosts)
    rank, world = group.rank(), group.size()
    # A NaN of any rank stays, whether or not the others have one.
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            tensor = torch.tensor([math.nan if place == rank else float(rank) for place in range(world + 1)]).to(dtype)
            dist.all_reduce(tensor, op=op, group=group)
            assert tensor.isnan().tolist() == [True] * world + [False], (dtype, op)
            assert float(tensor[-1]) == (0 if op == dist.ReduceOp.MIN else world - 1)
    half = torch.full((3,), 60000, dtype=torch.float16)
    dist.all_reduce(half, op=dist.ReduceOp.AVG, group=group)
    assert half.tolist() == [60000] * 3
    averages(group)
    for dtype in _UNSIGNED:
        top = torch.iinfo(dtype).max
        for op, wanted in ((dist.ReduceOp.MAX, top), (dist.ReduceOp.MIN, 1), (dist.ReduceOp.SUM, world)):
            tensor = torch.tensor([top if op == dist.ReduceOp.MAX and rank == 0 else 1], dtype=dtype)
            dist.all_reduce(tensor, op=op, group=group)
            assert tensor.tolist() == [wanted], (dtype, op)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for op, wanted in ((dist.ReduceOp.SUM, 1.5 * world), (dist.ReduceOp.AVG, 1.5), (dist.ReduceOp.MAX, 1.5)):
            tensor = torch.full((5,), 1.5).to(dtype)
            dist.all_reduce(tensor, op=op, group=group)
            assert tensor.float().tolist() == [float(torch.tensor(wanted).to(dtype))] * 5, (dtype, op)
    counts = [r + 1 for r in range(world)]
    output = torch.zeros(counts[rank])
    dist.reduce_scatter(output, [torch.full((count,), float(rank)) for count in counts], group=group)
    assert output.tolist() == [sum(range(world))] * counts[rank]
    for dtype, op in ((torch.float32, dist.ReduceOp.BAND), (torch.bool, dist.ReduceOp.AVG)):
        with pytest.raises(errors.UsageError, match="no reduction"):
            dist.all_reduce(torch.ones(3).to(dtype), op=op, group=group)
        with pytest.raises(errors.UsageError, match="no reduction"):
            dist.reduce(torch.ones(3).to(dtype), 0, op=op, group=group)
    one = torch.zeros(2)[::2]  # of one element, with another stride
    dist.broadcast(one.fill_(rank), world - 1, group=group)
    assert one.tolist() == [world - 1]
    after = torch.ones(3)
    dist.all_reduce(after, group=group)
    assert after.tolist() == [world] * 3


@pytest.mark.parametrize("hosts", [(0, 1), (0, 1, 0)], ids=str)
def test_edges(hosts: tuple[int, ...]) -> None:
    ranks.run(at_the_edges, len(hosts), hosts)


def disagreeing(hosts: tuple[int, ...]) -> list[str]:
    group = pretend(hosts)
    odd = group.rank() == group.size() - 1
    ones = torch.ones(4)
    calls = (
        lambda: dist.all_reduce(ones[:3].clone() if odd else ones.clone(), group=group),
        lambda: dist.all_reduce(ones.int() if odd else ones.clone(), group=group),
        lambda: dist.all_reduce(ones.clone(), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, group=group),
        lambda: dist.broadcast(ones.clone(), 1 if odd else 0, group=group),
        lambda: dist.barrier(group) if odd else dist.reduce(ones.clone(), 0, group=group),
        lambda: dist.all_reduce(torch.ones(0) if odd else ones.clone(), group=group),
    )
    texts = []
    for call in calls:
        with pytest.raises(errors.CommError) as caught:
            call()
        texts.append(str(caught.value))
    # All were told, so the group works on.
    dist.all_reduce(ones, group=group)
    assert ones.tolist() == [group.size()] * 4
    return texts


@pytest.mark.parametrize("hosts", [(0, 1), (0, 1, 1)], ids=str)
def test_ranks_that_disagree_are_told_on_all_hosts(hosts: tuple[int, ...]) -> None:
    last = len(hosts) - 1
    words = ("3 float32", "int32", "with max", "from rank 1", "barrier", "0 float32")
    for rank, texts in enumerate(ranks.run(disagreeing, len(hosts), hosts)):
        for word, text in zip(words, texts, strict=True):
            assert word in text
            assert "ranks disagree" in text
            called = {int(number) for number in re.findall(r"rank (\d+) called", text)}
            assert rank in called
            assert last in called


def mistaken(hosts: tuple[int, ...]) -> None:
    group = pretend(hosts)
    rank, world = group.rank(), group.size()
    ones = [torch.ones(2) for _ in range(world)]
    root, own = rank == 0, torch.ones(2)
    calls = (
        lambda: dist.all_gather([*ones, own], own, group=group),
        lambda: dist.all_gather([torch.ones(3) for _ in ones], own, group=group),
        lambda: dist.all_to_all([*ones, own], ones, group=group),
        lambda: dist.all_to_all(ones, ones[1:], group=group),
        lambda: dist.reduce_scatter(own, [*ones, own], group=group),
        lambda: group.broadcast(own, _root(world)),
        lambda: group.reduce(own, _root(-1, dist.ReduceOptions())),
        lambda: group.send([own], world, 0),
        lambda: group.recv([own], rank, 0),
    )
    for number, call in enumerate(calls):
        with pytest.raises(errors.UsageError):
            call()
            pytest.fail(f"call {number} is not refused")
    # What one rank says, and what does not fit together, all are told.
    with pytest.raises(errors.CommError, match=r"rank 1 sends 4 elements to rank 0, which expects 1"):
        splits = [4 if rank == 1 else 1, *[1] * (world - 1)]
        dist.all_to_all_single(torch.ones(world), torch.ones(sum(splits)), [1] * world, splits, group=group)
    with pytest.raises(errors.CommError, match="ranks disagree"):
        size = 3 if rank == world - 1 else 2
        dist.gather(torch.ones(size), [torch.ones(size) for _ in ones] if root else None, dst=0, group=group)
    with pytest.raises(errors.CommError, match="ranks disagree"):
        dist.scatter(own if root else own.double(), ones if root else None, src=0, group=group)
    dist.all_to_all(ones, [torch.full((2,), float(rank)) for _ in ones], group=group)
    assert [float(each[0]) for each in ones] == [float(each) for each in range(world)]


def _root(rank: int, options: Any = None) -> Any:
    options = options or dist.BroadcastOptions()
    options.rootRank = rank
    options.asyncOp = False
    return options


@pytest.mark.parametrize("hosts", [(0, 0, 1)], ids=str)
def test_a_mistaken_call_leaves_the_group_whole(hosts: tuple[int, ...]) -> None:
    ranks.run(mistaken, len(hosts), hosts)


def monitored(hosts: tuple[int, ...], folder: Path) -> str:
    group = pretend(hosts)
    comm.monitored_barrier(group)
    text = ""
    if group.rank() == 1:
        ranks.wait_for_marks(folder, 0)
    else:
        try:
            comm.monitored_barrier(group, timedelta(seconds=1))
        except errors.CommTimeoutError as error:
            text = str(error)
    ranks.mark(folder)
    ranks.wait_for_marks(folder, 0, 2)
    return text


def test_monitored_barrier_names_who_is_missing(tmp_path: Path) -> None:
    found = ranks.run(monitored, 3, (0, 0, 1), tmp_path)
    assert "within the timeout of 1 s" in found[0]
    assert re.search(r"[Rr]anks? [\d, ]*1", found[0])
    assert "rank 2 of 3" in found[2]
