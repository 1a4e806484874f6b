# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs, and AMD GPUs through ROCm, whose torch build presents itself as torch.cuda."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from anyaccel import env
from anyaccel.accelerator.base import DeviceIndex
from anyaccel.accelerator.spec import BackendSpec, CollectiveBackend, HostRegistration, WithoutTorch
from anyaccel.accelerator.torch_device import TorchDeviceAccelerator


def _is_rocm() -> bool:
    return torch.version.hip is not None


class CudaAccelerator(TorchDeviceAccelerator):
    """torch.cuda."""

    spec: ClassVar[BackendSpec] = BackendSpec(
        name="cuda",
        device_type="cuda",
        torch_module="torch.cuda",
        install="install a CUDA or ROCm build of torch (https://pytorch.org/get-started) and the GPU driver",
        order=120,
        why="after the vendors that redirect torch.cuda to their own device",
        collectives=(CollectiveBackend("nccl", in_graphs=True),),  # RCCL goes by the same name
        visible_devices=("CUDA_VISIBLE_DEVICES",),
        export_prefixes=("NCCL", "TORCH_NCCL"),
        graph_class="CUDAGraph",
        range_module="nvtx",  # roctx on ROCm, behind the same name
        host_registration=HostRegistration("cudart", "cudaHostRegister", "cudaHostUnregister"),
        triton_backend="nvidia",
        op_builders="anyaccel.ops.builders.host",
        without_torch=WithoutTorch(
            place=10,
            of_a_host=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
            environment=("CUDA_", "HIP_", "ROCM_", "HSA_"),
        ),
    )

    _BUILD = "a CUDA or ROCm build of torch"

    @classmethod
    def _is_built(cls) -> bool:
        return torch.version.cuda is not None or _is_rocm()

    def _major(self) -> int:
        """Major compute capability of the current device; gfx generation on ROCm."""
        return int(self._vendor("get_device_capability")()[0])

    def device_properties(self, device_index: DeviceIndex = None) -> Any:
        return self._vendor("get_device_properties")(self._index(device_index))  # with all that is CUDA's own

    def mem_get_info(self, device_index: DeviceIndex = None) -> tuple[int, int]:
        free, total = self._vendor("mem_get_info")(device_index)
        return int(free), int(total)

    def memory_summary(self, device_index: DeviceIndex = None, abbreviated: bool = False) -> str:
        return str(self._vendor("memory_summary")(device_index, abbreviated))

    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        # With including_emulation it is True on every card, also where bf16 is emulated and slow.
        return bool(self._vendor("is_bf16_supported")(including_emulation=including_emulation))

    def is_fp16_supported(self) -> bool:
        # 7 is the first with tensor cores; 6 computes fp16 but is only allowed on request, as in DeepSpeed.
        lowest = 6 if env.DS_ALLOW_DEPRECATED_FP16.get() else 7
        return _is_rocm() or self._major() >= lowest

    def is_triton_supported(self) -> bool:
        # On ROCm the import of pytorch-triton-rocm breaks torch's device API, so Triton is not used there.
        return not _is_rocm() and super().is_triton_supported() and self._major() >= 8

    def prefer_triton_grouped_mm(self) -> bool:
        # torch._grouped_mm has fast kernels from compute capability 9 on.
        return self.is_triton_supported() and self._major() < 9 and hasattr(torch, "_grouped_mm")

    def visible_devices_envs(self) -> list[str]:
        # On ROCm HIP_VISIBLE_DEVICES wins over CUDA_VISIBLE_DEVICES, which the runtime also reads.
        return ["HIP_VISIBLE_DEVICES"] if _is_rocm() else super().visible_devices_envs()
