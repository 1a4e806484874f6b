# SPDX-License-Identifier: Apache-2.0
"""deepspeed.accelerator.npu_accelerator."""

from __future__ import annotations

from anyaccel.accelerator.backends.npu import NpuAccelerator as NPU_Accelerator

from .._cover import cover
from .abstract_accelerator import DeepSpeedAccelerator

__all__ = ["DeepSpeedAccelerator", "NPU_Accelerator"]

cover(globals())
