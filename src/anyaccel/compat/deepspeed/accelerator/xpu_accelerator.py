# SPDX-License-Identifier: Apache-2.0
"""deepspeed.accelerator.xpu_accelerator."""

from __future__ import annotations

from anyaccel.accelerator.backends.xpu import XpuAccelerator as XPU_Accelerator

from .._cover import cover
from .abstract_accelerator import DeepSpeedAccelerator

__all__ = ["DeepSpeedAccelerator", "XPU_Accelerator"]

cover(globals())
