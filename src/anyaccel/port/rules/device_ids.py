# SPDX-License-Identifier: Apache-2.0
"""Devices of processes: device_ids of DistributedDataParallel, device_id of init_process_group."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.port.module import Module, last_name
from anyaccel.port.rule import Match, Rule, Tier

RULE = Rule(
    code="ACC403",
    title="device_ids of DistributedDataParallel, device_id of init_process_group",
    tier=Tier.SAFE,
    why="torch takes them for devices with an index, and refuses them for the CPU.",
    before="model = DistributedDataParallel(model, device_ids=[rank])",
    after="model = DistributedDataParallel("
    'model, device_ids=[rank] if get_accelerator().device_name() != "cpu" else None)',
)
_ARGUMENTS: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("DistributedDataParallel", "DDP"), ("device_ids", "output_device")
)
_ARGUMENTS["init_process_group"] = ("device_id",)
_SIMPLE = cst.List | cst.Name | cst.Attribute | cst.Call | cst.Integer | cst.Subscript


@RULE.on_node(cst.Call)
def find(module: Module, node: cst.Call) -> Iterator[Match]:
    """DistributedDataParallel(model, device_ids=[i], output_device=i) and its like."""
    name = module.full_name(node.func).rpartition(".")[2] or last_name(node.func)
    for arg in node.args:
        if arg.keyword is None or arg.keyword.value not in _ARGUMENTS.get(name, ()):
            continue
        value = arg.value
        if module.source(value) == "None" or ".device_name()" in module.code(value):
            continue
        opening = () if isinstance(value, _SIMPLE) else (module.before(value, "("),)
        closing = f'{")" if opening else ""} if {module.method("device_name")} != "cpu" else None'
        message = f"`{arg.keyword.value}=`, which a CPU has not; use it where there is a device"
        yield Match(value, message, (*opening, module.after(value, closing)))
