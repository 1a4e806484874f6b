# SPDX-License-Identifier: Apache-2.0
"""Huawei Ascend NPUs, through torch_npu."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import ClassVar

from anyaccel.accelerator.spec import BackendSpec, CollectiveBackend, HostRegistration, WithoutTorch
from anyaccel.accelerator.torch_device import TorchDeviceAccelerator

_MAPPED = 0x2  # ACL_HOST_REG_MAPPED: page-locked and visible to the device


class NpuAccelerator(TorchDeviceAccelerator):
    """torch.npu."""

    spec: ClassVar[BackendSpec] = BackendSpec(
        name="npu",
        device_type="npu",
        torch_module="torch.npu",
        package="torch_npu",
        install="install the Ascend driver and CANN toolkit, and `pip install torch_npu` for this version of torch",
        order=40,
        why="a vendor package that works beside torch",
        collectives=(CollectiveBackend("hccl"),),
        visible_devices=("ASCEND_RT_VISIBLE_DEVICES",),
        export_prefixes=("ASCEND", "HCCL", "LD_LIBRARY", "PATH"),
        graph_class="NPUGraph",
        range_module="mstx",
        host_registration=HostRegistration("npurt", "npuHostRegister", "npuHostUnregister", _MAPPED),
        triton_backend="ascend",
        op_builders="anyaccel.ops.builders.host",
        # The container guides of the vendor name the files, whose numbers need not start at 0.
        without_torch=WithoutTorch(
            place=20,
            device_files=("/dev", "davinci", "0x19e5"),
            of_a_host=("ASCEND_VISIBLE_DEVICES",),
            distributions=("torch-npu",),
        ),
    )

    def pin_memory_alignment(self) -> int:
        return 4096  # the driver registers whole pages

    def runtime_versions(self) -> dict[str, str]:
        """The CANN toolkit that ASCEND_HOME_PATH points at, read from its install info."""
        home = os.environ.get("ASCEND_HOME_PATH")
        if not home:
            return {"cann": "unknown: ASCEND_HOME_PATH is not set; source the toolkit's set_env.sh"}
        # At the top, or one level down in the folder of the machine's architecture.
        for info in sorted([*Path(home).glob("ascend_*_install.info"), *Path(home).glob("*/ascend_*_install.info")]):
            version = re.search(r"^version=(\S+)", info.read_text(errors="replace"), re.MULTILINE)
            if version:
                return {"cann": version[1]}
        return {"cann": f"unknown: no ascend_*_install.info with a version below {home}"}
