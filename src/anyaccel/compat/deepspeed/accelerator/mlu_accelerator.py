# SPDX-License-Identifier: Apache-2.0
"""deepspeed.accelerator.mlu_accelerator."""

from __future__ import annotations

from anyaccel.accelerator.backends.mlu import MluAccelerator as MLU_Accelerator

from .._cover import cover
from .abstract_accelerator import DeepSpeedAccelerator

__all__ = ["DeepSpeedAccelerator", "MLU_Accelerator"]

cover(globals())
