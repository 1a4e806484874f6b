# SPDX-License-Identifier: Apache-2.0
"""`"cuda" if torch.cuda.is_available() else "cpu"`: the choice that get_accelerator() has made already."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.port.module import Edit, Module, text_of
from anyaccel.port.rule import Match, Rule, Tier
from anyaccel.port.uses import device_text, name_edits

RULE = Rule(
    code="ACC111",
    title="a device picked by hand",
    tier=Tier.SAFE,
    why="get_accelerator() gives the CPU where there is no other device, so its name is the whole choice.",
    before="""\
d = "cuda" if torch.cuda.is_available() else "cpu"
e = torch.device(f"cuda:{i}" if torch.cuda.is_available() and i >= 0 else "cpu")""",
    after="""\
d = get_accelerator().device_name()
e = torch.device(get_accelerator().device_name(i) if get_accelerator().is_available() and i >= 0 else "cpu")""",
)


@RULE.on_node(cst.IfExp)
def find(module: Module, node: cst.IfExp) -> Iterator[Match]:
    """A choice between the names of a CUDA device and of the CPU that asks nothing but whether CUDA is there."""
    asked = isinstance(node.test, cst.Call) and module.full_name(node.test.func) == "torch.cuda.is_available"
    if not asked or "#" in module.source(node):
        return
    body, orelse = (_inside_device(module, each) for each in (node.body, node.orelse))
    if device_text(body) is None or text_of(orelse) != "cpu":
        return
    edits = (*name_edits(module, body), Edit(module.end(node.body), module.span(node)[1], ""))
    yield Match(node, "a device picked by hand; use `get_accelerator().device_name()`", edits, covers=(body,))


def _inside_device(module: Module, node: cst.BaseExpression) -> cst.BaseExpression:
    """`x` of torch.device(x)."""
    if isinstance(node, cst.Call) and len(node.args) == 1 and module.full_name(node.func) == "torch.device":
        return node.args[0].value
    return node
