# SPDX-License-Identifier: Apache-2.0
"""Builders of the CPU's ops: those of the host, and what DeepSpeed's CPU accelerator has beside them."""

from __future__ import annotations

from typing import ClassVar

from anyaccel.ops.builder import NotBuiltYet
from anyaccel.ops.builders.ccl import CCLCommBuilder
from anyaccel.ops.builders.host import AsyncIOBuilder, CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder
from anyaccel.ops.builders.optimizers import FusedAdamBuilder

__all__ = [
    "AsyncIOBuilder",
    "CCLCommBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "FusedAdamBuilder",
    "ShareMemCommBuilder",
]


class ShareMemCommBuilder(NotBuiltYet):
    """Collectives through shared memory."""

    NAME: ClassVar[str] = "deepspeed_shm_comm"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_SHM_COMM"
    REASON: ClassVar[str] = (
        "shared-memory collectives need no op: torch.distributed has them as backend shm once anyaccel.comm is imported"
    )
