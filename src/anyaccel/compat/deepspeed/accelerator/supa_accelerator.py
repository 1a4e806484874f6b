# SPDX-License-Identifier: Apache-2.0
"""deepspeed.accelerator.supa_accelerator."""

from __future__ import annotations

from anyaccel.accelerator.backends.supa import SupaAccelerator as SUPA_Accelerator

from .._cover import cover
from .abstract_accelerator import DeepSpeedAccelerator

__all__ = ["DeepSpeedAccelerator", "SUPA_Accelerator"]

cover(globals())
