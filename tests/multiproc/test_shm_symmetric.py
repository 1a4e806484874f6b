# SPDX-License-Identifier: Apache-2.0
"""Tensors in shared memory, and all-reduces that copy nothing."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ranks
from anyaccel import _native, comm, errors
from anyaccel.comm import symmetric
from anyaccel.comm.api import _shared_memory_of


def mappings() -> int:
    return sum("anyaccel-" in line for line in Path("/proc/self/maps").read_text().splitlines())


def reduced_in_place(backend: str) -> None:
    group = comm.new_group(backend=backend)
    rank, world = group.rank(), group.size()
    total = sum(range(world))
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in (1, 17, 2048, 100_003):
            tensor = comm.symm_empty((count,), dtype, group)
            assert tensor.shape == (count,)
            assert tensor.dtype == dtype
            tensor.copy_(torch.arange(count) % 5 + rank)
            address = tensor.data_ptr()
            assert comm.inference_all_reduce(tensor, group=group) is tensor
            want = (torch.arange(count) % 5 * world + total).to(dtype)
            assert torch.equal(tensor, want)
            assert tensor.data_ptr() == address
            # A dense part, and an operation.
            tensor.fill_(rank)
            part = tensor[count // 3 :]
            comm.inference_all_reduce(part, comm.ReduceOp.MAX, group)
            assert bool((part == world - 1).all())
            assert bool((tensor[: count // 3] == rank).all())
    zeros = comm.symm_zeros((3, 5), group=group)
    assert zeros.dtype == torch.float32
    assert not zeros.any()
    with torch.no_grad():
        zeros += 1
    dist.all_reduce(zeros, group=group)
    assert bool((zeros == world).all())
    assert comm.symm_empty((0, 3), group=group).shape == (0, 3)
    assert comm.symm_empty(7, group=group).shape == (7,)


@pytest.mark.parametrize(("world_size", "backend"), [(1, "shm"), (2, "shm"), (3, "shm"), (2, "gloo")])
def test_sums_of_symmetric_tensors(world_size: int, backend: str) -> None:
    ranks.run(reduced_in_place, world_size, backend)


def mixed() -> None:
    """Symmetric on some ranks, ordinary on others, or at different places: the copying way, with the same result."""
    group = comm.new_group(backend="shm")
    rank, world = group.rank(), group.size()
    memory = comm.symm_zeros(200_000, group=group)
    for count in (10, 90_000):
        for tensor in (
            memory[:count] if rank == 0 else torch.empty(count),
            memory[rank * 100 : rank * 100 + count],
            memory[:count],
            torch.empty(count),
        ):
            for _ in range(3):
                tensor.fill_(rank + 1)
                comm.inference_all_reduce(tensor, group=group)
                assert bool((tensor == world * (world + 1) / 2).all())


def test_mixed_with_ordinary_tensors() -> None:
    ranks.run(mixed, 3)


def released() -> None:
    group = comm.new_group(backend="shm")
    comm.inference_all_reduce(torch.ones(4), group=group)
    before = mappings()
    tensor = comm.symm_zeros(10_000, group=group)
    assert mappings() == before + group.size()
    view = tensor[5:]
    del tensor
    gc.collect()
    comm.inference_all_reduce(view, group=group)
    assert mappings() == before + group.size()
    del view
    gc.collect()
    assert mappings() == before
    # Memory that the kernel gives at the same place is not taken for it.
    comm.inference_all_reduce(torch.ones(100_000), group=group)
    for _ in range(50):
        one = comm.symm_zeros(1000, group=group)
        one += 1
        comm.inference_all_reduce(one, group=group)
        assert bool((one == group.size()).all())
    del one
    gc.collect()
    assert mappings() == before


def test_memory_is_given_back() -> None:
    ranks.run(released, 2)


def different() -> None:
    group = comm.new_group(backend="shm")
    with pytest.raises(errors.CommError, match="different sizes"):
        comm.symm_empty(1000 if group.rank() else 100_000, group=group)
    assert comm.symm_zeros(1000, group=group).numel() == 1000


def test_different_sizes_are_named() -> None:
    ranks.run(different, 2)


def norm(backend: str, dtype: torch.dtype, rows: int) -> None:
    group = comm.new_group(backend=backend)
    rank, world = group.rank(), group.size()
    torch.manual_seed(0)
    partials = [torch.randn(rows, 100).to(dtype) for _ in range(world)]
    residual, weight = torch.randn(rows, 100).to(dtype), torch.randn(100).to(dtype)
    total = torch.stack([p.float() for p in partials]).sum(0).to(dtype)
    kept = (residual.float() + total.float()).to(dtype)
    wide = kept.float()
    want = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()).to(dtype)
    tolerance = {"rtol": 2**-7 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-5}
    for strided in (False, True, False):
        own, beside = partials[rank].clone(), residual.clone()
        if strided:
            own, beside = own.t().contiguous().t(), beside.repeat(1, 2)[:, :100]
        assert comm.all_reduce_add_rms_norm(own, beside, weight, 1e-5, group) is own
        torch.testing.assert_close(beside, kept, **tolerance)
        torch.testing.assert_close(own, want, **tolerance)
    with pytest.raises(errors.UsageError, match="weight of the last dimension"):
        comm.all_reduce_add_rms_norm(own, beside, weight[:50], 1e-5, group)
    with pytest.raises(errors.UsageError, match="one dtype"):
        comm.all_reduce_add_rms_norm(own, beside, weight.double(), 1e-5, group)
    assert (_shared_memory_of(group) is None) == (backend == "none")


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_norm(dtype: torch.dtype, rows: int) -> None:
    ranks.run(norm, 2, "shm", dtype, rows)


class Blind:
    """Native code of a rank that cannot open what its peers have."""

    def __init__(self, closed: tuple[str, ...]) -> None:
        self.ShmSegment, self._closed = self, closed
        self.tried: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(_native, name)

    def create(self, size: int, memfd: bool) -> _native.ShmSegment:
        self.tried.append("memfd" if memfd else "posix")
        return _native.ShmSegment.create(size, memfd)

    def open(self, name: str, size: int) -> _native.ShmSegment:
        if self.tried[-1] in self._closed:
            raise FileNotFoundError(f"cannot open {name}")
        return _native.ShmSegment.open(name, size)


def blind() -> None:
    group = comm.new_group(backend="shm")
    world = group.size()
    symmetric._native = Blind(("memfd",) if group.rank() == 1 else ())
    for _ in range(3):
        tensor = comm.symm_zeros(1000, group=group)
        tensor += 1
        comm.inference_all_reduce(tensor, group=group)
        assert bool((tensor == world).all())
    assert symmetric._native.tried == ["memfd", "posix", "posix", "posix"]  # the way that works is kept
    del tensor
    gc.collect()
    other = comm.new_group(backend="shm")
    symmetric._native = Blind(("memfd", "posix") if group.rank() == 1 else ())
    with pytest.raises(errors.CommError) as caught:
        comm.symm_empty(1000, group=other)
    text = str(caught.value)
    assert "cannot share 4096 bytes" in text
    assert "memory" not in text
    assert text.count("rank 1: cannot open") == 2
    assert "(of rank 0)" in text
    symmetric._native = _native
    assert comm.symm_zeros(10, group=other).tolist() == [0.0] * 10


def test_ranks_that_cannot_see_each_other_share_through_dev_shm() -> None:
    ranks.run(blind, 3)


APART = """
import os, torch, torch.distributed as dist
from anyaccel import comm
comm.init_distributed("shm")
tensor = comm.symm_zeros(100_000)
tensor += 1
comm.inference_all_reduce(tensor)
assert bool((tensor == 2).all())
print(dist.get_backend(), os.getpid())
dist.barrier()
comm.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_with_numberings_of_processes_of_their_own(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("other numberings of processes need root and util-linux")
    script = tmp_path / "job.py"
    script.write_text(APART)
    base = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks.free_port())}
    jobs = [
        subprocess.Popen(
            ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-W", "ignore", str(script)],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [job.communicate(timeout=100)[0] for job in jobs]
    if any("unshare: " in output for output in outputs):
        pytest.skip(f"no namespaces here: {outputs}")
    assert outputs == ["shm 1\n", "shm 1\n"]
