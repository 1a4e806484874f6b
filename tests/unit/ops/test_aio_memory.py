# SPDX-License-Identifier: Apache-2.0
"""Locked tensors: aligned, locked where that may be, freed with the tensor, pinned where an accelerator does that."""

from __future__ import annotations

import gc
import logging
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from anyaccel.accelerator.backends.cpu import CpuAccelerator
from anyaccel.accelerator.locked_memory import LockedMemory
from anyaccel.ops import aio
from anyaccel.ops.aio import memory
from anyaccel.ops.builders.aio import AsyncIOBuilder
from anyaccel.ops.builders.pin_memory import PinMemoryBuilder

BYTE = torch.empty(0, dtype=torch.uint8)


def status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


class Accelerator:
    """One that registers host memory, as cuda does."""

    def __init__(self, works: bool = True) -> None:
        self.works = works
        self.registered: dict[int, int] = {}

    def has(self, capability: str) -> bool:
        return capability == "register_host_memory"

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        if not self.works:
            raise RuntimeError("out of something")
        self.registered[address] = num_bytes
        return True

    def unregister_host_memory(self, address: int) -> None:
        del self.registered[address]


@pytest.fixture
def handle() -> aio.aio_handle:
    return aio.aio_handle(4096, 2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 1000, 3_000_001])
def test_a_locked_tensor_is_flat_aligned_and_writable(handle: aio.aio_handle, dtype: torch.dtype, count: int) -> None:
    tensor = handle.new_cpu_locked_tensor(count, torch.empty(2, 3, dtype=dtype))
    assert tensor.dtype == dtype and tensor.shape == (count,)
    assert tensor.data_ptr() % mmap.PAGESIZE == 0
    assert not tensor.any()
    tensor.fill_(1)
    assert bool((tensor == 1).all()) and handle.is_pinned(tensor)
    assert not handle.is_pinned(torch.zeros(count))


def test_an_empty_one_is_an_ordinary_tensor(handle: aio.aio_handle) -> None:
    tensor = handle.new_cpu_locked_tensor(0, BYTE)
    assert tensor.numel() == 0 and not handle.free_cpu_locked_tensor(tensor)


def test_memory_is_locked_and_goes_with_the_last_tensor(handle: aio.aio_handle) -> None:
    size = 4 << 20
    before, mapped = status("VmLck"), status("VmSize")
    tensor = handle.new_cpu_locked_tensor(size, BYTE)
    if status("VmLck") == before:
        pytest.skip("RLIMIT_MEMLOCK allows less than 4 MiB")
    view = tensor[100:200]
    del tensor
    gc.collect()
    view.fill_(3)
    assert status("VmLck") >= before + size
    del view
    gc.collect()
    assert status("VmLck") == before and status("VmSize") < mapped + size


def test_many_are_made_and_dropped_without_a_leak(handle: aio.aio_handle) -> None:
    for _ in range(3):
        handle.new_cpu_locked_tensor(1 << 20, BYTE)
    locked, mapped = status("VmLck"), status("VmSize")
    for _ in range(500):
        handle.new_cpu_locked_tensor(1 << 20, BYTE)[0] = 1
    assert status("VmLck") <= locked and status("VmSize") <= mapped + (64 << 20)
    assert len(memory._memories) < 10


def test_freeing_unlocks_and_late_access_is_no_crash(handle: aio.aio_handle) -> None:
    before = status("VmLck")
    tensor = handle.new_cpu_locked_tensor(1 << 20, BYTE)
    assert handle.free_cpu_locked_tensor(tensor.view(1024, 1024))
    assert status("VmLck") == before and not handle.is_pinned(tensor)
    assert not handle.free_cpu_locked_tensor(tensor)
    assert not handle.free_cpu_locked_tensor(torch.zeros(5))
    tensor.fill_(7)


def test_another_handle_frees_it_and_the_handle_may_go_first(handle: aio.aio_handle) -> None:
    tensor = aio.aio_handle(4096, 2).new_cpu_locked_tensor(100, BYTE)
    gc.collect()
    tensor.fill_(1)
    assert handle.is_pinned(tensor) and handle.free_cpu_locked_tensor(tensor)


LOW_LIMIT = """
import logging, os, resource, sys, torch
logging.basicConfig(format="%(message)s")
from anyaccel.ops.aio import aio_handle
handle = aio_handle(4096, 2, engine="threads")
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)  # root may lock what it likes
for _ in range(3):
    tensor = handle.new_cpu_locked_tensor(1 << 20, torch.empty(0, dtype=torch.uint8))
    tensor.fill_(1)
    assert tensor.data_ptr() % 4096 == 0
handle.new_cpu_locked_tensor(4096, torch.empty(0, dtype=torch.uint8))
"""


def test_above_the_limit_there_is_one_warning_and_aligned_memory() -> None:
    done = subprocess.run([sys.executable, "-c", LOW_LIMIT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "locked" in line]
    assert len(lines) == 1
    assert "1048576 bytes could not be locked" in lines[0] and "RLIMIT_MEMLOCK is 65536 bytes" in lines[0]


def test_an_accelerator_that_registers_host_memory_pins_it(
    handle: aio.aio_handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = Accelerator()
    monkeypatch.setattr(memory, "get_accelerator", lambda: accelerator)
    first, second = (handle.new_cpu_locked_tensor(5000, BYTE) for _ in range(2))
    assert accelerator.registered == {first.data_ptr(): 8192, second.data_ptr(): 8192}
    handle.free_cpu_locked_tensor(first)
    assert list(accelerator.registered) == [second.data_ptr()]
    del second
    gc.collect()
    assert not accelerator.registered


def test_memory_that_cannot_be_registered_is_locked(
    handle: aio.aio_handle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "get_accelerator", lambda: Accelerator(works=False))
    monkeypatch.setattr(memory, "_said", set())
    before = status("VmLck")
    with caplog.at_level(logging.WARNING, "anyaccel.aio"):
        tensors = [handle.new_cpu_locked_tensor(4096, BYTE) for _ in range(2)]
    assert status("VmLck") == before + 8192 and len(tensors) == 2
    assert [record.message for record in caplog.records] == [
        "host memory could not be registered with the accelerator: out of something"
    ]


@pytest.mark.parametrize("shape", [(100,), (3, 1000), ()])
def test_the_xpu_backends_page_aligned_memory_comes_from_this_op(shape: tuple[int, ...]) -> None:
    locked = LockedMemory(AsyncIOBuilder)
    tensor = torch.rand(shape)
    copy = locked.pin(tensor, make_copy=True, match_shape=True)
    assert torch.equal(copy, tensor) and copy.data_ptr() % mmap.PAGESIZE == 0 and copy in locked
    assert locked.pin(tensor, make_copy=False, match_shape=False).shape == (tensor.numel(),)
    locked.free(copy)
    assert copy not in locked


def test_accelerators_pin_with_locked_memory_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = CpuAccelerator()
    tensor = torch.arange(6.0).reshape(2, 3)
    assert cpu.pin_memory(tensor) is tensor and cpu.unpin_memory(tensor) is None
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    pinned = cpu.pin_memory(tensor)
    assert torch.equal(pinned, tensor) and pinned.data_ptr() != tensor.data_ptr()
    assert cpu.is_pinned(pinned) and cpu.is_pinned(pinned[1, 1:]) and not cpu.is_pinned(tensor)
    assert cpu.pin_memory(tensor, make_copy=False).shape == (2, 3)
    assert cpu.pin_memory(tensor, match_shape=False).tolist() == tensor.flatten().tolist()
    assert cpu.is_pinned(cpu.pin_empty(5, dtype=torch.int8)) and cpu.is_pinned(cpu.pin_empty_like(tensor))
    view = pinned.reshape(-1)
    pinned.data = torch.zeros(2, 3)  # as code does that moves parameters to a device and back
    assert cpu.is_pinned(view) and cpu.unpin_memory(pinned) is True and not cpu.is_pinned(view)
    assert cpu.unpin_memory(pinned) is False and cpu.unpin_memory(tensor) is False
    with FakeTensorMode() as fake:
        assert not cpu.is_pinned(fake.from_tensor(tensor))
    assert not cpu.is_pinned(torch.zeros(2, device="meta"))


def test_the_handle_of_the_pinning_op_knows_the_memory_of_all_others(handle: aio.aio_handle) -> None:
    op = PinMemoryBuilder().load()
    tensor = op.pin_handle().new_cpu_locked_tensor(10, BYTE)
    assert handle.is_pinned(tensor) and op.pin_handle().free_cpu_locked_tensor_by_ptr(tensor.data_ptr())
    assert not handle.is_pinned(tensor) and not op.pin_handle().free_cpu_locked_tensor_by_ptr(tensor.data_ptr())
    assert PinMemoryBuilder().jit_load() is op
