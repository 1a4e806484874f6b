# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops.lion."""

from __future__ import annotations

from ..._cover import cover
from .cpu_lion import DeepSpeedCPULion
from .fused_lion import FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]

cover(globals(), {}, ("cpu_lion", "fused_lion"))
