# SPDX-License-Identifier: Apache-2.0
"""Every method of the CUDA backend against torch.cuda's recorded signatures; the device itself is made up."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_vendor import FakeVendor
from interface import METHODS, PROPERTIES
from torch._subclasses.fake_tensor import FakeTensorMode

from anyaccel.accelerator.backends.cuda import CudaAccelerator
from anyaccel.errors import CapabilityError

GIB = 1 << 30


class Cudart:
    """The two functions of the CUDA runtime that page-lock memory; they answer with an error code."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int:
        self.registered[ptr] = size
        return 0

    def cudaHostUnregister(self, ptr: int) -> int:
        return 0 if self.registered.pop(ptr, None) else 713


def check_error(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code}")


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> FakeVendor:
    """Two cards of compute capability 9.0."""
    cudart = Cudart()
    answers: dict[str, Any] = {
        "current_device": 1,
        "device_count": 2,
        "is_available": True,
        "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(total_memory=80 * GIB),
        "mem_get_info": (70 * GIB, 80 * GIB),
        "memory_allocated": 3 * GIB,
        "max_memory_allocated": 4 * GIB,
        "memory_reserved": 5 * GIB,
        "max_memory_reserved": 6 * GIB,
        "memory_stats": {"allocated_bytes.all.current": 3 * GIB},
        "initial_seed": 11,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or "native",
        "is_current_stream_capturing": True,
        "current_stream": "current",
        "default_stream": "default",
        "stream": "context",
        "cudart": lambda: cudart,
        "check_error": check_error,
        "_lazy_call": lambda callback: callback(),
    }
    fake = FakeVendor("cuda", answers)
    fake.cudart_state = cudart

    def init() -> None:
        fake.default_generators = (torch.Generator(), torch.Generator())

    fake.init = init
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.version, "hip", None)
    return fake


@pytest.fixture
def cuda(vendor: FakeVendor) -> Iterator[CudaAccelerator]:
    """The backend over that module. Tensors on the device have a shape and no data."""
    accelerator = CudaAccelerator()
    accelerator._module = vendor  # and not torch.cuda itself, which torch's own code uses
    with FakeTensorMode():
        yield accelerator


class HostTensor:
    """Stands in for a host tensor, since pinning needs the driver."""

    shape = torch.Size([2, 3])
    dtype = torch.float32

    def numel(self) -> int:
        return 6

    def pin_memory(self) -> str:
        return "pinned copy"

    def is_pinned(self) -> bool:
        return True


def host_register(cuda: CudaAccelerator) -> None:
    assert cuda.register_host_memory(0x1000, 4096) is True
    cuda.unregister_host_memory(0x1000)
    with pytest.raises(RuntimeError, match="713"):
        cuda.unregister_host_memory(0x1000)


def capability_error(call: Callable[[], Any]) -> bool:
    with pytest.raises(CapabilityError, match="no op builders for CUDA"):
        call()
    return True


def set_visible(cuda: CudaAccelerator) -> dict[str, str]:
    environment: dict[str, str] = {}
    cuda.set_visible_devices_envs(environment, [0, "GPU-5f3"])
    return environment


def compile_backend(cuda: CudaAccelerator) -> str:
    cuda.set_compile_backend("eager")
    return cuda.get_compile_backend()


def graph(cuda: CudaAccelerator) -> Any:
    return cuda.create_graph()


# Interface name -> (what to do with it, what must come out).
CALLS: dict[str, tuple[Callable[[CudaAccelerator], Any], Any]] = {
    "is_synchronized_device": (lambda a: a.is_synchronized_device(), False),
    "use_host_timers": (lambda a: a.use_host_timers(), False),
    "resolves_data_dependency": (lambda a: a.resolves_data_dependency(), False),
    "handles_memory_backpressure": (lambda a: a.handles_memory_backpressure(), False),
    "device_name": (lambda a: (a.device_name(), a.device_name(0)), ("cuda", "cuda:0")),
    "device": (lambda a: (a.device(), a.device(1)), (torch.device("cuda"), torch.device("cuda", 1))),
    "set_device": (lambda a: a.set_device(1), None),
    "current_device": (lambda a: a.current_device(), 1),
    "current_device_name": (lambda a: a.current_device_name(), "cuda:1"),
    "device_count": (lambda a: a.device_count(), 2),
    "synchronize": (lambda a: (a.synchronize(), a.synchronize(1)), (None, None)),
    "is_available": (lambda a: a.is_available(), True),
    "random": (lambda a: a.random(), torch.random),
    "set_rng_state": (lambda a: (a.set_rng_state("state"), a.set_rng_state("state", 0)), (None, None)),
    "get_rng_state": (lambda a: (a.get_rng_state().dtype, len(a.get_rng_state("cuda:0"))), (torch.uint8, 16)),
    "manual_seed": (lambda a: a.manual_seed(5), None),
    "manual_seed_all": (lambda a: a.manual_seed_all(5), None),
    "initial_seed": (lambda a: a.initial_seed(), 11),
    "default_generator": (
        lambda a: {type(a.default_generator(0)), type(a.default_generator(1)), type(a.default_generator())},
        {torch.Generator},
    ),
    "Stream": (lambda a: type(a.Stream(device=0, priority=-1)).__name__, "Stream"),
    "stream": (lambda a: a.stream(a.Stream()), "context"),
    "current_stream": (lambda a: (a.current_stream(), a.current_stream(1)), ("current", "current")),
    "default_stream": (lambda a: (a.default_stream(), a.default_stream(1)), ("default", "default")),
    "Event": (lambda a: a.Event(enable_timing=True).arguments, {"enable_timing": True}),
    "empty_cache": (lambda a: a.empty_cache(), None),
    "memory_allocated": (lambda a: (a.memory_allocated(), a.memory_allocated(1)), (3 * GIB,) * 2),
    "max_memory_allocated": (lambda a: a.max_memory_allocated(0), 4 * GIB),
    "reset_max_memory_allocated": (lambda a: a.reset_max_memory_allocated(), None),
    "memory_cached": (lambda a: a.memory_cached(), 5 * GIB),
    "max_memory_cached": (lambda a: a.max_memory_cached(), 6 * GIB),
    "reset_max_memory_cached": (lambda a: a.reset_max_memory_cached(1), None),
    "memory_stats": (lambda a: a.memory_stats(0), {"allocated_bytes.all.current": 3 * GIB}),
    "reset_peak_memory_stats": (lambda a: a.reset_peak_memory_stats(), None),
    "memory_reserved": (lambda a: a.memory_reserved(), 5 * GIB),
    "max_memory_reserved": (lambda a: a.max_memory_reserved(), 6 * GIB),
    "total_memory": (lambda a: (a.total_memory(), a.total_memory(1)), (80 * GIB,) * 2),
    "available_memory": (lambda a: a.available_memory(), 70 * GIB),
    "is_bf16_supported": (lambda a: a.is_bf16_supported(), True),
    "is_fp16_supported": (lambda a: a.is_fp16_supported(), True),
    "is_fp64_supported": (lambda a: a.is_fp64_supported(), True),
    "supported_dtypes": (
        lambda a: a.supported_dtypes(),
        [torch.float32, torch.float16, torch.bfloat16, torch.float64],
    ),
    "range_push": (lambda a: a.range_push("step", domain="d", category="c"), None),
    "range_pop": (lambda a: a.range_pop(), None),
    "lazy_call": (lambda a: a.lazy_call(lambda: None), None),
    "communication_backend_name": (lambda a: a.communication_backend_name(), "nccl"),
    "is_triton_supported": (
        lambda a: a.is_triton_supported(),
        importlib.util.find_spec("triton") is not None,
    ),
    "prefer_triton_grouped_mm": (lambda a: a.prefer_triton_grouped_mm(), False),
    "create_graph": (lambda a: type(a.create_graph()).__name__, "CUDAGraph"),
    "capture_to_graph": (
        lambda a: a.capture_to_graph(graph(a), pool=(0, 1)).arguments["pool"],
        (0, 1),
    ),
    "replay_graph": (lambda a: a.replay_graph(graph(a)), None),
    "is_current_stream_capturing": (lambda a: a.is_current_stream_capturing(), True),
    **{
        name: (lambda a, name=name: a.on_accelerator(getattr(a, name)([1])), True)
        for name in PROPERTIES - {"Stream", "Event"}
    },
    "pin_memory": (lambda a: {a.pin_memory(HostTensor()), a.pin_memory(HostTensor(), 0)}, {"pinned copy"}),
    "is_pinned": (lambda a: a.is_pinned(HostTensor()), True),
    "unpin_memory": (lambda a: a.unpin_memory(HostTensor()), None),
    "pin_memory_alignment": (lambda a: a.pin_memory_alignment(), 1),
    "pin_empty": (lambda a: a.pin_empty(2, dtype=torch.int8).shape, (2,)),
    "pin_empty_like": (lambda a: a.pin_empty_like(torch.empty(3, device="cuda")).device.type, "cpu"),
    "register_host_memory": (host_register, None),
    "unregister_host_memory": (host_register, None),
    "on_accelerator": (
        lambda a: (a.on_accelerator(torch.empty(1, device="cuda:1")), a.on_accelerator(torch.empty(1))),
        (True, False),
    ),
    "op_builder_dir": (lambda a: capability_error(a.op_builder_dir), True),
    "create_op_builder": (lambda a: capability_error(lambda: a.create_op_builder("FusedAdamBuilder")), True),
    "get_op_builder": (lambda a: a.get_op_builder("FusedAdamBuilder"), None),
    "build_extension": (lambda a: a.build_extension().__name__, "BuildExtension"),
    "export_envs": (lambda a: a.export_envs(), ["NCCL", "TORCH_NCCL"]),
    "visible_devices_envs": (lambda a: a.visible_devices_envs(), ["CUDA_VISIBLE_DEVICES"]),
    "set_visible_devices_envs": (set_visible, {"CUDA_VISIBLE_DEVICES": "0,GPU-5f3"}),
    "get_compile_backend": (lambda a: a.get_compile_backend(), "inductor"),
    "set_compile_backend": (compile_backend, "eager"),
}


def test_every_method_is_called() -> None:
    assert set(CALLS) == set(METHODS) | PROPERTIES


@pytest.mark.parametrize("name", sorted(CALLS))
def test_method(cuda: CudaAccelerator, name: str) -> None:
    call, expected = CALLS[name]
    assert call(cuda) == expected


def test_pinned_memory_without_a_copy(cuda: CudaAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "empty", lambda shape, **options: made.append({"shape": shape, **options}))
    cuda.pin_memory(HostTensor(), make_copy=False)
    cuda.pin_memory(HostTensor(), make_copy=False, match_shape=False)
    assert [item["shape"] for item in made] == [(2, 3), (6,)]
    assert all(item["pin_memory"] for item in made)


def test_resets_use_the_name_that_is_not_deprecated(cuda: CudaAccelerator, vendor: FakeVendor) -> None:
    cuda.reset_max_memory_allocated(0)
    cuda.reset_max_memory_cached(1)
    assert vendor.called("reset_peak_memory_stats") == [{"device": 0}, {"device": 1}]


def test_ranges_go_to_nvtx(cuda: CudaAccelerator, vendor: FakeVendor) -> None:
    cuda.range_push("step")
    cuda.range_pop()
    ranges = [call for call in vendor.calls if call[0].startswith("nvtx")]
    assert ranges == [("nvtx.range_push", {"msg": "step"}), ("nvtx.range_pop", {})]


def test_the_random_state_of_the_current_device_by_default(cuda: CudaAccelerator, vendor: FakeVendor) -> None:
    cuda.set_rng_state("state")
    cuda.set_rng_state("state", "cuda:0")
    assert [call["device"] for call in vendor.called("set_rng_state")] == [1, 0]


def test_a_function_that_this_torch_lacks_is_a_capability_error(cuda: CudaAccelerator, vendor: FakeVendor) -> None:
    del vendor.mem_get_info
    with pytest.raises(CapabilityError, match=r"'mem_get_info': torch.cuda of torch .* does not have it"):
        cuda.available_memory()


def test_the_fake_refuses_what_the_vendor_does_not_take(vendor: FakeVendor) -> None:
    with pytest.raises(TypeError):
        vendor.initial_seed(3)
    with pytest.raises(AttributeError):
        vendor.reset_max_memory_reserved()
    with pytest.raises(TypeError):
        vendor.graph(vendor.CUDAGraph(), polo=1)


@pytest.mark.parametrize(
    ("capability", "fp16", "grouped"), [((6, 1), False, False), ((7, 5), True, False), ((8, 0), True, True)]
)
def test_what_older_cards_do(
    cuda: CudaAccelerator,
    vendor: FakeVendor,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    fp16: bool,
    grouped: bool,
) -> None:
    monkeypatch.delenv("DS_ALLOW_DEPRECATED_FP16", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton" or None)
    vendor.get_device_capability = lambda: capability
    assert cuda.is_fp16_supported() is fp16
    assert cuda.is_triton_supported() is (capability[0] >= 8)
    assert cuda.prefer_triton_grouped_mm() is grouped
    monkeypatch.setenv("DS_ALLOW_DEPRECATED_FP16", "1")
    assert cuda.is_fp16_supported() is True


def test_rocm(cuda: CudaAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.3")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: pytest.fail(f"looked for {name}"))
    assert cuda.visible_devices_envs() == ["HIP_VISIBLE_DEVICES"]
    assert cuda.is_triton_supported() is False
    assert cuda.prefer_triton_grouped_mm() is False
    assert cuda.is_fp16_supported() is True


def test_the_probe_creates_no_context(vendor: FakeVendor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", vendor)
    assert CudaAccelerator.probe() is None
    assert [name for name, _ in vendor.calls] == ["device_count"]


def test_the_probe_says_what_is_missing(vendor: FakeVendor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", vendor)
    vendor.device_count = lambda: 0
    missing = CudaAccelerator.probe()
    assert missing is not None
    assert missing == ("torch.cuda is there but sees no device", True)
    monkeypatch.setattr(torch.version, "cuda", None)
    missing = CudaAccelerator.probe()
    assert missing is not None
    assert missing.reason.startswith("CUDA_Accelerator requires a CUDA or ROCm build of torch")
    assert not missing.installed
    monkeypatch.setattr(torch.version, "hip", "6.3")
    missing = CudaAccelerator.probe()
    assert missing is not None
    assert "sees no device" in missing.reason
