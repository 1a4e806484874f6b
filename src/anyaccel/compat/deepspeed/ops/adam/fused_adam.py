# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops.adam.fused_adam: anyaccel's has the same arguments."""

from __future__ import annotations

from anyaccel.ops.adam import FusedAdam

from ..._cover import cover

__all__ = ["FusedAdam"]

cover(globals())
