# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops.op_builder.all_ops: every op of the accelerator in use."""

from __future__ import annotations

from anyaccel.accelerator import get_accelerator
from anyaccel.ops import OpBuilder, builders_in

from ..._cover import cover

__all__ = ["ALL_OPS", "accelerator_name", "op_builder_dir"]

accelerator_name = get_accelerator()._name
op_builder_dir = get_accelerator().op_builder_dir()
# Name of the op -> a builder of it.
ALL_OPS: dict[str, OpBuilder] = {
    builder.name: builder for builder in (kind() for kind in builders_in(op_builder_dir).values())
}

cover(globals())
