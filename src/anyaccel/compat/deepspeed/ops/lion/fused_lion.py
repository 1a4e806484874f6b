# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops.lion.fused_lion: anyaccel's has the same arguments."""

from __future__ import annotations

from anyaccel.ops.lion import FusedLion

from ..._cover import cover

__all__ = ["FusedLion"]

cover(globals())
