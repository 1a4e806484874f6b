# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops.op_builder.builder: base classes of op builders."""

from __future__ import annotations

from anyaccel.ops import CPUOpBuilder, OpBuilder

from ..._cover import cover

__all__ = ["CPUOpBuilder", "OpBuilder"]

cover(globals())
