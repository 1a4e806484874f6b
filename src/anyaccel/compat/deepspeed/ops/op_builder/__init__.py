# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops.op_builder: the builders of the accelerator in use, by name."""

from __future__ import annotations

from ..._cover import cover, not_covered

# Accelerators of other packages ask whether the builders are DeepSpeed's.
__deepspeed__ = True

cover(globals(), {"OpBuilder": ".ops.op_builder.builder:OpBuilder"}, ("all_ops", "builder", "cpu"))
_rest = globals()["__getattr__"]


def __getattr__(name: str) -> object:
    if not name.endswith("Builder") or name == "OpBuilder":
        return _rest(name)
    from anyaccel.accelerator import get_accelerator
    from anyaccel.errors import NotCoveredAttributeError

    builder = get_accelerator().get_op_builder(name)
    if builder is None:
        raise NotCoveredAttributeError(
            f"accelerator {get_accelerator()._name!r} has no {name}. {not_covered(f'deepspeed.ops.op_builder.{name}')}"
        )
    return builder
