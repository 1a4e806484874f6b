# SPDX-License-Identifier: Apache-2.0
"""Meta's training and inference accelerator. torch.mtia is a part of torch; its hardware build is not public."""

from __future__ import annotations

from typing import ClassVar

import torch

from anyaccel.accelerator.base import DeviceIndex
from anyaccel.accelerator.spec import BackendSpec, Capabilities, Capability, WithoutTorch
from anyaccel.accelerator.torch_device import TorchDeviceAccelerator

_NOT_THERE = "torch.mtia has no such function"


class MtiaAccelerator(TorchDeviceAccelerator):
    """torch.mtia."""

    spec: ClassVar[BackendSpec] = BackendSpec(
        name="mtia",
        device_type="mtia",
        torch_module="torch.mtia",
        install="install a build of torch with MTIA support",
        order=110,
        why="a part of torch, like cuda after it",
        graph_class="MTIAGraph",
        op_builders="anyaccel.ops.builders.host",
        capabilities=Capabilities(
            absent={
                Capability.RESERVED_MEMORY: _NOT_THERE,
                "max_memory_reserved": _NOT_THERE,
                "available_memory": _NOT_THERE,
                "mem_get_info": _NOT_THERE,
                "is_current_stream_capturing": _NOT_THERE,
                Capability.COLLECTIVES: "torch.distributed registers no backend for mtia",
            }
        ),
        without_torch=WithoutTorch(place=100),
    )

    _BUILD = "a build of torch with MTIA support"

    @classmethod
    def _is_built(cls) -> bool:
        return bool(torch.mtia._is_compiled())

    def total_memory(self, device_index: DeviceIndex = None) -> int:
        # The only module whose properties are a dict.
        return int(self._vendor("get_device_properties")(self._index(device_index))["total_memory"])
