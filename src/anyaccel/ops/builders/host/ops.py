# SPDX-License-Identifier: Apache-2.0
"""Builders of the ops that run on the host, whatever the accelerator; names are DeepSpeed's."""

from __future__ import annotations

from anyaccel.ops.builders.aio import AsyncIOBuilder
from anyaccel.ops.builders.optimizers import CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder
from anyaccel.ops.builders.pin_memory import PinMemoryBuilder

__all__ = ["AsyncIOBuilder", "CPUAdagradBuilder", "CPUAdamBuilder", "CPULionBuilder", "PinMemoryBuilder"]
