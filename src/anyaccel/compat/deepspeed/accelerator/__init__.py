# SPDX-License-Identifier: Apache-2.0
"""deepspeed.accelerator: the accelerator of the process. Importing it does not import torch."""

from __future__ import annotations

from anyaccel.accelerator import get_accelerator, is_current_accelerator_supported

from .._cover import cover
from .._names import ACCELERATORS
from .real_accelerator import set_accelerator

__all__ = ["get_accelerator", "is_current_accelerator_supported", "set_accelerator"]

cover(
    globals(),
    {"DeepSpeedAccelerator": ".accelerator.abstract_accelerator:DeepSpeedAccelerator"},
    ("abstract_accelerator", "real_accelerator", *(f"{name}_accelerator" for name in ACCELERATORS)),
)
