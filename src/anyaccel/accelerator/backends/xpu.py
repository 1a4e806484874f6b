# SPDX-License-Identifier: Apache-2.0
"""Intel GPUs, through torch.xpu. The two other ways in are xpu_ipex.py and xpu_external.py."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.profiler

from anyaccel.accelerator.base import DeviceIndex
from anyaccel.accelerator.locked_memory import LockedMemory
from anyaccel.accelerator.spec import BackendSpec, CollectiveBackend, WithoutTorch
from anyaccel.accelerator.torch_device import TorchDeviceAccelerator
from anyaccel.errors import UsageError

_ITT: Any = torch.profiler.itt  # untyped


class XpuAccelerator(TorchDeviceAccelerator):
    """torch.xpu."""

    spec: ClassVar[BackendSpec] = BackendSpec(
        name="xpu",
        device_type="xpu",
        torch_module="torch.xpu",
        install="install a build of torch with XPU support (https://pytorch.org/get-started) and Intel's GPU driver",
        order=30,
        why="a part of torch, used when no CUDA device is present",
        yields_to=("cuda",),  # a workstation with a discrete NVIDIA card often has an Intel GPU in its processor
        collectives=(CollectiveBackend("ccl", "oneccl_bindings_for_pytorch"), CollectiveBackend("xccl")),
        visible_devices=("ZE_AFFINITY_MASK",),
        export_prefixes=("CCL", "FI_", "I_MPI", "ONEAPI", "SYCL", "ZE_"),
        graph_class="XPUGraph",
        triton_backend="intel",  # pytorch-triton-xpu; the triton of CUDA builds does not know the device
        op_builders="anyaccel.ops.builders.host",
        without_torch=WithoutTorch(
            choice="xpu.native",
            place=80,  # behind the others: it may be the graphics unit of the processor
            environment=("IPEX_",),
        ),
    )

    _BUILD = "a build of torch with XPU support"

    def __init__(self) -> None:
        super().__init__()
        self._page_aligned = LockedMemory(lambda: self.create_op_builder("AsyncIOBuilder"))

    @classmethod
    def _is_built(cls) -> bool:
        return torch.version.xpu is not None

    def default_stream(self, device_index: DeviceIndex = None) -> Any:
        # torch.xpu has no default stream that other streams synchronise with.
        return self.current_stream(device_index)

    # Data types: the device's own answers, emulation left out.

    def _property(self, name: str) -> bool:
        return bool(getattr(self._vendor("get_device_properties")(self.current_device()), name))

    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        return bool(self._vendor("is_bf16_supported")(including_emulation=False))

    def is_fp16_supported(self) -> bool:
        return self._property("has_fp16")

    def is_fp64_supported(self) -> bool:
        return self._property("has_fp64")  # integrated and Arc GPUs have none

    # Ranges: Intel's profilers read ITT marks, in builds of torch that have them.

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        if _ITT.is_available():
            _ITT.range_push(msg)
        else:
            super().range_push(msg, domain, category)

    def range_pop(self, domain: str | None = None) -> None:
        if _ITT.is_available():
            _ITT.range_pop()
        else:
            super().range_pop(domain)

    # Pinned memory: torch's, or page-aligned from the asynchronous I/O op.

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True, *, align_bytes: int = 1
    ) -> torch.Tensor:
        """As the base class; align_bytes=0 gives page-aligned locked memory, which direct file I/O needs.

        Raises:
            UsageError: align_bytes is neither 0 nor 1.
            CapabilityError: align_bytes=0, and the asynchronous I/O op is not there.
        """
        make_copy, align_bytes = self._pin_arguments(make_copy, align_bytes)
        if align_bytes not in (0, 1):
            raise UsageError(f"pin_memory(align_bytes={align_bytes}): must be 1, or 0 for page-aligned memory")
        if align_bytes == 1:
            return super().pin_memory(tensor, make_copy, match_shape)
        return self._page_aligned.pin(tensor, make_copy, match_shape)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor in self._page_aligned or super().is_pinned(tensor)

    def unpin_memory(self, tensor: torch.Tensor) -> bool | None:
        """Give page-aligned locked memory back now; other pinned memory goes with its tensor."""
        self._page_aligned.free(tensor)
        return super().unpin_memory(tensor)
