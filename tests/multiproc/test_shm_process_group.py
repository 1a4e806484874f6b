# SPDX-License-Identifier: Apache-2.0
"""What the `shm` backend is to torch beside its results: work objects, order, names, groups that come and go."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ranks
from anyaccel import comm, errors, get_accelerator
from anyaccel.comm import backends, hierarchy, shm
from waiting import settled


def work_objects() -> None:
    group = comm.new_group(backend="shm")
    rank, world = group.rank(), group.size()
    total = float(sum(range(world)))
    # Asynchronous operations are done in the order in which they were asked for, also before a synchronous one.
    tensor = torch.full((1000,), float(rank))
    works = [dist.all_reduce(tensor, group=group, async_op=True) for _ in range(20)]
    dist.all_reduce(tensor, group=group)
    assert all(work.is_completed() and work.is_success() for work in works)
    assert bool((tensor == total * float(world) ** 20).all())
    comm.inference_all_reduce(tensor.fill_(1), group=group)
    assert bool((tensor == world).all())
    # A future gives the tensors, also to callbacks, whether it is asked for before or after the end.
    for wait_first in (False, True):
        tensor.fill_(rank)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        if wait_first:
            assert work.wait()
        future = work.get_future().then(lambda done: done.value()[0] * 2)
        assert bool((future.wait() == 2 * total).all())
        assert work.result()[0] is tensor
    # A callback may call a collective, although others are queued behind it.
    first = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    assert first is not None
    inside = torch.ones(4)
    chained = first.get_future().then(lambda _: dist.all_reduce(inside, group=group))
    chained.wait()
    assert bool((inside == world).all())
    # An asynchronous operation does not hold the caller.
    work = None
    if rank == 0:
        work = dist.barrier(group, async_op=True)
        assert not work.is_completed()
        with pytest.raises(errors.CommTimeoutError):
            work.wait(timedelta(seconds=0.05))
    dist.barrier()  # of another group: rank 0 gets here
    if rank != 0:
        dist.barrier(group)
    else:
        assert work is not None
        work.wait()


def test_work_objects() -> None:
    ranks.run(work_objects, 3)


def everything_of_torch() -> None:
    group = comm.new_group(backend="shm", timeout=timedelta(seconds=60))
    rank, world = group.rank(), group.size()
    assert dist.get_backend(group) == "shm"
    assert group.name() == "shm"
    names: list[object] = [None] * world
    dist.all_gather_object(names, group.group_name)
    assert names == [group.group_name] * world != [""] * world
    assert group._get_backend(torch.device("cpu")).group_name == group.group_name
    assert dist.distributed_c10d._get_process_group_uid(group) == -1  # torch asks for a backend of CUDA
    group.set_timeout(timedelta(seconds=77))
    options = group._get_backend(torch.device("cpu")).options
    assert (options.backend, options._timeout, options.group_name) == ("shm", timedelta(seconds=77), group.group_name)
    gathered: list[object] = [None] * world
    dist.all_gather_object(gathered, {"rank": rank}, group=group)
    assert gathered == [{"rank": r} for r in range(world)]
    objects = ["from the last", rank] if rank == world - 1 else [None, None]
    dist.broadcast_object_list(objects, src=world - 1, group=group)
    assert objects == ["from the last", world - 1]
    with dist._coalescing_manager(group=group):  # type: ignore[attr-defined]
        several = [torch.full((n,), float(rank)) for n in (1, 5, 0)]
        for tensor in several:
            dist.all_reduce(tensor, group=group)
    assert all(bool((tensor == sum(range(world))).all()) for tensor in several)
    # Through torch's C++ side.
    ones = functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", group))
    assert ones.tolist() == [world] * 3
    rows = functional.wait_tensor(functional.all_gather_tensor(torch.full((2,), float(rank)), 0, group))
    assert rows.tolist() == [float(r) for r in range(world) for _ in range(2)]
    part = functional.wait_tensor(functional.reduce_scatter_tensor(torch.ones(2 * world), "avg", 0, group))
    assert part.tolist() == [1, 1]
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(7, 3), process_group=group)
    model(torch.full((2, 7), float(rank))).sum().backward()
    weight = model.module.weight.grad
    assert weight is not None
    torch.testing.assert_close(weight, torch.full((3, 7), 2.0 * sum(range(world)) / world))
    # The short forms that pybind knows.
    group.allreduce(ones).wait()
    group.broadcast(ones, 0).wait()
    assert ones.tolist() == [world * world] * 3


def test_everything_of_torch_that_asks_a_group() -> None:
    ranks.run(everything_of_torch, 2)


def refused() -> None:
    group = comm.new_group(backend="shm")
    for dtype, op in (
        (torch.float32, dist.ReduceOp.BAND),
        (torch.bool, dist.ReduceOp.AVG),
        (torch.complex64, dist.ReduceOp.MAX),
    ):
        with pytest.raises(errors.UsageError, match="no reduction"):
            comm.inference_all_reduce(torch.ones(3).to(dtype), op=op, group=group)
    premultiplied = dist._make_nccl_premul_sum(2.0)
    with pytest.raises(errors.UsageError, match="PREMUL_SUM"):
        dist.all_reduce(torch.ones(3), op=premultiplied, group=group)
    with pytest.raises(errors.UsageError, match="meta"):
        dist.all_reduce(torch.ones(3, device="meta"), group=group)
    with pytest.raises(errors.UsageError, match="sparse"):
        dist.broadcast(torch.eye(3).to_sparse(), 0, group=group)
    with pytest.raises(errors.UsageError, match="room for 4"):
        dist.all_gather([torch.empty(4), torch.empty(4)], torch.empty(3), group=group)
    with pytest.raises(errors.UsageError, match="2 times as many"):
        dist.all_gather_into_tensor(torch.empty(7), torch.empty(3), group=group)
    with pytest.raises(errors.UsageError, match="cannot be split"):
        dist.all_to_all_single(torch.empty(3), torch.empty(3), group=group)
    # None of this has harmed the group.
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2, 2, 2]
    # What FSDP2 asks for where gradients are not to be divided is a sum.
    dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(1.0), group=group)
    assert tensor.tolist() == [4, 4, 4]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_it_cannot_do_is_refused() -> None:
    ranks.run(refused, 2)


def many_groups(number: int) -> tuple[int, int, int]:
    def counts() -> tuple[int, int, int]:
        maps = sum("anyaccel-" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return len(list(Path("/proc/self/fd").iterdir())), maps, threading.active_count()

    def use(group: dist.ProcessGroup) -> None:
        tensor = torch.ones(10)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        comm.inference_all_reduce(tensor, group=group)
        dist.barrier(group)
        comm.destroy_process_group(group)

    # The first ones start what stays: the watch on the peer.
    keep = comm.new_group(backend="shm")
    dist.barrier(keep)
    before = counts()
    for _ in range(number):
        use(comm.new_group(backend="shm"))
    after = settled(counts, before)  # what ends in other threads gets a moment
    assert after == before, (before, after)
    return after


@pytest.mark.parametrize("number", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_thousand_groups_leave_nothing_behind(number: int) -> None:
    ranks.run(many_groups, 2, number, timeout=280)


def several_at_once() -> None:
    world = comm.get_world_size()
    rank = comm.get_rank()
    memberships = [[0, 1], [1, 2, 3], [0, 2], [0, 1, 2, 3]]
    groups = [comm.new_group(members, backend="shm") for members in memberships]
    wanted, works = [], []
    for turn in range(30):
        for group, members in zip(groups, memberships, strict=True):
            if rank in members:
                tensor = torch.full((1 + 500 * turn,), float(rank + turn))
                works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor))
                wanted.append(float(sum(members) + turn * len(members)))
    for (work, tensor), value in zip(works, wanted, strict=True):
        work.wait()
        assert bool((tensor == value).all())
    assert world == 4


def test_several_groups_at_once() -> None:
    ranks.run(several_at_once, 4)


def backend_by_default() -> str:
    comm.destroy_process_group()
    os.environ["MASTER_PORT"] = os.environ["OTHER_PORT"]
    comm.init_distributed()
    return str(dist.get_backend())


def test_the_fastest_backend_is_the_default() -> None:
    assert ranks.run(backend_by_default, 2, OTHER_PORT=str(ranks.free_port())) == ["shm", "shm"]


def without_memory() -> str:
    comm.destroy_process_group()
    os.environ["MASTER_PORT"] = os.environ["OTHER_PORT"]
    os.environ["ANYACCEL_SHM_BYTES"] = str(1 << 60)
    comm.init_distributed()
    tensor = torch.ones(3)
    comm.inference_all_reduce(tensor)
    assert tensor.tolist() == [2, 2, 2]
    with pytest.raises(errors.CommError, match="cannot share memory"):
        comm.new_group(backend="shm")
    return str(dist.get_backend())


def test_gloo_is_what_is_left_when_memory_cannot_be_shared() -> None:
    assert ranks.run(without_memory, 2, OTHER_PORT=str(ranks.free_port())) == ["gloo", "gloo"]


@pytest.mark.parametrize("size", [1, 2, 8, 64, 1024])
def test_memory_of_a_group_is_what_it_may_be(size: int) -> None:
    total = 8 << 20
    buffer, mailboxes = shm.sizes(size, total)
    assert buffer % 64 == 0
    assert buffer >= 64 * size
    used = size * (3 * buffer + mailboxes)
    if size <= 64:
        assert used <= total  # of the 64 MB that a container has


# DeepSpeed's op ---------------------------------------------------------------------------------------------


def loads_the_op(through_torch: bool) -> bool:
    """As DeepSpeed's communication does after init_process_group, or as code that has nothing but the op."""
    if not through_torch:
        comm.destroy_process_group()
        os.environ["MASTER_PORT"] = os.environ["OTHER_PORT"]
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    assert builder.is_compatible() and builder.status().kind == "prebuilt"
    op, rank, size = builder.load(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert op is builder.jit_load()
    tensor = torch.full((1000,), float(rank + 1), dtype=torch.bfloat16)
    with pytest.raises(errors.UsageError, match="call initialize"):
        torch.ops.deepspeed.inference_all_reduce_(tensor)
    with pytest.raises(errors.UsageError, match="the rank must be from 0"):
        op.initialize(size, size)
    if through_torch:
        with pytest.raises(errors.UsageError, match=f"has rank {rank} of {size}"):
            op.initialize(size + 1, rank)
    op.initialize(size, rank)
    op.initialize(size, rank)
    expected = torch.full_like(tensor, size * (size + 1) / 2)
    assert torch.equal(torch.ops.deepspeed.inference_all_reduce(tensor), expected)
    assert tensor[0] == rank + 1
    assert torch.ops.deepspeed.inference_all_reduce_(tensor) is tensor and torch.equal(tensor, expected)
    columns = torch.ones(6, 4, dtype=torch.float64).t()
    torch.ops.deepspeed.inference_all_reduce_(columns)
    assert bool((columns == size).all())
    assert torch.ops.deepspeed.inference_all_reduce(torch.empty(3, device="meta")).shape == (3,)
    if through_torch:
        return True
    assert not dist.is_initialized()
    os.environ["MASTER_PORT"] = os.environ["LAST_PORT"]
    comm.init_distributed()  # for the end of the ranks
    return False


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("through_torch", [True, False])
def test_the_op_of_shared_memory(through_torch: bool, size: int) -> None:
    found = ranks.run(
        loads_the_op, size, through_torch, OTHER_PORT=str(ranks.free_port()), LAST_PORT=str(ranks.free_port())
    )
    assert found == [through_torch] * size


def again() -> None:
    """Groups of one name on one store: of all ranks, of fewer, of several hosts, and after one that failed."""
    default = dist.distributed_c10d._get_default_store()
    store, rank, limit = dist.PrefixStore("one-name", default), dist.get_rank(), timedelta(seconds=60)
    kept = []
    for size, hosts in ((3, 1), (2, 1), (3, 2), (2, 2), (3, 2), (1, 1), (3, 1)):
        if rank >= size:
            continue
        shm.host_identity = lambda hosts=hosts: f"host {rank % hosts}"
        group = backends.create_shm(store, rank, size, limit)
        assert isinstance(group, hierarchy.HierarchicalGroup) == (hosts > 1)
        tensor = torch.full((10,), rank + 1.0)
        group.allreduce([tensor]).wait()
        assert tensor.tolist() == [sum(range(size + 1))] * 10
        if size == 2:
            group.shutdown()
        else:
            kept.append(group)


def test_a_store_that_has_seen_other_groups() -> None:
    ranks.run(again, 3)
