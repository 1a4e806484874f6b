# SPDX-License-Identifier: Apache-2.0
"""Which tensors collectives take beside dense ones: those of torch that wrap others are unwrapped or refused; sparse
ones are summed. On one host, on several that are pretended, and with oneCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ranks
from anyaccel import comm, errors
from anyaccel.comm import shm
from collective_cases import oneccl_folder


class Wrapped(torch.Tensor):
    """Looks like a tensor and has no memory."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


class Named(torch.Tensor):
    """A tensor by another name, with memory of its own."""


def _operations(world: int, group: Any) -> dict[str, Callable[[torch.Tensor], object]]:
    def room() -> list[torch.Tensor]:
        return [torch.zeros(4) for _ in range(world)]

    return {
        "all_reduce": lambda t: dist.all_reduce(t, group=group),
        "asynchronous": lambda t: dist.all_reduce(t, group=group, async_op=True).wait(),
        "all_reduce_coalesced": lambda t: group.allreduce_coalesced([t]).wait(),
        "broadcast": lambda t: dist.broadcast(t, 0, group=group),
        "reduce": lambda t: dist.reduce(t, 0, group=group),
        "all_gather": lambda t: dist.all_gather(room(), t, group=group),
        "all_gather into": lambda t: dist.all_gather([t, *room()[1:]], torch.ones(4), group=group),
        "all_gather_into_tensor": lambda t: dist.all_gather_into_tensor(torch.empty(4 * world), t, group=group),
        "reduce_scatter": lambda t: dist.reduce_scatter(t, room(), group=group),
        "reduce_scatter_tensor": lambda t: dist.reduce_scatter_tensor(t, torch.ones(4 * world), group=group),
        "all_to_all": lambda t: dist.all_to_all(room(), [t, *room()[1:]], group=group),
        "all_to_all_single": lambda t: dist.all_to_all_single(torch.empty(4), t, group=group),
        "gather": lambda t: dist.gather(t, room() if dist.get_rank() == 0 else None, dst=0, group=group),
        "scatter": lambda t: dist.scatter(t, room() if dist.get_rank() == 0 else None, src=0, group=group),
        "send": lambda t: dist.isend(t, (dist.get_rank() + 1) % world, group=group),
        "recv": lambda t: dist.irecv(t, (dist.get_rank() + 1) % world, group=group),
        "inference_all_reduce": lambda t: comm.inference_all_reduce(t, group=group),
    }


def wrapped(backend: str, hosts: tuple[int, ...]) -> None:
    shm.host_identity = lambda: f"host {hosts[dist.get_rank()]}"
    group = comm.new_group(backend=backend)
    rank, world = group.rank(), group.size()
    mesh = init_device_mesh("cpu", (world,))
    with FakeTensorMode():
        fake = torch.ones(4)
    refused = {
        "FakeTensor": fake,
        "DTensor": DTensor.from_local(torch.ones(4), mesh, [Shard(0)]),
        "Wrapped": Wrapped(torch.ones(4)),
        "meta": torch.ones(4, device="meta"),
        "sparse_csr": torch.eye(2).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(2)]),
        "quantised": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        "zero tensor": torch._efficientzerotensor(4),
    }
    operations = _operations(world, group)
    for word, tensor in refused.items():
        for name, operation in operations.items():
            try:
                operation(tensor)
            except (errors.UsageError, RuntimeError, TypeError, ValueError) as error:
                # Some calls end in torch already.
                assert not isinstance(error, errors.UsageError) or word in str(error) or "elements" in str(error), (
                    word,
                    name,
                    error,
                )
            else:
                raise AssertionError(f"{name} took a {word}")
    for word in ("FakeTensor", "DTensor", "Wrapped"):
        with pytest.raises(errors.UsageError, match=word):
            dist.all_reduce(refused[word], group=group)
    # One that is under way is waited for, and written; one by another name is what it is.
    under_way = functional.all_reduce(torch.ones(4), "sum", group)
    assert isinstance(under_way, functional.AsyncCollectiveTensor)
    dist.all_reduce(under_way, group=group)
    assert under_way.tolist() == [world * world] * 4
    gathered = [torch.empty(4) for _ in range(world)]
    dist.all_gather(gathered, functional.all_reduce(torch.full((4,), 1.0 + rank), "sum", group), group=group)
    assert torch.stack(gathered).tolist() == [[sum(range(world + 1))] * 4] * world
    named = torch.ones(4).as_subclass(Named)
    dist.all_reduce(named, group=group)
    assert isinstance(named, Named)
    assert named.tolist() == [world] * 4
    # The way from a DTensor that ended in a crash.
    local = DTensor.from_local(torch.full((2,), float(rank)), mesh, [Shard(0)])
    whole = local.redistribute(placements=[torch.distributed.tensor.Replicate()], async_op=True).to_local()
    dist.all_reduce(whole, group=group)
    assert whole.tolist() == [float(world * r) for r in range(world) for _ in range(2)]


def sparse_sums(backend: str, hosts: tuple[int, ...]) -> None:
    shm.host_identity = lambda: f"host {hosts[dist.get_rank()]}"
    group = comm.new_group(backend=backend)
    rank, world = group.rank(), group.size()
    # Ranks have other numbers of values, one of them twice, one rank none.
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for asynchronous in (False, True):
            rows = [rank, rank, 4][: 3 * rank]
            tensor = torch.sparse_coo_tensor([rows], torch.ones(len(rows), 2).to(dtype), (5, 2))
            dense = [
                torch.sparse_coo_tensor([r_rows], torch.ones(len(r_rows), 2).to(dtype), (5, 2)).to_dense()
                for r_rows in ([r, r, 4][: 3 * r] for r in range(world))
            ]
            work = dist.all_reduce(tensor, group=group, async_op=asynchronous)
            if work is not None:
                assert work.wait()
                assert work.get_future().wait()[0] is tensor
            assert tensor.is_coalesced()
            torch.testing.assert_close(tensor.to_dense(), sum(dense[1:], dense[0]))
    average = torch.eye(3).to_sparse()
    dist.all_reduce(average, op=dist.ReduceOp.AVG, group=group)
    torch.testing.assert_close(average.to_dense(), torch.eye(3))
    with pytest.raises(errors.UsageError, match="not MAX"):
        dist.all_reduce(torch.eye(3).to_sparse(), op=dist.ReduceOp.MAX, group=group)
    for operation in (lambda t: dist.broadcast(t, 0, group=group), lambda t: dist.reduce(t, 0, group=group)):
        with pytest.raises(errors.UsageError, match="only all_reduce"):
            operation(torch.eye(3).to_sparse())
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Embedding(10, 3, sparse=True), process_group=group)
    model(torch.tensor([rank, 5])).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    wanted = torch.zeros(10, 3)
    wanted[:world] = 1 / world
    wanted[5] = 1
    torch.testing.assert_close(gradient.to_dense(), wanted)
    # The shapes differ: all are told, and the group works on.
    with pytest.raises(errors.UsageError, match=r"\[3, 3\].*rank"):
        dist.all_reduce(torch.eye(3).to_sparse(1 if rank else 2), group=group)
    ones = torch.ones(3)
    dist.all_reduce(ones, group=group)
    assert ones.tolist() == [world] * 3


_WHERE = [("shm", (0, 0)), ("shm", (0, 1, 0)), ("ccl", (0, 0))]


def _oneccl(backend: str) -> dict[str, str]:
    if backend != "ccl":
        return {}
    folder = oneccl_folder()
    if folder is None:
        pytest.skip("no oneCCL: tools/install_test_tools.sh brings it")
    return {"CCL_ROOT": str(folder)}


@pytest.mark.parametrize(("backend", "hosts"), _WHERE, ids=str)
def test_tensors_around_others_are_unwrapped_or_refused(backend: str, hosts: tuple[int, ...]) -> None:
    ranks.run(wrapped, len(hosts), backend, hosts, **_oneccl(backend))


@pytest.mark.parametrize(("backend", "hosts"), _WHERE, ids=str)
def test_sparse_sums(backend: str, hosts: tuple[int, ...]) -> None:
    ranks.run(sparse_sums, len(hosts), backend, hosts, **_oneccl(backend))
