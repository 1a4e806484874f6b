# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.nvtx."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.cuda_names import NVTX
from anyaccel.port.module import Module
from anyaccel.port.rule import Match, Rule, Tier

RULE = Rule(
    code="ACC105",
    title="torch.cuda.nvtx",
    tier=Tier.SAFE,
    why="Ranges go to the vendor's profiler, or to torch.profiler. The depth that NVTX returns is not there.",
    before="torch.cuda.nvtx.range_push('step')\ntorch.cuda.nvtx.range_pop()",
    after="get_accelerator().range_push('step')\nget_accelerator().range_pop()",
    left="with torch.cuda.nvtx.range('step'):\n    step()",
)


@RULE.on_name("torch.cuda.nvtx.")
def find(module: Module, node: cst.Name | cst.Attribute, full: str) -> Iterator[Match]:
    """One of its functions."""
    method = NVTX.get(full.rpartition(".")[2])
    call = module.parent(node)
    if method is None or not isinstance(module.parent(call), cst.Expr):
        advice = "range_push() and range_pop() in statements of their own are the accelerator's"
        yield Match(node, f"`{full}`: not fixed: {advice}", needs_cuda=True)
        return
    use = f"{module.accelerator}().{method.name}"
    yield Match(node, f"`{full}`; use `get_accelerator().{method.name}(...)`", (module.replace(node, use),))
