# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops.op_builder.cpu: the builders of the CPU."""

from __future__ import annotations

from anyaccel.ops.builders.cpu import (
    AsyncIOBuilder,
    CCLCommBuilder,
    CPUAdagradBuilder,
    CPUAdamBuilder,
    CPULionBuilder,
    FusedAdamBuilder,
    ShareMemCommBuilder,
)

from ..._cover import cover

__all__ = [
    "AsyncIOBuilder",
    "CCLCommBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "FusedAdamBuilder",
    "ShareMemCommBuilder",
]

cover(globals())
