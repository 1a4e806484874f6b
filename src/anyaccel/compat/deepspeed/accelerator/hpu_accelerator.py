# SPDX-License-Identifier: Apache-2.0
"""deepspeed.accelerator.hpu_accelerator."""

from __future__ import annotations

from anyaccel.accelerator.backends.hpu import HpuAccelerator as HPU_Accelerator

from .._cover import cover
from .abstract_accelerator import DeepSpeedAccelerator

__all__ = ["DeepSpeedAccelerator", "HPU_Accelerator"]

cover(globals())
