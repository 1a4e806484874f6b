# SPDX-License-Identifier: Apache-2.0
"""Random collectives of the `shm` backend, each checked against a reference: `make soak`.

All ranks draw the same operation, dtype, size, layout, group and way of calling from one seed, so each of them can
compute what every rank gives and what must come out. The first difference ends the run with a description of it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64),
)
SUM, MIN, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX


class Draw:
    """One operation of all ranks of a group."""

    def __init__(self, order: random.Random, members: list[int], group: Any, me: int) -> None:
        self.group, self.size = group, len(members)
        self.rank = members.index(me) if me in members else -1
        self.dtype = order.choice(DTYPES)
        self.count = int(400_000 ** order.random()) - 1
        self.strided = order.random() < 0.2
        self.uneven = order.random() < 0.3
        self.asynchronous = order.random() < 0.3
        self.root = order.randrange(self.size)
        self.seed = order.randrange(1 << 30)
        self.op = SUM if self.dtype.is_complex or self.dtype == torch.bool else order.choice((SUM, MIN, MAX))

    def given(self, rank: int, part: int = 0, count: int | None = None) -> torch.Tensor:
        """What a rank gives: small whole numbers, whose sums every dtype but int8 has exactly."""
        n = self.count if count is None else count
        generator = torch.Generator().manual_seed((self.seed + 7919 * rank + 104_729 * part) % (1 << 31))
        return torch.randint(0, 5, (n,), generator=generator).to(self.dtype)

    def reduced(self, part: int = 0, count: int | None = None) -> torch.Tensor:
        """What the reduction of all ranks' is."""
        if self.dtype == torch.bool:
            return torch.stack([self.given(r, part, count) for r in range(self.size)]).any(0)
        wide = torch.complex64 if self.dtype.is_complex else torch.int64
        all_of_them = torch.stack([self.given(r, part, count).to(wide) for r in range(self.size)])
        if self.op == SUM:
            return all_of_them.sum(0).to(self.dtype)
        return (all_of_them.amin(0) if self.op == MIN else all_of_them.amax(0)).to(self.dtype)

    def place(self, values: torch.Tensor) -> torch.Tensor:
        """The values in the layout that was drawn."""
        if not self.strided:
            return values.clone()
        wide = torch.zeros(values.numel() * 2, dtype=values.dtype)
        wide[::2] = values
        return wide[::2]

    def empty(self, count: int | None = None) -> torch.Tensor:
        return self.place(torch.zeros(self.count if count is None else count, dtype=self.dtype))

    def end(self, work: Any) -> None:
        if work is not None:
            work.wait()


def all_reduce(d: Draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tensor = d.place(d.given(d.rank))
    d.end(dist.all_reduce(tensor, d.op, d.group, d.asynchronous))
    return [(tensor, d.reduced())]


def inference_all_reduce(d: Draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    from anyaccel import comm

    tensor = d.place(d.given(d.rank))
    comm.inference_all_reduce(tensor, d.op, d.group)
    return [(tensor, d.reduced())]


def symmetric(d: Draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    from anyaccel import comm

    tensor = comm.symm_empty(d.count, d.dtype, d.group)
    tensor.copy_(d.given(d.rank))
    comm.inference_all_reduce(tensor, d.op, d.group)
    return [(tensor.clone(), d.reduced())]


def reduce(d: Draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tensor = d.place(d.given(d.rank))
    d.end(dist.reduce(tensor, group_dst=d.root, op=d.op, group=d.group, async_op=d.asynchronous))
    return [(tensor, d.reduced() if d.rank == d.root else d.given(d.rank))]


def broadcast(d: Draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tensor = d.place(d.given(d.rank))
    d.end(dist.broadcast(tensor, group_src=d.root, group=d.group, async_op=d.asynchronous))
    return [(tensor, d.given(d.root))]


def all_gather(d: Draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    counts = [d.count // (1 + r) if d.uneven else d.count for r in range(d.size)]
    outputs = [d.empty(n) for n in counts]
    own = d.place(d.given(d.rank, count=counts[d.rank]))
    d.end(dist.all_gather(outputs, own, d.group, d.asynchronous))
    return [(out, d.given(r, count=counts[r])) for r, out in enumerate(outputs)]


def reduce_scatter(d: Draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    output = d.empty()
    inputs = [d.place(d.given(d.rank, part)) for part in range(d.size)]
    d.end(dist.reduce_scatter(output, inputs, d.op, d.group, d.asynchronous))
    return [(output, d.reduced(d.rank))]


def all_to_all(d: Draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    def between(a: int, b: int) -> int:
        return d.count * ((a + 2 * b) % 3) // 3

    outputs = [d.empty(between(r, d.rank)) for r in range(d.size)]
    inputs = [d.place(d.given(d.rank, part, between(d.rank, part))) for part in range(d.size)]
    d.end(dist.all_to_all(outputs, inputs, d.group, d.asynchronous))
    return [(out, d.given(r, d.rank, between(r, d.rank))) for r, out in enumerate(outputs)]


def gather(d: Draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    outputs = [d.empty() for _ in range(d.size)] if d.rank == d.root else None
    own = d.place(d.given(d.rank))
    d.end(dist.gather(own, outputs, group_dst=d.root, group=d.group, async_op=d.asynchronous))
    return [(out, d.given(r)) for r, out in enumerate(outputs or [])]


def scatter(d: Draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    output = d.empty()
    inputs = [d.place(d.given(d.root, part)) for part in range(d.size)] if d.rank == d.root else None
    d.end(dist.scatter(output, inputs, group_src=d.root, group=d.group, async_op=d.asynchronous))
    return [(output, d.given(d.root, d.rank))]


def messages(d: Draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if d.size == 1:
        return []
    before, following = (d.rank - 1) % d.size, (d.rank + 1) % d.size
    output, own = d.empty(), d.place(d.given(d.rank))
    requests = [
        dist.isend(own, group_dst=following, group=d.group, tag=d.seed % 100),
        dist.irecv(output, group_src=before, group=d.group, tag=d.seed % 100),
    ]
    for request in requests:
        d.end(request)
    return [(output, d.given(before))]


OPERATIONS: tuple[Callable[[Draw], list[tuple[torch.Tensor, torch.Tensor]]], ...] = (
    *(all_reduce, inference_all_reduce, symmetric, reduce, broadcast, all_gather),
    *(reduce_scatter, all_to_all, gather, scatter, messages),
)


def worker(seconds: float, seed: int) -> None:
    from anyaccel import comm

    torch.set_num_threads(1)
    comm.init_distributed("shm")
    me, world = dist.get_rank(), dist.get_world_size()
    memberships = [list(range(world)), list(range(0, world, 2)), list(range(1, world)), list(range(world))]
    groups = [comm.new_group(members, backend="shm") for members in memberships]
    order = random.Random(seed)
    done: Counter[str] = Counter()
    end = time.monotonic() + seconds
    going = torch.ones(1)
    while going.item():
        for _ in range(50):
            which = order.randrange(len(groups))
            operation = order.choice(OPERATIONS)
            draw = Draw(order, memberships[which], groups[which], me)
            if draw.rank < 0:
                continue
            for got, want in operation(draw):
                if not torch.equal(got, want):
                    raise SystemExit(
                        f"rank {me}: {operation.__name__} of {draw.count} {draw.dtype}, {draw.op}, root {draw.root}, "
                        f"strided {draw.strided}, asynchronous {draw.asynchronous}, group {memberships[which]}: "
                        f"{int((got != want).sum())} of {got.numel()} elements differ (seed {seed}, after {done})"
                    )
            done[operation.__name__] += 1
        going.fill_(float(time.monotonic() < end))
        dist.broadcast(going, 0)
    if me == 0:
        print(f"{done.total()} collectives of rank 0 were right: {dict(sorted(done.items()))}")
    dist.barrier()
    comm.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="printed; gives the same run again")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.seconds, options.seed)
        return 0
    from anyaccel import launch

    print(f"{options.ranks} ranks, {options.seconds:g} s, seed {options.seed}", flush=True)
    wanted = launch.LaunchOptions(script=__file__, num_accelerators=options.ranks)
    command = [sys.executable, __file__, "--worker", "--seconds", str(options.seconds), "--seed", str(options.seed)]
    before = {path.name for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").exists() else set()
    code = launch.launch_local(launch.make_plan(wanted), command)
    if Path("/dev/shm").exists():
        left = {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("anyaccel")} - before
        if left:
            print(f"left in /dev/shm: {sorted(left)}")
            return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
