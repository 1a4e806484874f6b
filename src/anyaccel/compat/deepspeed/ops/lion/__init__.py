# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops.lion."""

from __future__ import annotations

from ..._cover import cover
from .cpu_lion import DeepSpeedCPULion

__all__ = ["DeepSpeedCPULion"]

cover(globals(), {}, ("cpu_lion",))
