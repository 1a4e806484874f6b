# SPDX-License-Identifier: Apache-2.0
"""Cambricon MLUs, through torch_mlu."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import ClassVar

from anyaccel.accelerator.spec import BackendSpec, CollectiveBackend, WithoutTorch
from anyaccel.accelerator.torch_device import TorchDeviceAccelerator


class MluAccelerator(TorchDeviceAccelerator):
    """torch.mlu."""

    spec: ClassVar[BackendSpec] = BackendSpec(
        name="mlu",
        device_type="mlu",
        torch_module="torch.mlu",
        package="torch_mlu",
        install="install Cambricon Neuware and torch_mlu for this version of torch",
        order=80,
        why="a vendor package that works beside torch",
        collectives=(CollectiveBackend("cncl"),),
        visible_devices=("MLU_VISIBLE_DEVICES",),
        export_prefixes=("NEUWARE_HOME", "CNCL", "LD_LIBRARY", "PATH"),
        graph_class="MLUGraph",
        range_module="cnpx",
        triton_backend="mlu",
        op_builders="anyaccel.ops.builders.host",
        # The device plugin of the vendor names the files, whose numbers need not start at 0.
        without_torch=WithoutTorch(device_files=("/dev", "cambricon_dev", "0xcabc"), distributions=("torch-mlu",)),
    )

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[int | str]
    ) -> None:
        super().set_visible_devices_envs(current_env, local_accelerator_ids)
        current_env.pop("CN_VISIBLE_DEVICES", None)  # torch_mlu reads it first, so it would undo the choice
