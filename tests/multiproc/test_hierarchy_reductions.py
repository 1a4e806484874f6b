# SPDX-License-Identifier: Apache-2.0
"""Reductions over hosts that are said, not real: the edges of types, and what ranks disagree about."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.distributed as dist
from test_collective_checks import averages

import ranks
from anyaccel import errors
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
