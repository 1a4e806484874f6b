# SPDX-License-Identifier: Apache-2.0
"""Rules on what wraps a model for several processes."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.port import usage
from anyaccel.port.candidate import Candidate
from anyaccel.port.context import Context
from anyaccel.port.mixed import asks_for_devices
from anyaccel.port.syntax import both, call, dotted, is_simple

_WRAPPERS = {"DistributedDataParallel", "DDP"}


def find_wrapper(ctx: Context, node: cst.Call) -> Iterator[Candidate]:
    """DistributedDataParallel(model, device_ids=[i], output_device=i), which take devices of GPUs only."""
    full = ctx.tree.imported(node.func)
    name = usage.last_name(full or dotted(node.func) or "")
    if name not in _WRAPPERS or (full is not None and not full.startswith(("torch.", "."))):
        return
    keywords = {each.keyword.value: each for each in node.args if each.keyword is not None}
    devices = keywords.get("device_ids")
    listed = None if devices is None else _chosen(ctx, devices.value)
    if devices is None or not isinstance(listed, cst.List) or len(listed.elements) != 1:
        return
    output = keywords.get("output_device")
    placed = None if output is None else _chosen(ctx, output.value)
    if output is not None and (placed is None or not (is_simple(placed) or isinstance(placed, cst.Call))):
        return
    for arg in (devices, *([output] if output is not None else [])):

        def fix(old: cst.CSTNode) -> cst.CSTNode:
            assert isinstance(old, cst.Arg)
            other = cst.ComparisonTarget(cst.NotEqual(), cst.SimpleString('"cpu"'))
            asked = cst.Comparison(call(ctx.method("device_name")), [other])
            if isinstance(old.value, cst.IfExp):
                return old.with_changes(value=old.value.with_changes(test=both(old.value.test, asked)))
            return old.with_changes(value=cst.IfExp(asked, old.value, cst.Name("None")))

        message = 'a CPU has no device_ids; use `[...] if get_accelerator().device_name() != "cpu" else None`'
        yield Candidate(arg.value, "ACC403", f"`{arg.keyword.value if arg.keyword else ''}=`: {message}", fix, arg)


def _chosen(ctx: Context, value: cst.BaseExpression) -> cst.BaseExpression | None:
    """The value itself, or what `[i] if condition else None` chooses; None for another choice, or one of devices."""
    if not isinstance(value, cst.IfExp):
        return value
    if asks_for_devices(ctx, value.test):
        return None
    return value.body if isinstance(value.orelse, cst.Name) and value.orelse.value == "None" else None
