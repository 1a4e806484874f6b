# SPDX-License-Identifier: Apache-2.0
"""torch.compile around collectives and DistributedDataParallel, on each of our backends: as with gloo.

With TORCH_CHECKOUT=/sources/of/torch, of the installed version, torch's own tests of this run too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ranks
from anyaccel import comm
from anyaccel.comm import shm
from collective_cases import oneccl_folder

Call = Callable[[torch.Tensor], Any]


def mine(*values: float) -> torch.Tensor:
    return torch.tensor(values) * (dist.get_rank() + 1)


def _to_root(tensor: torch.Tensor) -> torch.Tensor:
    dist.reduce(tensor, 0)
    return tensor + 1 if dist.get_rank() == 0 else tensor.new_zeros(tensor.shape)  # what others have is undefined


def _gather(tensor: torch.Tensor) -> Any:
    into = [torch.empty_like(tensor) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(tensor, into)
    return into


def _scatter(tensor: torch.Tensor) -> torch.Tensor:
    parts = [tensor + rank for rank in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    into = torch.empty_like(tensor)
    dist.scatter(into, parts)
    return into * 2


def _all_gather(tensor: torch.Tensor) -> Any:
    into = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(into, tensor)
    return torch.cat(into) + 1


def _into_one(tensor: torch.Tensor) -> torch.Tensor:
    into = tensor.new_empty(dist.get_world_size() * tensor.numel())
    dist.all_gather_into_tensor(into, tensor)
    return into + 1


def _reduce_scatter(tensor: torch.Tensor) -> torch.Tensor:
    into = tensor.new_empty(2)
    dist.reduce_scatter_tensor(into, torch.cat([tensor[:2]] * dist.get_world_size()))
    return into + 1


def _all_to_all(tensor: torch.Tensor) -> torch.Tensor:
    given = torch.cat([tensor[:1] + rank for rank in range(dist.get_world_size())])
    into = torch.empty_like(given)
    dist.all_to_all_single(into, given)
    return into + 1


def _waits(tensor: torch.Tensor) -> torch.Tensor:
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    return tensor + 1


def _future(tensor: torch.Tensor) -> torch.Tensor:
    work = dist.all_reduce(tensor, async_op=True)
    return work.get_future().wait()[0] + 1


def _sends(tensor: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    elif dist.get_rank() == 1:
        dist.recv(tensor, 0)
    return tensor + 1


def _batch(tensor: torch.Tensor) -> torch.Tensor:
    rank, size, into = dist.get_rank(), dist.get_world_size(), torch.empty_like(tensor)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, tensor, (rank + 1) % size), dist.P2POp(dist.irecv, into, (rank - 1) % size)]
    )
    for work in works:
        work.wait()
    return into + 1


def _in_place(call: Call) -> Call:
    def run(tensor: torch.Tensor) -> torch.Tensor:
        call(tensor)
        return tensor + 1

    return run


CALLS: dict[str, Call] = {
    "all_reduce": _in_place(dist.all_reduce),
    "all_reduce, max": _in_place(lambda tensor: dist.all_reduce(tensor, dist.ReduceOp.MAX)),
    "all_reduce, asynchronous": _waits,
    "all_reduce, its future": _future,
    "broadcast": _in_place(lambda tensor: dist.broadcast(tensor, 0)),
    "reduce": _to_root,
    "gather": _gather,
    "scatter": _scatter,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _into_one,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "barrier": _in_place(lambda _: dist.barrier()),
    "send and recv": _sends,
    "batch_isend_irecv": _batch,
    "inference_all_reduce": _in_place(lambda tensor: comm.inference_all_reduce(tensor)),
    "inference_broadcast": _in_place(lambda tensor: comm.inference_broadcast(tensor)),
    "names": lambda tensor: tensor + len(dist.group.WORLD.group_name) + len(dist.group.WORLD.group_desc),  # type: ignore[union-attr]
    "sizes": lambda tensor: tensor * dist.get_world_size() + dist.group.WORLD.rank(),  # type: ignore[union-attr]
}


class Layers(nn.Module):
    """Several layers and a buffer that changes: more than one bucket, a broadcast in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 4096), nn.BatchNorm1d(4096), nn.ReLU(), nn.Linear(4096, 64))
        self.last = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(x))


def trained(optimize: bool) -> list[list[float]]:
    torch.manual_seed(0)
    torch._dynamo.config.optimize_ddp = optimize
    model = DistributedDataParallel(Layers(), bucket_cap_mb=1)  # type: ignore[arg-type]
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):  # the buckets are rebuilt before the second
        compiled(torch.randn(8, 64)).square().sum().mul(1e-3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.flatten()[:4].tolist() for value in [*model.parameters(), *model.buffers()]]


def results(backend: str, meeting: str) -> dict[str, Any]:
    dist.destroy_process_group()
    if backend == "hierarchy":
        rank = int(os.environ["RANK"])
        shm.host_identity = lambda: f"host {rank // 2}"
    options = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group(BACKENDS[backend], init_method=f"file://{meeting}", **options)
    found: dict[str, Any] = {}
    for name, call in CALLS.items():
        torch._dynamo.reset()
        value = torch.compile(call, backend="aot_eager")(mine(1, 2, 3, 4))
        found[name] = value.tolist() if isinstance(value, torch.Tensor) else value and [v.tolist() for v in value]
    for optimize in (False, True):
        torch._dynamo.reset()
        found[f"DDP, optimize_ddp={optimize}"] = trained(optimize)
    return found


BACKENDS = {"gloo": "gloo", "shm": "shm", "hierarchy": "shm", "ccl": "ccl"}
WORLD = 3  # two hosts in the hierarchy, one of them with two ranks


@pytest.fixture(scope="module")
def with_gloo(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(results, WORLD, "gloo", str(tmp_path_factory.mktemp("gloo") / "store"), timeout=300)


@pytest.mark.slow  # torch.compile takes half a minute
@pytest.mark.timeout(700)
@pytest.mark.parametrize("backend", ["shm", "hierarchy", "ccl"])
def test_compiled_as_with_gloo(backend: str, with_gloo: list[dict[str, Any]], tmp_path: Path) -> None:
    environment = {}
    if backend == "ccl":
        folder = oneccl_folder()
        if folder is None:
            pytest.skip("no oneCCL: tools/install_test_tools.sh brings it")
        environment["CCL_ROOT"] = str(folder)
    ours = ranks.run(results, WORLD, backend, str(tmp_path / "store"), timeout=300, **environment)
    for own, theirs in zip(ours, with_gloo, strict=True):
        assert own.keys() == theirs.keys()
        for name, value in own.items():
            torch.testing.assert_close(value, theirs[name], msg=lambda text, name=name: f"{name}: {text}")


TORCHS_OWN = [
    ("test_dynamo_distributed.py", "TestSingleProc"),
    ("test_dynamo_distributed.py", "TestMultiProc"),
    ("test_inductor_collectives.py", "TestCollectivesInductor"),
    ("test_inductor_collectives.py", "TestCollectivesMultiProc"),
]

# Tests that pass on gloo, and why each does not on a backend of ours.
REASONS = {("ccl", "test_dynamo_trace_allgather_coalesced"): "it reads the outputs of asynchronous operations at once"}


def outcomes(backend: str, file: Path, kind: str) -> dict[str, tuple[str, str]]:
    program = Path(__file__).with_name("torch_compile_test.py")
    done = subprocess.run(
        [sys.executable, str(program), backend, str(file), kind],
        env=os.environ | {"TEST_PORT": str(ranks.free_port()), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    lines = [line.split(" ", 3) for line in done.stdout.splitlines() if line.startswith("TEST ")]
    assert lines, done.stderr[-2000:]
    return {name: (outcome, why) for _, name, outcome, why in lines}


@pytest.mark.slow
@pytest.mark.timeout(7000)
@pytest.mark.parametrize(("file", "kind"), TORCHS_OWN)
@pytest.mark.parametrize("backend", ["shm", "hierarchy", "ccl"])
def test_what_passes_on_gloo_of_torchs_own_passes(backend: str, file: str, kind: str) -> None:
    pytest.importorskip("expecttest", reason="torch's tests need expecttest: pip install expecttest")
    if "TORCH_CHECKOUT" not in os.environ:
        pytest.skip("TORCH_CHECKOUT is not set: torch's wheel does not have these tests")
    if backend == "ccl" and oneccl_folder() is None:
        pytest.skip("no oneCCL: tools/install_test_tools.sh brings it")
    path = Path(os.environ["TORCH_CHECKOUT"]) / "test" / "distributed" / file
    gloo = {name for name, (outcome, _) in outcomes("gloo", path, kind).items() if outcome == "ok"}
    ours = outcomes(backend, path, kind)
    assert gloo  # they did run
    assert not {name: ours[name] for name in gloo if ours[name][0] != "ok" and (backend, name) not in REASONS}
