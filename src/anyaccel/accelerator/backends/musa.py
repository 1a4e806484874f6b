# SPDX-License-Identifier: Apache-2.0
"""Moore Threads GPUs, through torch_musa."""

from __future__ import annotations

from typing import ClassVar

from anyaccel.accelerator.spec import BackendSpec, CollectiveBackend, WithoutTorch
from anyaccel.accelerator.torch_device import TorchDeviceAccelerator


class MusaAccelerator(TorchDeviceAccelerator):
    """torch.musa."""

    spec: ClassVar[BackendSpec] = BackendSpec(
        name="musa",
        device_type="musa",
        torch_module="torch.musa",
        package="torch_musa",
        install="install the Moore Threads driver and the MUSA toolkit, and torch_musa for this version of torch",
        order=100,
        why="before cuda, since importing torch_musa replaces parts of torch.cuda",
        collectives=(CollectiveBackend("mccl"),),
        visible_devices=("MUSA_VISIBLE_DEVICES",),
        export_prefixes=("MCCL", "MUSA", "LD_LIBRARY", "PATH"),
        graph_class="MUSAGraph",
        op_builders="anyaccel.ops.builders.host",
        # The container guide of the vendor names the files; nobody has tried it here.
        without_torch=WithoutTorch(device_files=("/dev", "mtgpu.", "0x1ed5"), distributions=("torch-musa",)),
    )
