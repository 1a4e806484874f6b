# SPDX-License-Identifier: Apache-2.0
"""Where one backend differs from the others on purpose. What all of them share is in test_vendor_contract.py."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fake_vendor import GIB, FakeVendor, installed

from anyaccel.accelerator import Accelerator, detection_report, get_accelerator, select
from anyaccel.accelerator.backends import xpu as xpu_backend
from anyaccel.accelerator.backends.xpu import XpuAccelerator
from anyaccel.errors import CapabilityError, UsageError

Make = Callable[[str], Any]


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes the accelerator of a vendor whose software is installed until the test ends; `.vendor` is its module."""
    blocks = []

    def build(name: str, entry: str = "") -> Any:
        block = installed(name)
        vendor = block.__enter__()
        blocks.append(block)
        kind = select.REGISTRY[entry or name].load()
        assert kind.probe() is None
        accelerator = kind()
        accelerator.vendor = vendor
        return accelerator

    yield build
    for block in reversed(blocks):
        block.__exit__(None, None, None)


def visible(accelerator: Accelerator, **before: str) -> dict[str, str]:
    accelerator.set_visible_devices_envs(before, [2, 3])
    return before


# Intel -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["xpu.native", "xpu.ipex", "xpu.external"])
def test_xpu_prefers_ccl_where_its_bindings_import(make: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name != "xpu.external":  # where the package's class decides
        assert make(name).communication_backend_name() == "xccl"
    monkeypatch.setitem(sys.modules, "oneccl_bindings_for_pytorch", ModuleType("oneccl_bindings_for_pytorch"))
    assert make(name).communication_backend_name() == "ccl"


def test_xpu_with_broken_bindings_says_so(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "oneccl_bindings_for_pytorch.py").write_text("raise OSError('libccl.so: not found')")
    monkeypatch.syspath_prepend(tmp_path)
    assert make("xpu.native").communication_backend_name() == "xccl"
    assert "libccl.so" in caplog.text
    assert all(record.levelno == logging.WARNING for record in caplog.records)


@pytest.mark.parametrize(
    ("version", "host"),
    [
        ("2.5.10+xpu", True),
        ("2.1.0", True),
        ("2.6.10+xpu", False),
        ("2.6.0", False),
        ("2.10.0+xpu", False),
        ("3.0", False),
    ],
)
def test_old_ipex_is_timed_by_the_host(make: Make, version: str, host: bool) -> None:
    ipex = make("xpu.ipex")
    sys.modules["intel_extension_for_pytorch"].__version__ = version
    assert ipex.use_host_timers() is host


def test_xpu_without_ipex_is_timed_by_events(make: Make) -> None:
    assert make("xpu.native").use_host_timers() is False


def test_the_cpu_build_of_ipex_is_no_reason_to_warn(make: Make) -> None:
    ipex = make("xpu.ipex")
    sys.modules["intel_extension_for_pytorch"]._C._has_xpu = lambda: False
    missing = type(ipex).probe()
    assert missing is not None
    assert "CPU build" in missing.reason
    assert not missing.installed


@pytest.mark.parametrize("name", ["xpu.native", "xpu.ipex"])
def test_the_default_stream_of_xpu_is_the_current_one(make: Make, name: str) -> None:
    xpu = make(name)
    stream = xpu.Stream()
    with xpu.stream(stream):
        assert xpu.default_stream() is xpu.current_stream() is stream


def test_xpu_asks_the_device_for_its_types(make: Make) -> None:
    xpu = make("xpu.native")
    properties = SimpleNamespace(has_fp16=False, has_fp64=True)
    xpu.vendor.answers["get_device_properties"] = properties
    assert (xpu.is_fp16_supported(), xpu.is_fp64_supported()) == (False, True)
    xpu.is_bf16_supported()
    assert xpu.vendor.called("is_bf16_supported") == [{"including_emulation": False}]


def test_xpu_ranges_are_itt_marks_where_torch_has_them(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[str] = []
    itt = SimpleNamespace(
        is_available=lambda: True, range_push=lambda msg: marks.append(msg), range_pop=lambda: marks.append("pop")
    )
    xpu = make("xpu.native")
    monkeypatch.setattr(xpu_backend, "_ITT", itt)
    xpu.range_push("step", domain="d")
    xpu.range_pop()
    assert marks == ["step", "pop"]


def test_xpu_visible_devices(make: Make) -> None:
    assert visible(make("xpu.native"), CUDA_VISIBLE_DEVICES="0") == {
        "ZE_AFFINITY_MASK": "2,3",
        "CUDA_VISIBLE_DEVICES": "0",
    }


def test_build_extension_of_xpu(make: Make) -> None:
    assert make("xpu.native").build_extension().__name__ == "BuildExtension"
    assert make("xpu.ipex").build_extension().__name__ == "DpcppBuildExtension"


@pytest.mark.parametrize(
    ("name", "folder"), [("xpu.native", "intel"), ("npu", "ascend"), ("mlu", "mlu"), ("cuda", "nvidia")]
)
def test_triton_only_where_it_has_a_backend_for_the_device(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, folder: str
) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    (tmp_path / "triton" / "backends" / "other").mkdir(parents=True)
    (tmp_path / "triton" / "__init__.py").write_text("raise AssertionError('imported, which may open devices')")
    monkeypatch.syspath_prepend(tmp_path)
    accelerator = make(name)
    assert accelerator.is_triton_supported() is False
    (tmp_path / "triton" / "backends" / folder).mkdir()
    assert accelerator.is_triton_supported() is True


@pytest.mark.usefixtures("undecided")
def test_xpu_leaves_the_machine_to_cuda(make: Make) -> None:
    make("cuda")
    make("xpu.native")
    assert get_accelerator()._name == "cuda"
    (xpu,) = [row for row in detection_report().candidates if row.name == "xpu.native"]
    assert (xpu.available, xpu.reason) == (True, "passed over: cuda has a device and is preferred to it")


@pytest.mark.usefixtures("undecided")
def test_ipex_does_not(make: Make) -> None:
    make("cuda")
    make("xpu.ipex")
    assert detection_report().chosen == "xpu.ipex"


class AioHandle:
    """DeepSpeed's asynchronous I/O handle, as far as it hands out locked memory: page-aligned, zero-filled."""

    def __init__(
        self, block_size: int, queue_depth: int, single_submit: bool, overlap_events: bool, intra_op_parallelism: int
    ) -> None:
        self.locked: set[int] = set()

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        page = 4096
        size = num_elem * example_tensor.element_size()
        memory = torch.zeros(size + page, dtype=torch.uint8)
        offset = -memory.data_ptr() % page
        self.locked.add(memory.data_ptr() + offset)
        return memory[offset : offset + size].view(example_tensor.dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        if tensor.data_ptr() not in self.locked:
            return False
        self.locked.remove(tensor.data_ptr())
        return True


@pytest.fixture
def locking(make: Make, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An xpu accelerator whose AsyncIOBuilder is there; `.handles` are those that were made."""
    xpu = make("xpu.native")
    xpu.handles = []

    def handle(*arguments: Any) -> AioHandle:
        xpu.handles.append(AioHandle(*arguments))
        return xpu.handles[-1]

    builder = SimpleNamespace(load=lambda: SimpleNamespace(aio_handle=handle))
    monkeypatch.setattr(xpu, "create_op_builder", lambda name: {"AsyncIOBuilder": builder}[name])
    return xpu


def test_page_aligned_memory_of_xpu(locking: Any) -> None:
    source = torch.arange(6.0).view(2, 3)
    for pinned in (locking.pin_memory(source, align_bytes=0), locking.pin_memory(source, 0)):
        assert torch.equal(pinned, source)
        assert pinned.data_ptr() % 4096 == 0
        assert locking.is_pinned(pinned)
        assert locking.is_pinned(pinned[1]) and locking.is_pinned(pinned.view(-1)[5:])
    empty = locking.pin_memory(source, make_copy=False, match_shape=False, align_bytes=0)
    assert (empty.shape, empty.dtype) == ((6,), torch.float32)
    assert not locking.is_pinned(source)
    assert len(locking.handles) == 1


def test_page_aligned_memory_is_known_until_it_is_freed(locking: Any) -> None:
    pinned = locking.pin_memory(torch.ones(4), align_bytes=0)
    (handle,) = locking.handles
    assert len(handle.locked) == 1
    locking.unpin_memory(torch.ones(4))  # not ours: nothing happens
    assert len(handle.locked) == 1
    locking.unpin_memory(pinned)
    assert not handle.locked
    assert not locking.is_pinned(pinned)


def test_page_aligned_memory_is_forgotten_with_its_tensor(locking: Any) -> None:
    pinned = locking.pin_memory(torch.ones(4), align_bytes=0)
    view = pinned[1:]
    del pinned
    gc.collect()
    assert locking.is_pinned(view), "a view keeps the memory"
    del view
    gc.collect()
    locking.is_pinned(torch.ones(4))
    assert locking._page_aligned._blocks == []


def test_other_alignments_are_refused(locking: Any) -> None:
    with pytest.raises(UsageError, match="align_bytes=64"):
        locking.pin_memory(torch.ones(4), 64)


def test_page_aligned_memory_without_the_op(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    xpu = make("xpu.native")
    monkeypatch.setattr(XpuAccelerator, "get_op_builder", lambda self, name: None)
    with pytest.raises(CapabilityError, match="AsyncIOBuilder"):
        xpu.pin_memory(torch.ones(4), align_bytes=0)


@pytest.mark.parametrize("name", ["xpu.external", "xpu.external.older"])
def test_the_delivered_class_is_used_where_it_fits(make: Make, name: str) -> None:
    xpu = make(name, "xpu.external")
    assert type(xpu._external).__name__ == "XPU_Accelerator"
    assert xpu._name == "xpu"
    assert xpu.memory_allocated.__func__.__module__ == "intel_extension_for_deepspeed"
    older = name.endswith("older")
    # What takes other arguments than today's interface is ours.
    for method in ("initial_seed", "range_push"):
        assert (getattr(xpu, method).__module__ == "intel_extension_for_deepspeed") is not older
    assert xpu.pin_memory.__module__ != "intel_extension_for_deepspeed"  # has no align_bytes in either
    assert xpu.communication_backend_name() == "ccl"


def test_a_package_that_delivers_one_of_our_accelerators(make: Make, tmp_path: Path) -> None:
    make("xpu.external")
    package = sys.modules["intel_extension_for_deepspeed"]
    package.XPU_Accelerator = type("XPU_Accelerator", (XpuAccelerator,), {})
    kind = select.REGISTRY["xpu.external"].load()
    assert type(kind()) is package.XPU_Accelerator
    del package.XPU_Accelerator
    missing = kind.probe()
    assert missing == ("intel_extension_for_deepspeed is installed but has no class XPU_Accelerator", True)


# Huawei ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["", "aarch64-linux/"])
def test_the_version_of_cann(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str) -> None:
    npu = make("npu")
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert "ASCEND_HOME_PATH is not set" in npu.runtime_versions()["cann"]
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert npu.runtime_versions()["cann"].startswith("unknown: no ascend_*_install.info")
    info = tmp_path / folder / "ascend_toolkit_install.info"
    info.parent.mkdir(exist_ok=True)
    info.write_text("package_name=Ascend-cann-toolkit\nversion=8.0.RC3\ninnerversion=V100R001C20\narch=aarch64\n")
    assert npu.runtime_versions() == {"cann": "8.0.RC3"}


def test_npu_registers_memory_that_the_device_sees(make: Make) -> None:
    npu = make("npu")
    npu.register_host_memory(0x2000, 4096)
    assert npu.vendor.state.registered == {0x2000: (4096, 0x2)}
    with pytest.raises(RuntimeError, match="npuHostUnregister of the npu runtime failed with error 713"):
        npu.unregister_host_memory(0x9000)


def test_npu_ranges_are_mstx(make: Make) -> None:
    npu = make("npu")
    npu.range_push("step", domain="ignored")
    npu.range_pop()
    ranges = [call for call in npu.vendor.calls if call.function.startswith("mstx")]
    assert ranges == [("mstx.range_push", {"message": "step"}), ("mstx.range_pop", {})]


# Habana ----------------------------------------------------------------------------------------------------


def test_hpu_has_graphs_in_lazy_mode(make: Make) -> None:
    hpu = make("hpu")
    assert hpu.has("graphs")
    hpu.capture_to_graph(hpu.create_graph(), pool=(0, 1))
    (arguments,) = hpu.vendor.called("graph")
    assert "pool" not in arguments


def test_hpu_has_no_graphs_in_eager_mode(make: Make) -> None:
    hpu = make("hpu.eager", "hpu")
    assert not hpu.has("graphs")
    for call in (hpu.create_graph, lambda: hpu.capture_to_graph(None)):
        with pytest.raises(CapabilityError, match="PT_HPU_LAZY_MODE=1"):
            call()


def test_hpu_visible_devices(make: Make) -> None:
    assert visible(make("hpu")) == {"HABANA_VISIBLE_MODULES": "2,3"}


def test_hpu_has_one_generator_whatever_the_index(make: Make) -> None:
    hpu = make("hpu")
    assert hpu.default_generator(0) is hpu.default_generator(7) is hpu.default_generator()
    hpu.set_rng_state(hpu.get_rng_state(3), 5)
    assert all("device" not in call.arguments for call in hpu.vendor.calls if "rng_state" in call.function)
    assert (hpu.device_name(3), str(hpu.device(3))) == ("hpu", "hpu")


def test_hpu_fp16_is_asked_of_the_device(make: Make) -> None:
    hpu = make("hpu")
    assert hpu.is_fp16_supported()
    sys.modules["habana_frameworks.torch.utils.experimental"]._is_fp16_supported = lambda: False
    assert not hpu.is_fp16_supported()
    assert hpu.total_memory() == 80 * GIB + 1
    assert hpu.memory_stats(0)["Limit"] == 80 * GIB


# Others ----------------------------------------------------------------------------------------------------


def test_mlu_visible_devices_are_not_undone(make: Make) -> None:
    assert visible(make("mlu"), CN_VISIBLE_DEVICES="0") == {"MLU_VISIBLE_DEVICES": "2,3"}


def test_mlu_device_is_no_context_manager(make: Make) -> None:
    mlu = make("mlu")
    assert mlu.device_name(1) == "mlu:1"
    assert "device" not in {call.function for call in mlu.vendor.calls}


def test_mtia_properties_are_a_dict(make: Make) -> None:
    mtia = make("mtia")
    assert isinstance(mtia.vendor.get_device_properties(0), dict)
    assert mtia.total_memory(0) == 80 * GIB
    assert not mtia.has("collectives")


def test_mps_streams_are_the_one_queue(make: Make) -> None:
    mps = make("mps")
    first, second = mps.Stream(), mps.Stream()
    assert first == second == mps.current_stream() == mps.default_stream(0)
    first.wait_stream(second)
    first.wait_event(second.record_event())
    assert first.query()
    first.synchronize()
    assert mps.vendor.called("synchronize") == [{}, {}]


def test_mps_gives_the_drivers_figure_for_a_peak(make: Make) -> None:
    mps = make("mps")
    assert not mps.has("peak_memory")
    held = mps.memory_reserved()
    assert mps.max_memory_allocated() == mps.max_memory_allocated(0) == mps.max_memory_reserved() == held > 0
    mps.reset_peak_memory_stats()
    mps.reset_max_memory_allocated(0)
    assert mps.max_memory_cached() == held


def test_mps_events_take_what_other_events_take(make: Make) -> None:
    mps = make("mps")
    start, end = (mps.Event(enable_timing=True, blocking=False, interprocess=False) for _ in range(2))
    start.record(mps.current_stream())
    end.record()
    end.wait(mps.current_stream())
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) == 2.5
    assert mps.vendor.called("Event.record") == [{}, {}]


def test_supa_has_no_double_precision_and_marks_with_brtx(make: Make) -> None:
    supa = make("supa")
    assert not supa.has("fp64")
    assert torch.float64 not in supa.supported_dtypes()
    supa.range_push("step")
    assert supa.vendor.called("brtx.range_push") == [{"msg": "step"}]


def test_klxpu_is_torchs_cuda_whose_events_measure_on_request(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XPU_EVENT_KL3_ENABLE", raising=False)
    klxpu = make("klxpu")
    assert (klxpu._name, klxpu.device_name(1)) == ("klxpu", "cuda:1")
    assert visible(klxpu) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert klxpu.use_host_timers()
    monkeypatch.setenv("XPU_EVENT_KL3_ENABLE", "1")
    assert not klxpu.use_host_timers()


def test_tpu_tells_the_size_of_its_memory_only(make: Make) -> None:
    tpu = make("tpu")
    assert (tpu.has("memory_stats"), tpu.has("events"), tpu.total_memory(0)) == (False, False, 80 * GIB)
    with pytest.raises(CapabilityError, match="not how much of it is in use"):
        tpu.memory_allocated()


def test_xla_on_a_cpu_is_for_those_who_ask_for_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    xla = make("xla")
    assert xla.memory_allocated(1) == 3 * GIB + 1
    with pytest.raises(UsageError, match="there is no device xla:2"):
        xla.set_device(2)
    xla.vendor.answers["runtime.device_type"] = "CPU"
    missing = type(xla).probe()
    assert missing is not None and "would run on CPU" in missing.reason and not missing.installed
    monkeypatch.setenv("DS_ACCELERATOR", "xla")
    assert type(xla).probe() is None
    on_cpu = type(xla)()
    assert not on_cpu.has("memory_stats")
    with pytest.raises(CapabilityError, match="keeps no account"):
        on_cpu.total_memory()


def test_xla_runs_what_it_has_gathered_when_it_is_waited_for(make: Make) -> None:
    xla = make("xla")
    xla.synchronize()
    assert xla.vendor.called("sync") == [{"wait": True}]
    assert xla.vendor.called("core.xla_model.wait_device_ops") == [{}]


@pytest.mark.parametrize("name", ["musa", "cuda", "npu", "xpu.native", "mlu", "supa", "mtia", "sdaa", "tpu"])
def test_generators_before_the_device_is_initialised(make: Make, name: str) -> None:
    accelerator = make(name)
    vendor: FakeVendor = accelerator.vendor
    assert not vendor.state.initialised
    if name == "musa":
        assert not hasattr(vendor, "default_generators")
    assert accelerator.default_generator(1) is vendor.state.generators[1]
    assert vendor.state.initialised
