# SPDX-License-Identifier: Apache-2.0
"""SyncBatchNorm, which torch has for GPUs only."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.port.module import Module, dotted, last_name
from anyaccel.port.rule import Match, Rule, Tier

RULE = Rule(
    code="ACC404",
    title="SyncBatchNorm",
    tier=Tier.UNSAFE,
    why="torch has it for GPUs only. Without it each process normalises by its own batch, so that with "
    "several processes results differ.",
    before="model = nn.SyncBatchNorm.convert_sync_batchnorm(model)",
    after="model = nn.SyncBatchNorm.convert_sync_batchnorm(model) "
    'if get_accelerator().device_name() != "cpu" else model',
    left="norm = nn.SyncBatchNorm(64)",
)


@RULE.on_node(cst.Call)
def find(module: Module, node: cst.Call) -> Iterator[Match]:
    """The conversion of a model, or the layer itself."""
    name = last_name(node.func)
    if name == "SyncBatchNorm":
        yield Match(node, "`SyncBatchNorm`: not fixed: torch has it for GPUs only", needs_cuda=True)
    elif name == "convert_sync_batchnorm" and not isinstance(module.parent(node), cst.IfExp):
        argument = dotted(node.args[0].value) if node.args else ""
        closing = f' if {module.method("device_name")} != "cpu" else {argument}'
        safe_place = isinstance(module.parent(node), cst.Assign | cst.Return)
        edits = (module.after(node, closing),) if argument and safe_place else ()
        yield Match(node, "`convert_sync_batchnorm`, which a CPU has not; use it where there is a device", edits)
