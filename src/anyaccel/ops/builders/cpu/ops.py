# SPDX-License-Identifier: Apache-2.0
"""Builders of the CPU's ops: those of the host, and what DeepSpeed's CPU accelerator has beside them."""

from __future__ import annotations

from typing import Any, ClassVar

from anyaccel.ops.builder import OpBuilder
from anyaccel.ops.builders.ccl import CCLCommBuilder
from anyaccel.ops.builders.host import ops as host
from anyaccel.ops.builders.host.ops import *  # noqa: F403
from anyaccel.ops.builders.optimizers import FusedAdamBuilder

__all__ = ["CCLCommBuilder", "FusedAdamBuilder", "ShareMemCommBuilder"]
__all__ += host.__all__


class ShareMemCommBuilder(OpBuilder):
    """Collectives through shared memory; load() gives `anyaccel.comm.shm_op`, whose native part is in every wheel."""

    NAME: ClassVar[str] = "deepspeed_shm_comm"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_SHM_COMM"
    ACCELERATOR: ClassVar[str] = "cpu"

    def absolute_name(self) -> str:
        """The module, which needs no building."""
        return "anyaccel.comm.shm_op"

    def sources(self) -> list[str]:
        """None."""
        return []

    def jit_load(self, verbose: bool = False) -> Any:
        """As load(): there is nothing to build."""
        return self.load(verbose)
