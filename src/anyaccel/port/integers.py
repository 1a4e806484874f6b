# SPDX-License-Identifier: Apache-2.0
"""The rule on whole numbers where a device is wanted, which torch takes for indices of CUDA devices."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.port.candidate import Candidate
from anyaccel.port.context import Context

# What programs call the index of a process's device.
_INDICES = {"rank", "local_rank", "gpu", "gpu_id", "device_id", "device_index", "gpu_index", "device_ids"}


def find(ctx: Context, node: cst.Call) -> Iterator[Candidate]:
    """torch.device(0), device=0 of torch's functions, x.to(0) and x.to(rank)."""
    full = ctx.tree.imported(node.func) or ""
    if full == "torch.device":
        places = [arg.value for arg in node.args[:1] if arg.keyword is None]
    elif full.startswith("torch.") and not full.startswith("torch.cuda."):
        places = [arg.value for arg in node.args if arg.keyword is not None and arg.keyword.value == "device"]
    elif isinstance(node.func, cst.Attribute) and node.func.attr.value == "to" and not full:
        places = [arg.value for arg in node.args[:1] if arg.keyword is None or arg.keyword.value == "device"]
    else:
        return
    for place in places:
        if _is_index(place):
            shown = ctx.tree.module.code_for_node(place)
            advice = f"`{shown}` is the index of a CUDA device: not fixed: give device_name({shown})"
            yield Candidate(node, "ACC203", advice, breaks=False)


def _is_index(value: cst.BaseExpression) -> bool:
    if isinstance(value, cst.Subscript):
        value = value.value
    if isinstance(value, cst.Attribute):
        value = value.attr
    return isinstance(value, cst.Integer) or (isinstance(value, cst.Name) and value.value in _INDICES)
