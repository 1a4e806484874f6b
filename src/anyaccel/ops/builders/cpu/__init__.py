# SPDX-License-Identifier: Apache-2.0
"""Builders of the CPU's ops.

A package with its builders in a module, as DeepSpeed wants what `op_builder_dir()` names.
"""

from __future__ import annotations

from anyaccel.ops.builders.cpu.ops import (
    AsyncIOBuilder,
    CCLCommBuilder,
    CPUAdagradBuilder,
    CPUAdamBuilder,
    CPULionBuilder,
    FusedAdamBuilder,
    ShareMemCommBuilder,
)

__all__ = [
    "AsyncIOBuilder",
    "CCLCommBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "FusedAdamBuilder",
    "ShareMemCommBuilder",
]
