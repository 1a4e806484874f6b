# SPDX-License-Identifier: Apache-2.0
"""Builders of the CPU's ops: those of the host, and what DeepSpeed's CPU accelerator has beside them."""

from __future__ import annotations

from typing import ClassVar

from anyaccel.ops.builder import PythonOpBuilder
from anyaccel.ops.builders.ccl import CCLCommBuilder
from anyaccel.ops.builders.host import ops as host
from anyaccel.ops.builders.host.ops import *  # noqa: F403
from anyaccel.ops.builders.optimizers import FusedAdamBuilder, FusedLionBuilder

__all__ = ["CCLCommBuilder", "FusedAdamBuilder", "FusedLionBuilder", "ShareMemCommBuilder"]
__all__ += host.__all__


class ShareMemCommBuilder(PythonOpBuilder):
    """Collectives through shared memory; load() gives `anyaccel.comm.shm_op`, whose native part is in every wheel."""

    NAME: ClassVar[str] = "deepspeed_shm_comm"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_SHM_COMM"
    MODULE: ClassVar[str] = "anyaccel.comm.shm_op"
