# SPDX-License-Identifier: Apache-2.0
"""deepspeed.accelerator.mps_accelerator."""

from __future__ import annotations

from anyaccel.accelerator.backends.mps import MpsAccelerator as MPS_Accelerator

from .._cover import cover
from .abstract_accelerator import DeepSpeedAccelerator

__all__ = ["DeepSpeedAccelerator", "MPS_Accelerator"]

cover(globals())
