# SPDX-License-Identifier: Apache-2.0
"""AWS Trainium, through the torch_neuronx that adds torch.neuron (2.13 and newer); older ones are for xla.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from anyaccel.accelerator.base import DeviceIndex
from anyaccel.accelerator.spec import BackendSpec, Capabilities, Capability, CollectiveBackend, WithoutTorch
from anyaccel.accelerator.torch_device import TorchDeviceAccelerator

_NOT_THERE = "torch.neuron has no such function"


class NeuronAccelerator(TorchDeviceAccelerator):
    """torch.neuron. A device is a NeuronCore, or a logical one of several."""

    spec: ClassVar[BackendSpec] = BackendSpec(
        name="neuron",
        device_type="neuron",
        torch_module="torch.neuron",
        package="torch_neuronx",
        install="install the AWS Neuron driver and runtime, and torch-neuronx for this version of torch",
        order=102,
        why="a vendor package that works beside torch",
        collectives=(CollectiveBackend("neuron"),),
        visible_devices=("NEURON_RT_VISIBLE_CORES",),
        export_prefixes=("NEURON", "FI_", "LD_LIBRARY", "PATH"),
        compile_backend="neuron",
        op_builders="anyaccel.ops.builders.host",
        capabilities=Capabilities(
            absent={
                Capability.GRAPHS: "torch.neuron captures no graphs",
                Capability.FP64: "the device has no float64",
                "default_generator": _NOT_THERE,
                "available_memory": _NOT_THERE,
                "mem_get_info": _NOT_THERE,
            }
        ),
        # No device files: the kernel shows chips, and a process is given cores of them.
        without_torch=WithoutTorch(distributions=("torch-neuronx",)),
    )

    def set_device(self, device_index: DeviceIndex) -> None:
        self._vendor("set_device")(self._index(device_index))  # takes no names

    def Stream(self, device: DeviceIndex = None, priority: int = 0, **ids: Any) -> Any:
        # The vendor's takes arguments by name only.
        return self._vendor("Stream")(device=self.device(self._index(device)), priority=priority, **ids)

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        callback()  # the vendor has no queue of calls for later
