# SPDX-License-Identifier: Apache-2.0
"""Copies on the host that are kept: where the CPU is the accelerator, .cpu() gives the tensor itself."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.port.module import Module, last_name
from anyaccel.port.rule import Match, Rule, Tier
from anyaccel.port.uses import use_of

RULE = Rule(
    code="ACC304",
    title="a copy on the host that is kept",
    tier=Tier.REPORT,
    why="On a GPU `.cpu()` copies. On a CPU it gives the tensor itself, so what is kept (the best weights, a "
    "log) changes when the tensor is written to. Write `.cpu().clone()`, which is right everywhere.",
    left="best = {k: v.cpu() for k, v in model.state_dict().items()}",
)


@RULE.on_node(cst.Call)
def find(module: Module, node: cst.Call) -> Iterator[Match]:
    """x.cpu() that is collected or kept in an attribute."""
    if last_name(node.func) != "cpu" or not isinstance(node.func, cst.Attribute) or node.args:
        return
    use = use_of(module, node)
    kept = use.kind in ("DictComp", "ListComp", "DictElement") and not _is_saved(module, use.node)
    if use.kind == "Assign" and isinstance(use.node, cst.Assign):
        kept = isinstance(use.node.targets[0].target, cst.Attribute | cst.Subscript)
    kept = kept or (use.call is not None and last_name(use.call.func) in ("append", "extend", "put"))
    if kept and last_name(node.func.value) != "clone":
        yield Match(
            node, "`.cpu()` is kept: on a CPU it is no copy; write `.cpu().clone()` where the tensor changes later"
        )


def _is_saved(module: Module, collection: cst.CSTNode) -> bool:
    """Whether a collection goes to a file at once: torch.save({k: v.cpu() for ...})."""
    call = module.enclosing(collection, cst.Call, cst.BaseSmallStatement)
    return isinstance(call, cst.Call) and last_name(call.func) == "save"
