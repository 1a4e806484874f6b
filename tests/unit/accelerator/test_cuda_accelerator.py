# SPDX-License-Identifier: Apache-2.0
"""What only the CUDA backend does; its methods as such are in test_vendor_contract.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_vendor import GIB, FakeVendor, installed

from anyaccel.accelerator import torch_device
from anyaccel.accelerator.backends.cuda import CudaAccelerator
from anyaccel.errors import CapabilityError


@pytest.fixture
def vendor() -> Iterator[FakeVendor]:
    """Two cards of compute capability 9.0."""
    with installed("cuda") as module:
        yield module


@pytest.fixture
def cuda(vendor: FakeVendor) -> CudaAccelerator:
    return CudaAccelerator()


def test_resets_use_the_name_that_is_not_deprecated(cuda: CudaAccelerator, vendor: FakeVendor) -> None:
    cuda.reset_max_memory_allocated(0)
    cuda.reset_max_memory_cached(1)
    assert vendor.called("reset_peak_memory_stats") == [{"device": 0}, {"device": 1}]


def test_ranges_go_to_nvtx(cuda: CudaAccelerator, vendor: FakeVendor) -> None:
    cuda.range_push("step")
    cuda.range_pop()
    ranges = [call for call in vendor.calls if call.function.startswith("nvtx")]
    assert ranges == [("nvtx.range_push", {"msg": "step"}), ("nvtx.range_pop", {})]


def test_bf16_that_is_emulated_does_not_count(cuda: CudaAccelerator, vendor: FakeVendor) -> None:
    vendor.answers["is_bf16_supported"] = lambda including_emulation=True: including_emulation
    assert cuda.is_bf16_supported() is False


def test_a_function_that_this_torch_lacks_is_a_capability_error(cuda: CudaAccelerator, vendor: FakeVendor) -> None:
    del vendor.mem_get_info
    with pytest.raises(CapabilityError, match=r"'available_memory': torch.cuda does not have mem_get_info"):
        cuda.available_memory()


@pytest.mark.parametrize("driver", ["", "nvidia"])
@pytest.mark.parametrize(
    ("capability", "fp16", "grouped"), [((6, 1), False, False), ((7, 5), True, False), ((8, 0), True, True)]
)
def test_what_older_cards_do(
    cuda: CudaAccelerator,
    vendor: FakeVendor,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capability: tuple[int, int],
    fp16: bool,
    grouped: bool,
    driver: str,
) -> None:
    monkeypatch.delenv("DS_ALLOW_DEPRECATED_FP16", raising=False)
    monkeypatch.setattr(torch_device, "triton_drives", lambda backend: backend == driver)
    vendor.answers["get_device_capability"] = capability
    assert cuda.is_fp16_supported() is fp16
    assert cuda.is_triton_supported() is (capability[0] >= 8 and bool(driver))
    assert cuda.prefer_triton_grouped_mm() is (grouped and bool(driver))
    monkeypatch.setenv("DS_ALLOW_DEPRECATED_FP16", "1")
    assert cuda.is_fp16_supported() is True


def test_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed("cuda.rocm"):
        monkeypatch.setattr(torch_device, "triton_drives", lambda backend: pytest.fail("looked for Triton"))
        rocm = CudaAccelerator()
        assert CudaAccelerator.probe() is None
        assert rocm.visible_devices_envs() == ["HIP_VISIBLE_DEVICES"]
        environment: dict[str, str] = {}
        rocm.set_visible_devices_envs(environment, [1, 2])
        assert environment == {"HIP_VISIBLE_DEVICES": "1,2"}
        assert rocm.is_triton_supported() is False
        assert rocm.prefer_triton_grouped_mm() is False
        assert rocm.is_fp16_supported() is True


def test_errors_of_the_runtime_are_raised(cuda: CudaAccelerator, vendor: FakeVendor) -> None:
    vendor.answers["cudart"] = SimpleNamespace(cudaHostRegister=lambda ptr, size, flags: 2)
    with pytest.raises(RuntimeError, match="runtime error 2"):
        cuda.register_host_memory(0x1000, GIB)
    del vendor.check_error
    with pytest.raises(RuntimeError, match="cudaHostRegister of the cuda runtime failed with error 2"):
        cuda.register_host_memory(0x1000, GIB)


def test_the_probe_creates_no_context(vendor: FakeVendor) -> None:
    assert CudaAccelerator.probe() is None
    assert [call.function for call in vendor.calls] == ["device_count"]
    assert not vendor.state.initialised


def test_the_probe_says_what_is_missing(vendor: FakeVendor, monkeypatch: pytest.MonkeyPatch) -> None:
    vendor.state.count = 0
    assert CudaAccelerator.probe() == ("torch.cuda is there but sees no device", True)
    monkeypatch.setattr(torch.version, "cuda", None)
    missing = CudaAccelerator.probe()
    assert missing is not None
    assert missing.reason.startswith("CUDA_Accelerator requires a CUDA or ROCm build of torch")
    assert not missing.installed
    monkeypatch.setattr(torch.version, "hip", "6.3")
    missing = CudaAccelerator.probe()
    assert missing is not None
    assert "sees no device" in missing.reason
