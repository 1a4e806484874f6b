# SPDX-License-Identifier: Apache-2.0
"""Biren GPUs, through torch_supa."""

from __future__ import annotations

from typing import ClassVar

from anyaccel.accelerator.spec import (
    BackendSpec,
    Capabilities,
    Capability,
    CollectiveBackend,
    HostRegistration,
    WithoutTorch,
)
from anyaccel.accelerator.torch_device import TorchDeviceAccelerator


class SupaAccelerator(TorchDeviceAccelerator):
    """torch.supa."""

    spec: ClassVar[BackendSpec] = BackendSpec(
        name="supa",
        device_type="supa",
        torch_module="torch.supa",
        package="torch_supa",
        install="install the Biren driver and SDK, and torch_supa for this version of torch",
        order=90,
        why="before cuda, since torch_supa makes torch.cuda look as if it had these devices",
        collectives=(CollectiveBackend("bccl"),),
        visible_devices=("SUPA_VISIBLE_DEVICES",),
        export_prefixes=("BCCL", "BIREN", "SUPA", "LD_LIBRARY", "PATH"),
        graph_class="SUPAGraph",
        range_module="brtx",
        host_registration=HostRegistration("supart", "supaHostRegister", "supaHostUnregister"),
        op_builders="anyaccel.ops.builders.host",
        capabilities=Capabilities(absent={Capability.FP64: "the device has no float64, torch_supa makes it float32"}),
        # The container guide of the vendor names the files; nobody has tried it here.
        without_torch=WithoutTorch(device_files=("/dev/biren", "card_", "0x1ee0"), distributions=("torch-supa",)),
    )
