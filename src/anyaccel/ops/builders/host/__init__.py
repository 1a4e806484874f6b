# SPDX-License-Identifier: Apache-2.0
"""Builders of the ops that run on the host, whatever the accelerator; names are DeepSpeed's.

A package with its builders in a module, as DeepSpeed wants what `op_builder_dir()` names.
"""

from __future__ import annotations

from anyaccel.ops.builders.host.ops import AsyncIOBuilder, CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder

__all__ = ["AsyncIOBuilder", "CPUAdagradBuilder", "CPUAdamBuilder", "CPULionBuilder"]
