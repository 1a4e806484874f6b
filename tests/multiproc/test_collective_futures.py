# SPDX-License-Identifier: Apache-2.0
"""Work that is followed through its future, or through torch's registry of tensors under way."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._C import _distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ranks
from anyaccel import comm
from anyaccel.comm import shm


def model_gradients(group: Any, hook: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(40, 40) for _ in range(6)])
    # Many buckets: several callbacks are under way at once.
    model = DistributedDataParallel(layers, process_group=group, bucket_cap_mb=0.005)
    if hook == "power":
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "fp16":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    elif hook == "mean":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    elif hook == "python fp16":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    for step in range(4):
        model.zero_grad()
        torch.manual_seed(100 * group.rank() + step)
        model(torch.randn(8, 40)).square().mean().backward()
    return [parameter.grad.clone() for parameter in layers.parameters() if parameter.grad is not None]


def hooks(hosts: tuple[int, ...]) -> None:
    shm.host_identity = lambda: f"host {hosts[dist.get_rank()]}"
    group = comm.new_group(backend="shm")
    wanted = model_gradients(group, "")
    for hook, tolerance in (("mean", 1e-6), ("fp16", 1e-3), ("python fp16", 1e-3)):
        for found, exact in zip(model_gradients(group, hook), wanted, strict=True):
            torch.testing.assert_close(found, exact, rtol=0.05, atol=tolerance)
    # What is compressed is another gradient, but the same on all ranks.
    for found in model_gradients(group, "power"):
        first = found.clone()
        dist.broadcast(first, 0, group=group)
        assert torch.equal(found, first)


@pytest.mark.parametrize("hosts", [(0, 0), (0, 0, 1)], ids=str)
def test_hooks_of_distributed_data_parallel(hosts: tuple[int, ...]) -> None:
    ranks.run(hooks, len(hosts), hosts)


def callbacks() -> None:
    group = comm.new_group(backend="shm")
    rank, world = group.rank(), group.size()
    # A callback waits for an asynchronous collective of the same group, whose callback does too, with others behind it.
    inner = [torch.ones(5) for _ in range(3)]

    def again(level: int) -> Any:
        work = dist.all_reduce(inner[level], group=group, async_op=True)
        future = work.get_future()
        if level + 1 < len(inner):
            future = future.then(lambda _: again(level + 1))
        return future.wait()

    for _ in range(10):
        for tensor in inner:
            tensor.fill_(1)
        before = torch.full((100,), float(rank))
        chain = dist.all_reduce(before, group=group, async_op=True).get_future().then(lambda _: again(0))
        behind = [torch.ones(50) for _ in range(5)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in behind]
        last = torch.ones(3)
        dist.all_reduce(last, group=group)
        chain.wait()
        for work in works:
            work.wait()
        assert all(bool((tensor == world).all()) for tensor in (*inner, *behind, last))
    # What fails in a callback is told to who follows it, and the group works on.
    ones = torch.ones(2)
    failing = dist.all_reduce(ones, group=group, async_op=True).get_future().then(lambda _: 1 / 0)
    with pytest.raises(RuntimeError, match="division by zero"):
        failing.wait()
    dist.all_reduce(ones, group=group)
    assert ones.tolist() == [world * world] * 2
    # Halves, whose futures are torch's own, give their tensors, to whoever asks before or after the end.
    for wait_first in (True, False):
        half = torch.ones(2, dtype=torch.float16)
        work = dist.all_reduce(half, group=group, async_op=True)
        if wait_first:
            work.wait()
        assert work.get_future().wait()[0].tolist() == [world] * 2


def test_a_callback_waits_for_the_same_group() -> None:
    ranks.run(callbacks, 3)


def under_way() -> None:
    group = comm.new_group(backend="shm")
    rank, world = group.rank(), group.size()
    with functional.allow_inflight_collective_as_graph_input_ctx():
        for turn in range(50):
            tensor = torch.full((1000,), float(turn))
            if rank == 0:
                time.sleep(0.002)  # the others have to wait
            dist.all_reduce(tensor, group=group, async_op=True)
            assert bool((functional.wait_tensor(tensor) == turn * world).all()), turn
        gathered = torch.empty(world)
        dist.all_gather_single(gathered, torch.full((1,), float(rank)), group=group, async_op=True)
        assert functional.wait_tensor(gathered).tolist() == list(range(world))
        assert _distributed_c10d._get_work_registry_size() == 0


def test_what_is_under_way_is_waited_for_by_its_tensor() -> None:
    ranks.run(under_way, 2)
