# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.current_device(), which is an index, and with CUDA a device too."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.port.module import Module
from anyaccel.port.rule import Match, Rule, Tier
from anyaccel.port.uses import is_device, use_of, uses_of_variable

RULE = Rule(
    code="ACC102",
    title="torch.cuda.current_device()",
    tier=Tier.SAFE,
    why="It is an index, which torch also takes for a CUDA device. The use decides: `current_device_name()` "
    "where torch is given a device, at once or through a variable that has no other use, and "
    "`current_device()` everywhere else.",
    before="""\
x = torch.empty(2, device=torch.cuda.current_device())
rank = torch.cuda.current_device()""",
    after="""\
x = torch.empty(2, device=get_accelerator().current_device_name())
rank = get_accelerator().current_device()""",
)


@RULE.on_name("torch.cuda.current_device")
def find(module: Module, node: cst.Name | cst.Attribute, full: str) -> Iterator[Match]:
    """A use of it."""
    call = module.parent(node)
    name = "current_device"
    if isinstance(call, cst.Call) and call.func is node and _as_device(module, call):
        name = "current_device_name"
    yield Match(
        node, f"`{full}`; use `get_accelerator().{name}`", (module.replace(node, f"{module.accelerator}().{name}"),)
    )


def _as_device(module: Module, call: cst.Call) -> bool:
    if is_device(module, call):
        return True
    assign = use_of(module, call).node
    uses = [is_device(module, each) for each in uses_of_variable(module, assign)]
    return bool(uses) and all(
        uses
    )  # else it stays the index that it is compared or printed as; ACC202 names its devices
