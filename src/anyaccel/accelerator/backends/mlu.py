# SPDX-License-Identifier: Apache-2.0
"""Cambricon MLUs, through torch_mlu."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import ClassVar

from anyaccel.accelerator.spec import BackendSpec, CollectiveBackend
from anyaccel.accelerator.torch_device import TorchDeviceAccelerator
from anyaccel.vendors import VENDORS


class MluAccelerator(TorchDeviceAccelerator):
    """torch.mlu."""

    spec: ClassVar[BackendSpec] = BackendSpec(
        name="mlu",
        device_type="mlu",
        torch_module="torch.mlu",
        package=VENDORS["mlu"].package,
        install="install Cambricon Neuware and torch_mlu for this version of torch",
        order=80,
        why="a vendor package that works beside torch",
        collectives=(CollectiveBackend("cncl"),),
        visible_devices=VENDORS["mlu"].visible,
        export_prefixes=("NEUWARE_HOME", "CNCL", "LD_LIBRARY", "PATH"),
        graph_class="MLUGraph",
        range_module="cnpx",
        triton_backend="mlu",
        op_builders="anyaccel.ops.builders.host",
    )

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[int | str]
    ) -> None:
        super().set_visible_devices_envs(current_env, local_accelerator_ids)
        current_env.pop("CN_VISIBLE_DEVICES", None)  # torch_mlu reads it first, so it would undo the choice
