# SPDX-License-Identifier: Apache-2.0
"""Small trainings with DDP, FSDP2, DTensor and a checkpoint: the same losses over each backend as over gloo."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ranks
from anyaccel.comm import ccl
from collective_cases import oneccl_folder

STEPS = 4
WAYS = ("ddp", "ddp_uneven", "fsdp2", "tensor_parallel", "checkpoint")


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [(torch.randn(12, 16, generator=generator), torch.randn(12, 8, generator=generator)) for _ in range(STEPS)]


def train(net: nn.Module, rank: int, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """The losses of this rank's batches."""
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for source, wanted in batches(rank):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(source), wanted)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def ddp(group: dist.ProcessGroup, backend: str) -> list[float]:
    # Small buckets: several all-reduces under way at once.
    net = nn.parallel.DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.005)
    return train(net, dist.get_rank())


def ddp_uneven(group: dist.ProcessGroup, backend: str) -> list[float]:
    """Buffers that are broadcast, gradients accumulated without synchronising."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))
    wrapped = nn.parallel.DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for number, (source, wanted) in enumerate(batches(dist.get_rank())):
        if number % 2 == 0:
            with wrapped.no_sync():
                nn.functional.mse_loss(wrapped(source), wanted).backward()
            continue
        loss = nn.functional.mse_loss(wrapped(source), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return [*losses, float(net[1].running_mean.sum())]


def _sharded(backend: str) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def fsdp2(group: dist.ProcessGroup, backend: str) -> list[float]:
    return train(_sharded(backend), dist.get_rank())


def tensor_parallel(group: dist.ProcessGroup, backend: str) -> list[float]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(net, 0)  # every rank has the same batch


def saved(group: dist.ProcessGroup, backend: str) -> list[float]:
    """Trained, saved from shards, loaded into another model, trained on."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    first = _sharded(backend)
    losses = train(first, dist.get_rank())
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    checkpoint.save(get_model_state_dict(first), checkpoint_id=folder[0])
    torch.manual_seed(2)
    second = _sharded(backend)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    state = get_model_state_dict(second)
    checkpoint.load(state, checkpoint_id=folder[0])
    set_model_state_dict(second, state)
    losses += train(second, dist.get_rank())
    dist.barrier()
    if dist.get_rank() == 0:
        for file in sorted(Path(folder[0]).rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        Path(folder[0]).rmdir()
    return losses


def all_ways(backend: str, ways: tuple[str, ...]) -> dict[str, list[float]]:
    """This rank's losses; the default group is one of `backend`, as a user has it."""
    functions = {
        "ddp": ddp, "ddp_uneven": ddp_uneven, "fsdp2": fsdp2, "tensor_parallel": tensor_parallel, "checkpoint": saved,
    }  # fmt: skip
    group = dist.group.WORLD
    assert group is not None
    assert dist.get_backend() == backend
    return {way: functions[way](group, backend) for way in ways}


@functools.cache
def losses(backend: str, world_size: int, ways: tuple[str, ...]) -> list[dict[str, list[float]]]:
    return ranks.run(all_ways, world_size, backend, ways, timeout=200, TEST_BACKEND=backend)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["shm", "ccl"])
def test_the_same_losses_as_over_gloo(backend: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "ccl":
        if folder := oneccl_folder():
            monkeypatch.setenv("CCL_ROOT", str(folder))
        if why := ccl.why_not():
            pytest.skip(why)
    wanted, found = losses("gloo", world_size, WAYS), losses(backend, world_size, WAYS)
    for rank in range(world_size):
        for way in WAYS:
            torch.testing.assert_close(
                torch.tensor(found[rank][way]),
                torch.tensor(wanted[rank][way]),
                rtol=1e-4,
                atol=1e-5,
                msg=lambda text, rank=rank, way=way: f"{way} on rank {rank}: {text}",
            )
    assert len(wanted[0]["checkpoint"]) == 2 * STEPS
    assert wanted[0]["checkpoint"][STEPS] < wanted[0]["checkpoint"][0]  # the second time over the same batch
