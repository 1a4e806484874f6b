# SPDX-License-Identifier: Apache-2.0
"""Every collective of torch.distributed as a table of cases, run by each rank of a job on one group of one backend.

What a rank gives is computed from its number, so each rank can compute what all others give, and the result that torch
itself has for it. The values are small whole numbers: sums and products are exact in every type, so that any wrong bit
is a failure. Where rounding is what is looked at, the case says so.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce as fold
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

REDUCED = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
MOVED = (*REDUCED, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
OPERATIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")


@dataclass(frozen=True)
class Group:
    """What a case runs on: a process group, its members in order of rank, and this rank's place in it."""

    group: Any
    members: tuple[int, ...]
    backend: str
    exact: bool = False  # sums are in fp32, in the order of ranks, rounded once

    @property
    def rank(self) -> int:
        return self.members.index(dist.get_rank())

    @property
    def size(self) -> int:
        return len(self.members)


@dataclass(frozen=True)
class Case:
    """One test: a collective, with the type and operation where there are several.

    Attributes:
        collective: its name.
        run: does it and asserts.
        dtype, operation: of the case; None and "" for cases of their own.
    """

    collective: str
    run: Callable[[Group], None]
    dtype: torch.dtype | None = None
    operation: str = ""

    @property
    def name(self) -> str:
        words = [self.collective, self.operation.lower(), str(self.dtype).removeprefix("torch.") if self.dtype else ""]
        return "-".join(filter(None, words))


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What rank `rank` gives: small whole numbers, of either sign where the type has one."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    low = 0 if dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool) else -2
    whole = torch.randint(low, 3, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(whole.double(), torch.randint(low, 3, shape, generator=generator).double()).to(dtype)
    return (whole % 2 == 1) if dtype == torch.bool else whole.to(dtype)


def reduced(tensors: list[torch.Tensor], operation: str) -> torch.Tensor:
    """The reduction of `tensors`, in their type."""
    dtype = tensors[0].dtype
    # Half types are added in fp32 in the order of ranks and rounded once.
    wide = [tensor.float() if dtype in (torch.bfloat16, torch.float16) else tensor for tensor in tensors]
    if dtype == torch.bool:  # as whole numbers, where every value but 0 is true
        logical = {"SUM": torch.logical_or, "MAX": torch.logical_or, "BOR": torch.logical_or, "BXOR": torch.logical_xor}
        return fold(logical.get(operation, torch.logical_and), wide)
    functions = {
        "SUM": torch.add,
        "AVG": torch.add,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "PRODUCT": torch.mul,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    total = fold(functions[operation], wide)
    if operation == "AVG" and dtype.is_complex:  # torch's own quotient may differ by one bit, in the last elements
        total = torch.view_as_complex(torch.view_as_real(total) / len(tensors))
    elif operation == "AVG":
        total = total / len(tensors)
    return total.to(dtype)


def same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Equal type, shape and bits (zeros of either sign are equal)."""
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, not {want.dtype}"
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, not {tuple(want.shape)}"
    if got.dtype in (torch.uint16, torch.uint32, torch.uint64) or got.dtype.itemsize == 1:
        got, want = (tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (got, want))
    if not torch.equal(got, want):
        wrong = (got != want).reshape(-1)
        first = int(wrong.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ; element {first} is "
            f"{got.reshape(-1)[first]}, not {want.reshape(-1)[first]}"
        )


# Shapes at the edges of vectors, of small messages and of chunks.
SHAPES = ((), (1,), (0,), (7,), (3, 5), (1000,), (70_001,))


# Types that go all the way; the others are moved or reduced by the same code, and get the shapes that differ most.
MAIN_TYPES = (torch.float32, torch.bfloat16, torch.int64)


def shapes(dtype: torch.dtype) -> tuple[tuple[int, ...], ...]:
    """All of them for the main types; for the others few, to save time."""
    return SHAPES if dtype in MAIN_TYPES else ((), (7,), (3, 5))


def layouts(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor as it is, and copies of it that lie differently in memory."""
    yield "dense", tensor.clone()
    if tensor.dim() == 1 and 1 < tensor.numel() < 5000:
        spread = torch.zeros(2 * tensor.numel() + 3, dtype=tensor.dtype)[3::2]
        spread.copy_(tensor)
        yield "strided", spread
        offset = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:]
        offset.copy_(tensor)
        yield "not aligned", offset
    if tensor.dim() == 2:
        columns = torch.zeros(tensor.shape[::-1], dtype=tensor.dtype).t()
        columns.copy_(tensor)
        yield "column-major", columns


def dense_only(group: Group) -> bool:
    """torch's own backends refuse tensors that are not contiguous."""
    return group.backend == "gloo"


def each_layout(group: Group, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for layout, copy in layouts(tensor):
        if layout in ("dense", "not aligned") or not dense_only(group):
            yield layout, copy


def roots(group: Group) -> tuple[int, ...]:
    return tuple(sorted({0, group.size - 1}))


# Collectives of one type and operation -------------------------------------------------------------------------------


def all_reduce(group: Group, dtype: torch.dtype, operation: str) -> None:
    for seed, shape in enumerate(shapes(dtype)):
        given = [values(rank, shape, dtype, seed) for rank in group.members]
        want = reduced(given, operation)
        for layout, tensor in each_layout(group, given[group.rank]):
            dist.all_reduce(tensor, op=getattr(ReduceOp, operation), group=group.group)
            same(tensor, want, f"{layout} {shape}")


def reduce(group: Group, dtype: torch.dtype, operation: str) -> None:
    for seed, shape in enumerate(shapes(dtype)):
        given = [values(rank, shape, dtype, seed) for rank in group.members]
        want = reduced(given, operation)
        for root in roots(group):
            for layout, tensor in each_layout(group, given[group.rank]):
                dist.reduce(tensor, dst=group.members[root], op=getattr(ReduceOp, operation), group=group.group)
                if group.rank == root:
                    same(tensor, want, f"to {root}, {layout} {shape}")


def reduce_scatter(group: Group, dtype: torch.dtype, operation: str) -> None:
    for seed, shape in enumerate(((), (1,), (3, 5), (17_001,))):
        given = [[values(rank, shape, dtype, 10 * seed + part) for part in range(group.size)] for rank in group.members]
        want = reduced([parts[group.rank] for parts in given], operation)
        inputs = [dict(each_layout(group, part)) for part in given[group.rank]]
        for layout in inputs[0]:
            output = torch.full_like(inputs[0][layout], 1)
            dist.reduce_scatter(
                output, [part[layout] for part in inputs], op=getattr(ReduceOp, operation), group=group.group
            )
            same(output, want, f"{layout} {shape}")


def reduce_scatter_tensor(group: Group, dtype: torch.dtype, operation: str) -> None:
    for seed, count in enumerate((1, 7, 1000, 17_001, 0)):
        given = [values(rank, (group.size * count,), dtype, seed) for rank in group.members]
        want = reduced(given, operation)[group.rank * count : (group.rank + 1) * count]
        output = torch.full((count,), 1, dtype=dtype)
        tensor = given[group.rank]
        op = getattr(ReduceOp, operation)
        dist.reduce_scatter_tensor(output, tensor.clone(), op=op, group=group.group)
        same(output, want, f"{count} elements")
        # The output is a part of the input, as FSDP has it.
        whole = tensor.clone()
        part = whole[group.rank * count : (group.rank + 1) * count]
        dist.reduce_scatter_tensor(part, whole, op=op, group=group.group)
        same(part, want, f"{count} elements in place")


def all_reduce_coalesced(group: Group, dtype: torch.dtype, operation: str) -> None:
    given = [[values(rank, shape, dtype, seed) for seed, shape in enumerate(SHAPES)] for rank in group.members]
    tensors = [tensor.clone() for tensor in given[group.rank]]
    work = group.group.allreduce_coalesced(tensors, _coalesced_options(operation))
    work.wait()
    for index, shape in enumerate(SHAPES):
        same(tensors[index], reduced([parts[index] for parts in given], operation), f"tensor {index} of {shape}")


def _coalesced_options(operation: str) -> Any:
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = getattr(ReduceOp, operation)
    return options


# Collectives that move values ----------------------------------------------------------------------------------------


def broadcast(group: Group, dtype: torch.dtype) -> None:
    for seed, shape in enumerate(shapes(dtype)):
        for root in roots(group):
            want = values(group.members[root], shape, dtype, seed)
            for layout, tensor in each_layout(group, values(group.members[group.rank], shape, dtype, seed)):
                dist.broadcast(tensor, src=group.members[root], group=group.group)
                same(tensor, want, f"from {root}, {layout} {shape}")


def all_gather(group: Group, dtype: torch.dtype) -> None:
    for seed, shape in enumerate(shapes(dtype)):
        given = [values(rank, shape, dtype, seed) for rank in group.members]
        for layout, tensor in each_layout(group, given[group.rank]):
            output = [dict(layouts(torch.zeros(shape, dtype=dtype)))[layout] for _ in given]
            dist.all_gather(output, tensor, group=group.group)
            for rank, want in enumerate(given):
                same(output[rank], want, f"of {rank}, {layout} {shape}")


def all_gather_uneven(group: Group, dtype: torch.dtype) -> None:
    shapes = [(3 * rank + 1, 2) for rank in range(group.size)]
    given = [values(rank, shape, dtype) for rank, shape in zip(group.members, shapes, strict=True)]
    output = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    dist.all_gather(output, given[group.rank].clone(), group=group.group)
    for rank, want in enumerate(given):
        same(output[rank], want, f"of {rank}")


def all_gather_into_tensor(group: Group, dtype: torch.dtype) -> None:
    for seed, count in enumerate((1, 7, 1000, 70_001, 0)):
        given = [values(rank, (count,), dtype, seed) for rank in group.members]
        output = torch.zeros(group.size * count, dtype=dtype)
        dist.all_gather_into_tensor(output, given[group.rank].clone(), group=group.group)
        same(output, torch.cat(given), f"{count} elements")
        # The input is a part of the output, as FSDP has it.
        output = torch.zeros(group.size * count, dtype=dtype)
        part = output[group.rank * count : (group.rank + 1) * count]
        part.copy_(given[group.rank])
        dist.all_gather_into_tensor(output, part, group=group.group)
        same(output, torch.cat(given), f"{count} elements in place")


def all_gather_stacked(group: Group) -> None:
    """The output has a dimension more than the input."""
    stacked = torch.zeros(group.size, 3, 2)
    given = [values(rank, (3, 2), torch.float32) for rank in group.members]
    dist.all_gather_into_tensor(stacked, given[group.rank].clone(), group=group.group)
    same(stacked, torch.stack(given), "stacked")


def all_to_all_single(group: Group, dtype: torch.dtype) -> None:
    for seed, count in enumerate((1, 5, 1000, 0)):
        given = [values(rank, (group.size * count,), dtype, seed) for rank in group.members]
        want = torch.cat([tensor[group.rank * count : (group.rank + 1) * count] for tensor in given])
        output = torch.zeros(group.size * count, dtype=dtype)
        dist.all_to_all_single(output, given[group.rank].clone(), group=group.group)
        same(output, want, f"{count} elements")


def all_to_all_single_uneven(group: Group, dtype: torch.dtype) -> None:
    size = group.size
    # From rank a to rank b: rows[a][b] rows; some are 0.
    rows = [[(2 * a + 3 * b) % 4 for b in range(size)] for a in range(size)]
    given = [values(rank, (sum(rows[a]), 3), dtype) for a, rank in enumerate(group.members)]
    want = torch.cat([given[a].split(rows[a])[group.rank] for a in range(size)])
    output = torch.zeros(sum(rows[a][group.rank] for a in range(size)), 3, dtype=dtype)
    dist.all_to_all_single(
        output,
        given[group.rank].clone(),
        [rows[a][group.rank] for a in range(size)],
        rows[group.rank],
        group=group.group,
    )
    same(output, want, "rows")


def all_to_all(group: Group, dtype: torch.dtype) -> None:
    _all_to_all(group, dtype, lambda a, b: (3, 2))


def all_to_all_uneven(group: Group, dtype: torch.dtype) -> None:
    _all_to_all(group, dtype, lambda a, b: ((a + 2 * b) % 3, 2))


def _all_to_all(group: Group, dtype: torch.dtype, shape: Callable[[int, int], tuple[int, ...]]) -> None:
    size = group.size
    shapes = [[shape(a, b) for b in range(size)] for a in range(size)]
    given = [[values(group.members[a], shapes[a][b], dtype, b) for b in range(size)] for a in range(size)]
    for layout in ("dense",) if dense_only(group) else ("dense", "column-major"):
        output = [dict(layouts(torch.zeros(shapes[a][group.rank], dtype=dtype)))[layout] for a in range(size)]
        dist.all_to_all(output, [dict(layouts(part))[layout] for part in given[group.rank]], group=group.group)
        for a in range(size):
            same(output[a], given[a][group.rank], f"from {a}, {layout}")


def gather(group: Group, dtype: torch.dtype) -> None:
    for seed, shape in enumerate(((), (7,), (3, 5), (17_001,))):
        given = [values(rank, shape, dtype, seed) for rank in group.members]
        for root in roots(group):
            for layout, tensor in each_layout(group, given[group.rank]):
                output = None
                if group.rank == root:
                    output = [dict(layouts(torch.zeros(shape, dtype=dtype)))[layout] for _ in given]
                dist.gather(tensor, output, dst=group.members[root], group=group.group)
                for rank, part in enumerate(output or []):
                    same(part, given[rank], f"at {root} of {rank}, {layout} {shape}")


def scatter(group: Group, dtype: torch.dtype) -> None:
    for seed, shape in enumerate(((), (7,), (3, 5), (17_001,))):
        given = [values(rank, shape, dtype, seed) for rank in group.members]
        for root in roots(group):
            for layout, output in each_layout(group, torch.zeros(shape, dtype=dtype)):
                parts = [dict(layouts(part))[layout] for part in given] if group.rank == root else None
                dist.scatter(output, parts, src=group.members[root], group=group.group)
                same(output, given[group.rank], f"from {root}, {layout} {shape}")


def send_recv(group: Group, dtype: torch.dtype) -> None:
    """Round a ring, each rank first receives or first sends by its number."""
    if group.size == 1:
        return
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for seed, shape in enumerate(shapes(dtype)):
        given = values(group.members[group.rank], shape, dtype, seed)
        want = values(group.members[left], shape, dtype, seed)
        for layout, tensor in each_layout(group, given):
            received = dict(layouts(torch.zeros(shape, dtype=dtype)))[layout]
            steps = [
                lambda tensor=tensor: dist.send(tensor, group.members[right], group=group.group),
                lambda received=received: dist.recv(received, group.members[left], group=group.group),
            ]
            for step in steps if group.rank % 2 == 0 else reversed(steps):
                step()
            same(received, want, f"{layout} {shape}")


# Cases of their own --------------------------------------------------------------------------------------------------


def barrier(group: Group) -> None:
    """Nobody leaves before the last has come."""
    store = dist.PrefixStore(f"barrier-{group.members}-{group.backend}", dist.distributed_c10d._get_default_store())
    dist.barrier(group=group.group)
    for turn in range(group.size):
        if group.rank == turn:
            time.sleep(0.05)
            store.set(f"late{turn}", "1")
        dist.barrier(group=group.group)
        assert store.check([f"late{turn}"]), f"left before rank {turn} came"


def async_work(group: Group) -> None:
    """Several operations under way at once; their work is waited for out of order."""
    given = [[values(rank, (1000 * (n + 1),), torch.float32, n) for n in range(8)] for rank in group.members]
    tensors = [tensor.clone() for tensor in given[group.rank]]
    works = [dist.all_reduce(tensor, group=group.group, async_op=True) for tensor in tensors]
    for n in (3, 0, 7, 1, 6, 2, 5, 4):
        works[n].wait()
        same(tensors[n], reduced([parts[n] for parts in given], "SUM"), f"operation {n}")
    assert all(work.is_completed() for work in works)


def futures(group: Group) -> None:
    given = [values(rank, (1000,), torch.float32) for rank in group.members]
    tensor = given[group.rank].clone()
    future = dist.all_reduce(tensor, group=group.group, async_op=True).get_future()
    doubled = future.then(lambda done: 2 * done.value()[0]).wait()
    same(tensor, reduced(given, "SUM"), "the tensor")
    same(doubled, 2 * tensor, "what the future gives")


def wait_with_timeout(group: Group) -> None:
    work = dist.all_reduce(torch.ones(10), group=group.group, async_op=True)
    assert work.wait(timedelta(seconds=30))


def nonblocking_send_recv(group: Group) -> None:
    """Every rank to every other at once, in no special order."""
    others = [rank for rank in range(group.size) if rank != group.rank]
    incoming = {rank: torch.zeros(500, 3) for rank in others}
    works = [
        dist.isend(values(group.members[group.rank], (500, 3), torch.float32, rank), group.members[rank], group.group)
        for rank in others
    ]
    works += [dist.irecv(incoming[rank], group.members[rank], group.group) for rank in reversed(others)]
    for work in works:
        work.wait()
    for rank in others:
        same(incoming[rank], values(group.members[rank], (500, 3), torch.float32, group.rank), f"from {rank}")


def batched_send_recv(group: Group) -> None:
    others = [rank for rank in range(group.size) if rank != group.rank]
    if not others:
        return
    incoming = {rank: torch.zeros(5, dtype=torch.int32) for rank in others}
    operations = []
    for rank in others:
        mine = torch.full((5,), 10 * group.rank + rank, dtype=torch.int32)
        operations.append(dist.P2POp(dist.isend, mine, group.members[rank], group.group))
        operations.append(dist.P2POp(dist.irecv, incoming[rank], group.members[rank], group.group))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for rank in others:
        assert bool((incoming[rank] == 10 * rank + group.rank).all()), rank


def tags(group: Group) -> None:
    """Messages of one pair are told apart by their tags."""
    if group.size == 1 or group.rank > 1:
        return
    peer = group.members[1 - group.rank]
    if group.rank == 0:
        works = [dist.isend(torch.full((4,), float(tag)), peer, group.group, tag=tag) for tag in (1, 2, 3)]
        for work in works:
            work.wait()
    else:
        received = {tag: torch.zeros(4) for tag in (1, 2, 3)}
        works = [dist.irecv(received[tag], peer, group.group, tag=tag) for tag in (3, 1, 2)]
        for work in works:
            work.wait()
        for tag, tensor in received.items():
            assert bool((tensor == tag).all()), (tag, tensor)


def recv_from_any(group: Group) -> None:
    if group.rank == 0:
        seen = set()
        for _ in range(group.size - 1):
            tensor = torch.zeros(3)
            source = dist.recv(tensor, group=group.group)
            assert bool((tensor == source).all())
            seen.add(source)
        assert seen == set(group.members[1:])
    else:
        dist.send(torch.full((3,), float(dist.get_rank())), group.members[0], group=group.group)


def coalescing_manager(group: Group) -> None:
    given = [[values(rank, (100 + n,), torch.float32, n) for n in range(3)] for rank in group.members]
    tensors = [tensor.clone() for tensor in given[group.rank]]
    with dist._coalescing_manager(group.group, device=torch.device("cpu")):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group.group)
    for n, tensor in enumerate(tensors):
        same(tensor, reduced([parts[n] for parts in given], "SUM"), f"all_reduce {n}")
    outputs = [torch.zeros(group.size * (100 + n)) for n in range(3)]
    with dist._coalescing_manager(group.group, device=torch.device("cpu"), async_ops=True) as manager:
        for n, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, given[group.rank][n], group=group.group)
    manager.wait()
    for n, output in enumerate(outputs):
        same(output, torch.cat([parts[n] for parts in given]), f"all_gather {n}")
    with dist._coalescing_manager(group.group, device=torch.device("cpu")):
        pieces = [torch.zeros(100 + n) for n in range(3)]
        for n, piece in enumerate(pieces):
            dist.reduce_scatter_tensor(piece, outputs[n].clone(), group=group.group)
    for n, piece in enumerate(pieces):
        want = group.size * given[group.rank][n]
        same(piece, want, f"reduce_scatter {n}")


def objects(group: Group) -> None:
    received: list[Any] = [None] * group.size
    dist.all_gather_object(received, {"rank": group.rank, "text": "x" * group.rank}, group=group.group)
    assert [entry["text"] for entry in received] == ["x" * rank for rank in range(group.size)]
    told = [("from", group.rank)]
    dist.broadcast_object_list(told, src=group.members[-1], group=group.group)
    assert told == [("from", group.size - 1)]
    gathered: list[Any] | None = [None] * group.size if group.rank == 0 else None
    dist.gather_object(group.rank * 11, gathered, dst=group.members[0], group=group.group)
    assert gathered in (None, [rank * 11 for rank in range(group.size)])
    output: list[Any] = [None]
    dist.scatter_object_list(
        output, [f"to {rank}" for rank in range(group.size)], src=group.members[0], group=group.group
    )
    assert output == [f"to {group.rank}"]


def functional(group: Group) -> None:
    """The form that torch.compile and DTensor use."""
    from torch.distributed import _functional_collectives as functional_collectives

    given = [values(rank, (4 * group.size, 3), torch.float32) for rank in group.members]
    mine = given[group.rank]
    total = reduced(given, "SUM")
    same(functional_collectives.all_reduce(mine, "sum", group.group).clone(), total, "all_reduce")
    gathered = functional_collectives.all_gather_tensor(mine, 0, group.group)
    same(gathered.clone(), torch.cat(given), "all_gather_tensor")
    scattered = functional_collectives.reduce_scatter_tensor(mine, "sum", 0, group.group)
    same(scattered.clone(), total[4 * group.rank : 4 * group.rank + 4], "reduce_scatter_tensor")
    turned = functional_collectives.all_to_all_single(mine, None, None, group.group)
    want = torch.cat([tensor[4 * group.rank : 4 * group.rank + 4] for tensor in given])
    same(turned.clone(), want, "all_to_all_single")
    told = functional_collectives.broadcast(mine, group.size - 1, group.group)
    same(told.clone(), given[-1], "broadcast")


def many_in_random_order(group: Group) -> None:
    """Sizes and collectives that every rank draws alike."""
    order = torch.Generator().manual_seed(11)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=order))

    for turn in range(150):
        count = 1 + draw(20_000) if turn % 10 == 0 else 1 + draw(300)
        given = [values(rank, (count,), torch.float32, turn) for rank in group.members]
        mine = given[group.rank].clone()
        which = draw(4)
        if which == 0:
            dist.all_reduce(mine, group=group.group)
            same(mine, reduced(given, "SUM"), f"turn {turn}: all_reduce")
        elif which == 1:
            root = draw(group.size)
            dist.broadcast(mine, group.members[root], group=group.group)
            same(mine, given[root], f"turn {turn}: broadcast")
        elif which == 2:
            output = torch.zeros(group.size * count)
            dist.all_gather_into_tensor(output, mine, group=group.group)
            same(output, torch.cat(given), f"turn {turn}: all_gather")
        else:
            dist.barrier(group=group.group)


def rounding(group: Group) -> None:
    """Sums of random values: the same bits on every rank, and near the exact ones."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = [torch.randn(30_001, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in group.members]
        tensor = given[group.rank].clone()
        dist.all_reduce(tensor, group=group.group)
        parts = torch.stack(given).double()
        # Each of the additions rounds a partial sum, in whatever order they are (Higham, 2002, section 4.2); oneCCL
        # cuts bf16 off instead on processors without instructions for it, which may be off by twice as much.
        most = group.size * torch.finfo(dtype).eps * parts.abs().sum(0)
        off = (tensor.double() - parts.sum(0)).abs() - most
        assert bool((off <= 0).all()), f"{dtype}: element {int(off.argmax())} is off by more than rounding"
        everyones = [torch.empty_like(tensor) for _ in given]
        dist.all_gather(everyones, tensor, group=group.group)
        for rank, other in enumerate(everyones):
            same(other, tensor, f"the sum of {dtype} on rank {rank}")
        if group.exact:  # documented: in fp32, in the order of ranks, rounded once
            same(
                tensor, fold(torch.add, [part.float() for part in given]).to(dtype), f"the order of additions, {dtype}"
            )


def two_groups_at_once(group: Group) -> None:
    """Operations of two groups with the same members, interleaved differently on each rank."""
    other = dist.new_group(list(group.members), backend=group.backend, use_local_synchronization=True)
    first, second = torch.ones(5000), torch.full((5000,), 2.0)
    for _ in range(5):
        orders = ((first, group.group), (second, other))
        works = [dist.all_reduce(t, group=g, async_op=True) for t, g in (orders if group.rank % 2 else orders[::-1])]
        for work in works:
            work.wait()
        first /= group.size
        second /= group.size
    assert bool((first == 1).all()) and bool((second == 2).all())
    dist.barrier(group=other)
    dist.destroy_process_group(other)


def _cases() -> Iterator[Case]:
    for function in (all_reduce, reduce, reduce_scatter, reduce_scatter_tensor, all_reduce_coalesced):
        for operation in OPERATIONS:
            for dtype in REDUCED:
                if operation.startswith("B") and dtype not in INTEGERS:
                    continue
                if dtype.is_complex and operation not in ("SUM", "AVG"):
                    continue  # torch refuses the others
                if operation == "AVG" and dtype in INTEGERS:
                    continue  # has no exact value
                run = lambda group, f=function, d=dtype, o=operation: f(group, d, o)  # noqa: E731
                yield Case(function.__name__, run, dtype, operation)
    for function in (
        broadcast,
        all_gather,
        all_gather_uneven,
        all_gather_into_tensor,
        all_to_all_single,
        all_to_all_single_uneven,
        all_to_all,
        all_to_all_uneven,
        gather,
        scatter,
        send_recv,
    ):
        for dtype in MOVED:
            yield Case(function.__name__, lambda group, f=function, d=dtype: f(group, d), dtype)
    for function in (
        barrier,
        all_gather_stacked,
        async_work,
        futures,
        wait_with_timeout,
        nonblocking_send_recv,
        batched_send_recv,
        tags,
        recv_from_any,
        coalescing_manager,
        objects,
        functional,
        many_in_random_order,
        rounding,
        two_groups_at_once,
    ):
        yield Case(function.__name__, function)


def oneccl_folder() -> Path | None:
    """Where tools/install_test_tools.sh put oneCCL, or CCL_ROOT says it is."""
    repository = Path(__file__).parents[2]
    for folder in (os.environ.get("CCL_ROOT"), Path(sys.prefix) / "oneccl", repository / ".venv" / "oneccl"):
        if folder and (Path(folder) / "lib" / "libccl.so.1").exists():
            return Path(folder).resolve()
    return None


CASES = {case.name: case for case in _cases()}


_TIMEOUT = timedelta(seconds=60)  # a case that fails on some ranks leaves the others waiting


def run_cases(backend: str, names: list[str], exact: bool = False) -> dict[str, str]:
    """Run the named cases on a group of all ranks, then some on sub-groups; name -> what went wrong.

    `exact`: what the backend promises of sums.

    A case that fails on one rank must not leave the others waiting in another one, so the ranks agree after each.
    """
    world = dist.get_world_size()
    group = Group(dist.new_group(backend=backend, timeout=_TIMEOUT), tuple(range(world)), backend, exact)
    found = {}
    for name in names:
        os.write(1, f"{name}\n".encode())  # the last one is where a job that hangs is
        found[name] = _outcome(CASES[name], group)
    if world > 1:
        found |= _on_subgroups(backend, world, [name for name in names if name in _SUBGROUP_CASES])
    return found


# Cases that are run again on groups of some of the ranks.
_SUBGROUP_CASES = (
    "all_reduce-sum-float32",
    "all_reduce-max-int64",
    "reduce-sum-float32",
    "broadcast-float32",
    "all_gather-bfloat16",
    "all_gather_into_tensor-float32",
    "reduce_scatter_tensor-sum-float32",
    "gather-float32",
    "scatter-float32",
    "all_to_all_single-float32",
    "send_recv-float32",
    "barrier",
    "objects",
    "functional",
    "many_in_random_order",
)


def _on_subgroups(backend: str, world: int, names: list[str]) -> dict[str, str]:
    """Groups that overlap, one of them not in the order of ranks; a group of one."""
    memberships = [tuple(range(world - 1)), tuple(range(1, world)), (world - 1,)]
    if world > 2:
        memberships.append((world - 1, 0))
    groups = [
        Group(dist.new_group(list(members), timeout=_TIMEOUT, backend=backend, sort_ranks=False), members, backend)
        for members in memberships
    ]
    found = {}
    for group in groups:
        for name in names:
            label = f"{name} on {group.members}"
            os.write(1, f"{label}\n".encode())
            own = _outcome_of_one(CASES[name], group) if dist.get_rank() in group.members else ""
            found[f"{name}@{group.members}"] = _agreed(own)
    return found


def _outcome_of_one(case: Case, group: Group) -> str:
    try:
        case.run(group)
    except Exception as error:  # noqa: BLE001
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"  # noqa: PTH119
    return ""


def _agreed(own: str) -> str:
    """The first rank's problem, on every rank."""
    failed = torch.tensor(int(bool(own)))
    dist.all_reduce(failed, op=ReduceOp.MAX)
    if not failed:
        return ""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(everyones) if text), "")


def _outcome(case: Case, group: Group) -> str:
    return _agreed(_outcome_of_one(case, group))
