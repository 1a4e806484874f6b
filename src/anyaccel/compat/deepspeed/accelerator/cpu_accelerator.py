# SPDX-License-Identifier: Apache-2.0
"""deepspeed.accelerator.cpu_accelerator."""

from __future__ import annotations

from anyaccel.accelerator.backends.cpu import CpuAccelerator as CPU_Accelerator

from .._cover import cover
from .abstract_accelerator import DeepSpeedAccelerator

__all__ = ["CPU_Accelerator", "DeepSpeedAccelerator"]

cover(globals())
