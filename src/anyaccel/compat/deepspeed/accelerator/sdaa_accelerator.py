# SPDX-License-Identifier: Apache-2.0
"""deepspeed.accelerator.sdaa_accelerator."""

from __future__ import annotations

from anyaccel.accelerator.backends.sdaa import SdaaAccelerator as SDAA_Accelerator

from .._cover import cover
from .abstract_accelerator import DeepSpeedAccelerator

__all__ = ["DeepSpeedAccelerator", "SDAA_Accelerator"]

cover(globals())
