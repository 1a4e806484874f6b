# SPDX-License-Identifier: Apache-2.0
"""Every method of the interface on the live CPU: types, units, behaviour."""

from __future__ import annotations

import copy
import mmap
import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from interface import METHODS, PROPERTIES

from anyaccel.accelerator import synchronous
from anyaccel.accelerator.backends import cpu as cpu_backend
from anyaccel.accelerator.backends.cpu import CpuAccelerator
from anyaccel.accelerator.base import DeviceProperties, TypedTensor
from anyaccel.errors import CapabilityError, UsageError
from anyaccel.topology import read_machine

MIB = 1 << 20
USED: set[str] = set()


class Recorder:
    """An accelerator that notes which of its names a test really uses, for the last test."""

    def __init__(self, accelerator: CpuAccelerator) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        USED.add(name)
        return getattr(self._accelerator, name)


@pytest.fixture
def cpu(cpu: CpuAccelerator) -> Any:
    return Recorder(cpu)


def test_policy(cpu: CpuAccelerator) -> None:
    assert cpu.is_synchronized_device() is True
    assert cpu.use_host_timers() is True
    assert cpu.resolves_data_dependency() is True
    assert cpu.handles_memory_backpressure() is True


def test_identity(cpu: CpuAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (cpu._name, cpu.device_name(), cpu.device_name(3), cpu.current_device_name()) == ("cpu",) * 4
    assert cpu.device() == cpu.device(1) == torch.device("cpu")
    assert torch.empty(1, device=cpu.device(0)).device == cpu.device()
    assert cpu.current_device() == 0
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert cpu.current_device() == 3
    assert type(cpu.current_device()) is int
    cpu.set_device(1)
    assert cpu.current_device() == 3
    cpu.synchronize()
    cpu.synchronize(0)


@pytest.mark.parametrize("bad", ["-1", "one", "1.5"])
def test_a_bad_local_rank_is_a_usage_error(cpu: CpuAccelerator, monkeypatch: pytest.MonkeyPatch, bad: str) -> None:
    monkeypatch.setenv("LOCAL_RANK", bad)
    with pytest.raises(UsageError, match=f"LOCAL_RANK='{bad}'"):
        cpu.current_device()


def test_device_count(cpu: CpuAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.device_count() == len(read_machine().nodes_with_cores()) >= 1
    assert cpu.is_available() is True
    monkeypatch.setenv("LOCAL_SIZE", "5")
    assert cpu.device_count() == 5
    monkeypatch.setenv("LOCAL_SIZE", "0")
    with pytest.raises(UsageError, match="LOCAL_SIZE='0'"):
        cpu.device_count()


def test_device_count_reads_the_machine_once(cpu: CpuAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu.device_count()
    monkeypatch.setattr("anyaccel.topology.sysfs.read_machine", lambda: pytest.fail("read again"))
    assert cpu.device_count() == cpu_backend._numa_nodes()


def test_random_numbers(cpu: CpuAccelerator) -> None:
    saved = cpu.get_rng_state()
    try:
        assert cpu.random() is torch.random
        cpu.manual_seed(7)
        assert cpu.initial_seed() == 7
        first = torch.rand(8)
        cpu.manual_seed_all(7)
        assert torch.equal(torch.rand(8), first)
        state = cpu.get_rng_state()
        assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
        second = torch.rand(8)
        assert not torch.equal(first, second)
        for index in (None, 0, 1, "cpu", torch.device("cpu")):  # one CPU device: an index means the same
            cpu.set_rng_state(state, index)
            assert torch.equal(cpu.get_rng_state(index), state)
            assert torch.equal(torch.rand(8), second)
        assert cpu.default_generator() is cpu.default_generator(1) is torch.default_generator
    finally:
        cpu.set_rng_state(saved)


def test_streams_and_events(cpu: CpuAccelerator) -> None:
    stream = cpu.Stream(device=0, priority=-1)
    assert isinstance(stream, synchronous.Stream)
    assert stream == cpu.current_stream() == cpu.default_stream(0)
    assert len({stream, cpu.current_stream()}) == 1
    assert stream != "stream"
    with cpu.stream(stream) as entered, stream:
        assert entered is stream
    with cpu.stream(None):
        pass
    assert stream.query() is True
    start, end = cpu.Event(enable_timing=True), cpu.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="record"):
        start.elapsed_time(end)
    begin = time.perf_counter()
    start.record()
    time.sleep(0.02)
    assert stream.record_event(end) is end
    assert 20.0 <= start.elapsed_time(end) <= 1e3 * (time.perf_counter() - begin)  # milliseconds
    assert end.elapsed_time(start) == -start.elapsed_time(end)
    for wait in (start.synchronize, start.wait, stream.synchronize):
        wait()
    stream.wait_event(stream.record_event())
    stream.wait_stream(cpu.default_stream())
    assert start.query() is True


@pytest.mark.usefixtures("one_cpu")
def test_memory_is_the_resident_set_in_bytes(cpu: CpuAccelerator) -> None:
    cpu.empty_cache()  # what other tests have left in the heap would be used first
    before = cpu.memory_allocated()
    status = Path("/proc/self/status").read_text()
    resident = int(status.split("VmRSS:")[1].split()[0]) << 10
    assert abs(before - resident) < 8 * MIB
    block = torch.ones(16 * MIB)  # 64 MiB
    assert 60 * MIB <= cpu.memory_allocated() - before <= 80 * MIB
    assert abs(cpu.memory_reserved(0) - cpu.memory_allocated()) < 8 * MIB
    assert abs(cpu.memory_cached(0) - cpu.memory_allocated()) < 8 * MIB
    assert abs(cpu.get_rss() - cpu.memory_allocated()) < 8 * MIB
    del block
    cpu.empty_cache()
    assert cpu.memory_allocated() - before < 16 * MIB


@pytest.mark.usefixtures("one_cpu")
@pytest.mark.parametrize("reset", ["reset_max_memory_allocated", "reset_max_memory_cached", "reset_peak_memory_stats"])
def test_the_peak_is_seen_between_calls_and_reset(cpu: CpuAccelerator, reset: str) -> None:
    cpu.empty_cache()
    getattr(cpu, reset)()
    before = cpu.memory_allocated()
    torch.ones(16 * MIB)  # gone again before the next call
    cpu.empty_cache()
    peak = cpu.max_memory_allocated()
    assert 60 * MIB <= peak - before <= 90 * MIB
    assert cpu.max_memory_reserved() == cpu.max_memory_cached() == peak
    stats = cpu.memory_stats(0)
    assert stats["allocated_bytes.all.peak"] == stats["reserved_bytes.all.peak"] == peak
    assert abs(stats["allocated_bytes.all.current"] - before) < 16 * MIB
    cpu.empty_cache()
    getattr(cpu, reset)(0)
    assert cpu.max_memory_allocated() - before < 16 * MIB
    cpu.empty_cache()


@pytest.mark.usefixtures("one_cpu")
def test_what_the_heap_keeps_is_given_back(cpu: CpuAccelerator) -> None:
    before = cpu.memory_allocated()
    blocks = [torch.ones(25 * 1024) for _ in range(1000)]  # 98 MiB in pieces that malloc takes from its heap
    grown = cpu.memory_allocated()
    last = blocks.pop()  # keeps the heap from shrinking by itself
    del blocks
    cpu.empty_cache()
    assert float(last.sum()) == 25 * 1024
    assert cpu.memory_allocated() < min(grown - 80 * MIB, before + 16 * MIB)


def test_memory_size(cpu: CpuAccelerator) -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert cpu.memory_allocated() < cpu.total_memory() <= physical
    assert 0 < cpu.available_memory() <= cpu.total_memory(0)
    assert cpu.device_properties() == DeviceProperties(cpu.device_properties(0).name, cpu.total_memory())
    assert cpu.device_properties().name
    assert cpu.device_capability(0) == (0, 0)
    assert cpu.mem_get_info()[1] == cpu.total_memory()
    assert "allocated_bytes.all.current" in cpu.memory_summary(0)


def test_names_and_devices_of_cuda_count_as_the_cpus(cpu: CpuAccelerator) -> None:
    for device in (None, 3, "1", "cuda:1", torch.device("cuda"), "cpu"):
        assert cpu.device_name(device) == "cpu"
        with cpu.device_guard(device):
            assert cpu.current_device() == 0
    with pytest.raises(UsageError, match="'meta' is none of"):
        cpu.device_name("meta")


def test_the_states_of_all_devices(cpu: CpuAccelerator) -> None:
    states = cpu.get_rng_state_all()
    first = torch.rand(3)
    cpu.set_rng_state_all(states)
    assert torch.equal(torch.rand(3), first)


def test_dtypes_that_are_claimed_compute(cpu: CpuAccelerator) -> None:
    for answer in (cpu.is_bf16_supported(), cpu.is_fp16_supported(), cpu.is_fp64_supported()):
        assert type(answer) is bool
    dtypes = cpu.supported_dtypes()
    assert dtypes[0] is torch.float32
    assert (torch.bfloat16 in dtypes, torch.float16 in dtypes) == (True, cpu.is_fp16_supported())
    for dtype in dtypes:
        ones = torch.ones(8, 8, dtype=dtype, device=cpu.current_device_name())
        assert torch.equal(ones @ ones, torch.full((8, 8), 8, dtype=dtype))


def test_no_fp16_without_onednn(cpu: CpuAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert cpu.is_fp16_supported() is False


def test_ranges_appear_in_a_profile(cpu: CpuAccelerator) -> None:
    cpu.range_pop()  # nothing is open: nothing happens
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        cpu.range_push("outer", domain="test", category="step")
        cpu.range_push("inner")
        torch.ones(4).sum()
        cpu.range_pop()
        cpu.range_pop(domain="test")
    assert {"outer", "inner"} <= {event.name for event in profile.events()}


def test_miscellaneous(cpu: CpuAccelerator) -> None:
    called: list[int] = []
    cpu.lazy_call(lambda: called.append(1))
    assert called == [1]
    assert cpu.communication_backend_name() == cpu._communication_backend_name == "gloo"
    assert torch.distributed.is_backend_available(cpu.communication_backend_name())
    assert cpu.is_triton_supported() is False
    assert cpu.prefer_triton_grouped_mm() is False


def test_collective_backend_with_oneccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "oneccl_bindings_for_pytorch.py"
    module.write_text("raise OSError('libfabric.so.1: cannot open shared object file')\n")
    assert CpuAccelerator().communication_backend_name() == "gloo"
    assert "'ccl' is passed over" in caplog.text
    assert "libfabric.so.1" in caplog.text
    module.write_text("# it works\n")
    monkeypatch.delitem(sys.modules, "oneccl_bindings_for_pytorch", raising=False)
    try:
        assert CpuAccelerator().communication_backend_name() == "ccl"
    finally:
        sys.modules.pop("oneccl_bindings_for_pytorch", None)


def test_collective_backend_with_oneccl_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CCL_ROOT", str(tmp_path))
    assert CpuAccelerator().communication_backend_name() == "gloo"  # nothing is in it
    for name in ("lib/libccl.so.1", "include/oneapi/ccl.hpp"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("oneCCL")
    assert CpuAccelerator().communication_backend_name() == "ccl"
    assert torch.distributed.is_backend_available("ccl")
    (tmp_path / "lib/libccl.so.1").write_bytes(b"\0libccl.so.2\0")
    assert CpuAccelerator().communication_backend_name() == "gloo"  # a wheel that lacks a part of itself


def test_graphs_do_nothing(cpu: CpuAccelerator) -> None:
    graph = cpu.create_graph()
    assert isinstance(graph, synchronous.Graph)
    assert not cpu.has("graphs")
    counter = torch.zeros(1)
    with cpu.capture_to_graph(graph, pool=graph.pool(), stream=cpu.current_stream()):
        assert cpu.is_current_stream_capturing() is False
        counter += 1
    cpu.replay_graph(graph)
    assert counter.item() == 1
    with graph:
        graph.capture_begin()
        graph.capture_end()
        graph.reset()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("BFloat16Tensor", torch.bfloat16),
        ("ByteTensor", torch.uint8),
        ("DoubleTensor", torch.float64),
        ("FloatTensor", torch.float32),
        ("HalfTensor", torch.float16),
        ("IntTensor", torch.int32),
        ("LongTensor", torch.int64),
    ],
)
def test_typed_tensors(cpu: CpuAccelerator, name: str, dtype: torch.dtype) -> None:
    make = getattr(cpu, name)
    legacy = getattr(torch, name)
    filled = make([1, 2, 3])
    assert (filled.dtype, filled.device, filled.tolist()) == (dtype, cpu.device(), [1, 2, 3])
    assert make(2, 3).shape == legacy(2, 3).shape == (2, 3)
    assert make(torch.Size([4])).shape == (4,)
    assert make().shape == legacy().shape
    assert isinstance(filled, make)
    assert not isinstance(torch.empty(1, dtype=torch.int16), make)
    copy = make(filled)
    copy[0] = 9
    assert filled[0] == 1


def test_double_tensors_keep_their_digits(cpu: CpuAccelerator) -> None:
    assert cpu.DoubleTensor([0.1]).item() == 0.1


def test_pinning_is_a_no_op(cpu: CpuAccelerator) -> None:
    tensor = torch.ones(3)
    assert cpu.pin_memory(tensor) is tensor
    assert cpu.pin_memory(tensor, align_bytes=0) is tensor
    assert cpu.pin_memory(tensor, make_copy=False) is tensor
    assert cpu.is_pinned(tensor) is False
    cpu.unpin_memory(tensor)
    assert cpu.pin_memory_alignment() == 1
    assert cpu.pin_empty(2, 3, dtype=torch.int8).shape == (2, 3)
    assert cpu.pin_empty((4,), dtype=torch.int8).dtype is torch.int8
    like = cpu.pin_empty_like(torch.empty(5, device="meta"), dtype=torch.float64)
    assert (like.shape, like.dtype, like.device.type) == ((5,), torch.float64, "cpu")
    with pytest.raises(UsageError, match="meta"):
        cpu.pin_empty(1, dtype=torch.int8, device="meta")


def test_host_registration_is_absent(cpu: CpuAccelerator) -> None:
    assert not cpu.has("register_host_memory")
    assert cpu.register_host_memory(4096, 4096) is False and cpu.unregister_host_memory(4096) is None
    assert cpu.on_accelerator(torch.empty(1)) is True
    assert cpu.on_accelerator(torch.empty(1, device="meta")) is False


def test_typed_tensors_are_what_type_takes(cpu: CpuAccelerator) -> None:
    values = torch.tensor([1.5, 2.0])
    for name in (
        "BFloat16Tensor",
        "ByteTensor",
        "DoubleTensor",
        "FloatTensor",
        "HalfTensor",
        "IntTensor",
        "LongTensor",
    ):
        kind = getattr(cpu, name)
        assert values.type(kind).dtype == kind.dtype and values.type(kind).type() == kind
        assert isinstance(values.type(kind), kind) and not isinstance(values.type(kind).to("meta"), kind)
    other = TypedTensor(torch.float16, "cuda:1")
    assert other == "torch.cuda.HalfTensor"
    assert [pickle.loads(pickle.dumps(other)).device, copy.deepcopy(other).dtype] == ["cuda:1", torch.float16]


def test_the_peak_has_the_names_of_the_cpu_accelerator(cpu: CpuAccelerator) -> None:
    before = cpu.reset_rss()
    with mmap.mmap(-1, 64 * MIB) as block:  # of no allocator, which may keep what is freed
        block.write(b"1" * (64 * MIB))
    assert cpu.max_mem >= before + 60 * MIB and cpu.max_mem >= cpu.max_memory_allocated() - 8 * MIB
    assert cpu.max_mem - cpu.memory_allocated() > 32 * MIB
    cpu.reset_rss()
    assert cpu.max_mem - cpu.memory_allocated() < 32 * MIB and cpu.supports_nvtx_domain is False


def test_op_builders(cpu: CpuAccelerator) -> None:
    assert cpu.op_builder_dir() == "anyaccel.ops.builders.cpu"
    documented = {"CCLCommBuilder", "ShareMemCommBuilder", "FusedAdamBuilder", "CPUAdamBuilder", "AsyncIOBuilder"}
    for name in documented:
        builder = cpu.create_op_builder(name)
        assert isinstance(builder, cpu.get_op_builder(name))
        assert builder.is_compatible() or builder.why_not()
    assert cpu.get_op_builder("WarpDriveBuilder") is None
    with pytest.raises(CapabilityError, match=r"'WarpDriveBuilder'.*anyaccel.ops.builders.cpu does not define it"):
        cpu.create_op_builder("WarpDriveBuilder")
    from setuptools.command.build_ext import build_ext

    assert issubclass(cpu.build_extension(), build_ext)


def test_environment(cpu: CpuAccelerator) -> None:
    assert cpu.runtime_versions() == {}
    assert cpu.export_envs() == ["CCL", "GLOO"]
    assert cpu.visible_devices_envs() == []
    environment: dict[str, str] = {}
    cpu.set_visible_devices_envs(environment, [0, 1])
    assert environment == {}


def test_compile_backend(cpu: CpuAccelerator) -> None:
    assert cpu.get_compile_backend() == "inductor"
    cpu.set_compile_backend("eager")
    assert cpu.get_compile_backend() == "eager"
    with pytest.raises(UsageError, match=r"'turbo'.*inductor"):
        cpu.set_compile_backend("turbo")
    assert cpu.get_compile_backend() == "eager"


def test_threads_use_it_at_once(cpu: CpuAccelerator) -> None:
    def work(_number: int) -> int:
        for _ in range(50):
            cpu.range_push("step")
            cpu.reset_peak_memory_stats()
            least = min(cpu.memory_allocated(), cpu.max_memory_allocated())
            cpu.range_pop()
        return least

    with ThreadPoolExecutor(8) as pool:
        assert min(pool.map(work, range(8))) > 16 * MIB


def test_no_process_is_started(cpu: CpuAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_args, **_kwargs: pytest.fail("a process was started"))
    cpu_backend._numa_nodes.cache_clear()
    cpu.device_count()
    cpu.memory_stats()
    cpu.available_memory()


def test_every_name_of_the_interface_was_used_above(request: pytest.FixtureRequest) -> None:
    selected = {item.originalname for item in request.session.items if item.path == Path(__file__)}
    if selected != {name for name in globals() if name.startswith("test_")}:
        pytest.skip("needs all tests of this file")
    assert (set(METHODS) | PROPERTIES) - USED == set()
