# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops.op_builder.cpu: the builders of the CPU."""

from __future__ import annotations

from anyaccel.ops.builders.cpu.ops import *  # noqa: F403
from anyaccel.ops.builders.cpu.ops import __all__ as __all__

from ..._cover import cover

cover(globals())
