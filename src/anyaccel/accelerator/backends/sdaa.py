# SPDX-License-Identifier: Apache-2.0
"""Tecorigin SDAA cards, through torch_sdaa. The vendor's sources are not public: names follow its public users."""

from __future__ import annotations

from typing import ClassVar

from anyaccel.accelerator.spec import BackendSpec, Capabilities, Capability, CollectiveBackend, WithoutTorch
from anyaccel.accelerator.torch_device import TorchDeviceAccelerator


class SdaaAccelerator(TorchDeviceAccelerator):
    """torch.sdaa."""

    spec: ClassVar[BackendSpec] = BackendSpec(
        name="sdaa",
        device_type="sdaa",
        torch_module="torch.sdaa",
        package="torch_sdaa",
        install="install the Tecorigin driver and runtime, and torch_sdaa for this version of torch",
        order=50,
        why="a vendor package that works beside torch",
        collectives=(CollectiveBackend("tccl"),),
        visible_devices=("SDAA_VISIBLE_DEVICES",),
        export_prefixes=("TCCL", "SDAA", "LD_LIBRARY", "PATH"),
        op_builders="anyaccel.ops.builders.host",
        capabilities=Capabilities(absent={Capability.GRAPHS: "torch_sdaa has no public API to capture a graph"}),
        # The container guide of the vendor names the files; nobody has tried it here.
        without_torch=WithoutTorch(device_files=("/dev", "tcaicard", ""), distributions=("torch-sdaa",)),
    )
