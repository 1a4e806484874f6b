# SPDX-License-Identifier: Apache-2.0
"""Our optimizers on parameters that FSDP2 or tensor parallelism has divided among ranks: as on whole ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ranks
from anyaccel.ops.adagrad import CPUAdagrad
from anyaccel.ops.adam import CPUAdam, FusedAdam
from anyaccel.ops.lion import CPULion

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "CPUAdam": lambda params: CPUAdam(params, lr=1e-2, weight_decay=0.1),
    "CPUAdam, master weights": lambda params: CPUAdam(params, lr=1e-2, master_weights=True),
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2),
    "CPUAdagrad": lambda params: CPUAdagrad(params, lr=1e-2),
    "CPULion": lambda params: CPULion(params, lr=1e-3),
    "torch's AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
}


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Seven rows and one row: the ranks' parts differ, and one of them is empty."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1)).to(dtype)


def sharded(net: nn.Sequential) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def divided(net: nn.Sequential) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)) if net[0].out_features == 7 else net
    return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def step(net: nn.Module, optimizer: torch.optim.Optimizer, number: int, all_ranks: bool) -> None:
    torch.manual_seed(number)
    x = torch.randn(4 * dist.get_world_size(), 6, dtype=next(net.parameters()).dtype)
    own = x if all_ranks else x.chunk(dist.get_world_size())[dist.get_rank()]
    net(own).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(net: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in net.parameters()]


def compare(name: str) -> None:
    dtype = torch.bfloat16 if "master" in name else torch.float32
    plain, parts = model(dtype), sharded(model(dtype))
    ours, theirs = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](parts.parameters())
    for number in range(6):
        step(plain, ours, number, all_ranks=True)
        step(parts, theirs, number, all_ranks=False)
        close = {"rtol": 2e-2, "atol": 2e-3} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        for found, expected in zip(whole(parts), whole(plain), strict=True):
            torch.testing.assert_close(found, expected, **close)
    for state in theirs.state.values():
        assert isinstance(state.get("exp_avg", state.get("sum")), DTensor)  # as torch's own, for checkpoints


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_by_fsdp2(name: str) -> None:
    ranks.run(compare, 2, name)


def tensor_parallel() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    torch.manual_seed(0)
    parts = divided(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    ours, theirs = CPUAdam(plain.parameters(), lr=1e-2), CPUAdam(parts.parameters(), lr=1e-2)
    for number in range(4):
        step(plain, ours, number, all_ranks=True)
        step(parts, theirs, number, all_ranks=True)
    for found, expected in zip(whole(parts), whole(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_divided_by_tensor_parallelism() -> None:
    ranks.run(tensor_parallel, 2)


def checkpoints(full: bool) -> None:
    options = StateDictOptions(full_state_dict=full)
    first = sharded(model())
    optimizer = CPUAdam(first.parameters(), lr=1e-2)
    for number in range(3):
        step(first, optimizer, number, all_ranks=False)
    saved: Any = get_optimizer_state_dict(first, optimizer, options=options)
    second = sharded(model())
    second.load_state_dict(first.state_dict())
    again = CPUAdam(second.parameters(), lr=1e-2)
    set_optimizer_state_dict(second, again, saved, options=options)
    for number in range(3, 6):
        step(first, optimizer, number, all_ranks=False)
        step(second, again, number, all_ranks=False)
    for found, expected in zip(whole(second), whole(first), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("full", [False, True])
def test_states_are_saved_and_loaded_as_torchs(full: bool) -> None:
    ranks.run(checkpoints, 2, full)


def otherwise_placed() -> None:
    net = sharded(model())
    reference = model()
    optimizer, plain = CPUAdam(net.parameters()), CPUAdam(reference.parameters())
    for param, whole_one in zip(net.parameters(), reference.parameters(), strict=True):
        torch.manual_seed(param.numel())
        whole_one.grad = torch.randn(whole_one.shape)
        # A gradient that is whole on every rank: the optimizer takes its part.
        param.grad = DTensor.from_local(whole_one.grad.clone(), param.device_mesh, [Replicate()])
    optimizer.step()
    plain.step()
    for found, expected in zip(whole(net), whole(reference), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_gradient_that_is_divided_in_another_way() -> None:
    ranks.run(otherwise_placed, 2)
