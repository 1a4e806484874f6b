# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops.lion."""

from __future__ import annotations

from anyaccel.ops.lion import FusedLion

from ..._cover import cover
from .cpu_lion import DeepSpeedCPULion

__all__ = ["DeepSpeedCPULion", "FusedLion"]

cover(globals(), {}, ("cpu_lion", "fused_lion"))
