# SPDX-License-Identifier: Apache-2.0
"""Kunlunxin XPUs, through torch_xmlir, which presents them as torch.cuda."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import ClassVar

from anyaccel.accelerator.backends.cuda import CudaAccelerator
from anyaccel.accelerator.spec import BackendSpec, CollectiveBackend, WithoutTorch


class KlxpuAccelerator(CudaAccelerator):
    """torch.cuda of torch_xmlir: tensors are on "cuda", the library behind "nccl" is BKCL."""

    spec: ClassVar[BackendSpec] = replace(
        CudaAccelerator.spec,
        name="klxpu",
        package="torch_xmlir",
        install="install the Kunlunxin driver and runtime, and torch_xmlir for this version of torch",
        order=115,
        why="before cuda, since torch_xmlir makes torch.cuda look as if it had these devices",
        collectives=(CollectiveBackend("nccl"),),
        export_prefixes=("BKCL", "XPU", "XMLIR", "LD_LIBRARY", "PATH"),
        triton_backend="",  # the vendor's Triton is no part of torch_xmlir
        # The container guides of its users name the files; nobody has tried it here.
        without_torch=WithoutTorch(
            device_files=("/dev", "xpu", "0x1d22"),
            of_a_host=("XPU_VISIBLE_DEVICES",),
            distributions=("torch-xmlir",),
        ),
    )

    @classmethod
    def _is_built(cls) -> bool:
        return True  # the package brings it

    def use_host_timers(self) -> bool:
        # Events measure nothing unless the runtime is told to keep their times.
        return os.environ.get("XPU_EVENT_KL3_ENABLE", "0") != "1"

    def visible_devices_envs(self) -> list[str]:
        return list(self.spec.visible_devices)
