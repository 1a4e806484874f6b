# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops.adam."""

from __future__ import annotations

from anyaccel.ops.adam import FusedAdam

from ..._cover import cover
from .cpu_adam import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]

cover(globals(), {}, ("cpu_adam", "fused_adam"))
