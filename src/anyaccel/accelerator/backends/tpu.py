# SPDX-License-Identifier: Apache-2.0
"""Google TPUs, through torch_tpu (TorchTPU), which adds torch.tpu; torch_xla's way to them is in xla.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from anyaccel.accelerator.base import DeviceIndex
from anyaccel.accelerator.spec import BackendSpec, Capabilities, Capability, CollectiveBackend, WithoutTorch
from anyaccel.accelerator.torch_device import TorchDeviceAccelerator

_NO_FIGURES = "torch.tpu tells how large the memory is, and not how much of it is in use"


class TpuAccelerator(TorchDeviceAccelerator):
    """torch.tpu. One process drives one device, which it cannot change."""

    spec: ClassVar[BackendSpec] = BackendSpec(
        name="tpu",
        device_type="tpu",
        torch_module="torch.tpu",
        package="torch_tpu",
        install="install torch_tpu for this version of torch, on a machine with a TPU",
        order=104,
        why="a vendor package that works beside torch",
        collectives=(CollectiveBackend("tpu_dist"),),
        visible_devices=("TPU_VISIBLE_DEVICES",),
        export_prefixes=("TPU_", "LIBTPU_", "LD_LIBRARY", "PATH"),
        compile_backend="tpu",
        op_builders="anyaccel.ops.builders.host",
        capabilities=Capabilities(
            absent={
                Capability.EVENTS: "those of torch.tpu tell that work has ended, and not when",
                Capability.GRAPHS: "torch.tpu captures no graphs",
                Capability.MEMORY_STATS: _NO_FIGURES,
                Capability.PEAK_MEMORY: _NO_FIGURES,
                Capability.RESERVED_MEMORY: _NO_FIGURES,
                "available_memory": _NO_FIGURES,
                "mem_get_info": _NO_FIGURES,
            }
        ),
        # Files of the driver for TPU v4 and older; newer ones are behind VFIO, whose files tell no maker.
        without_torch=WithoutTorch(
            device_files=("/dev", "accel", "0x1ae0"), of_a_host=("TPU_VISIBLE_CHIPS",), distributions=("torch-tpu",)
        ),
    )

    def use_host_timers(self) -> bool:
        return True

    def resolves_data_dependency(self) -> bool:
        return True  # the compiler orders operations by their data

    def empty_cache(self) -> None:
        return  # memory goes back to the runtime with its tensor

    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        return True  # its native type

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        callback()  # the vendor has no queue of calls for later

    def set_device(self, device_index: DeviceIndex) -> None:
        self._vendor("set_device")(self._index(device_index))  # takes no names with an index
